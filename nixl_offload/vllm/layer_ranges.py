"""Into which ranges a model's layers are cut, and which of them a pipeline stage has.

By default at the boundaries of the server's own stages; or as vLLM would cut for another number of them, so that
servers of that many, and of one, share. The layers of a draft model belong to the last range: they run on the last
stage.

Threading: pure functions; vLLM's rule looks at VLLM_PP_LAYER_PARTITION.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import extract_layer_index

from nixl_offload.chunk.shards import ONE_RANGE, LayerCut, cut_layers
from nixl_offload.errors import LayoutError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_DRAFT: Final = "draft_model."
"""How the names of layers of a draft model begin that count from 0; others go on from the model's."""


def layer_cut(vllm_config: VllmConfig, wanted: int | None) -> LayerCut | str:
    """Return how layers are cut; or why they are not, as a clause.

    ``wanted``: for how many stages; None: for this server's own.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1 and wanted in (None, 1):
        return ONE_RANGE
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    own = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    try:
        asked = own if wanted is None else [get_pp_indices(layers, stage, wanted) for stage in range(wanted)]
    except ValueError as error:  # VLLM_PP_LAYER_PARTITION is for another number of stages
        return f"vLLM does not cut {layers} layers for {wanted} pipeline stages: {error}"
    cut = cut_layers(asked, own)
    if cut is None:
        begins = ", ".join(str(begin) for begin, _ in own[1:])
        return (
            f"this server's pipeline stages begin at layers {begins}, and `layers: {wanted}` cuts at "
            f"{', '.join(str(begin) for begin, _ in asked[1:]) or 'none'}"
        )
    return cut


def range_of(name: str, cut: LayerCut, layers: int) -> int:
    """Return the range of layers that a layer belongs to. ``layers``: of the model, without those of a draft model.

    Raises LayoutError where its name does not tell.
    """
    last = len(cut.begins) - 1
    if not last or name.startswith(_DRAFT):
        return last
    try:
        number = extract_layer_index(name)
    except AssertionError as error:
        raise LayoutError(f"which layer {name} is cannot be told from its name") from error
    return last if number >= layers else bisect_right(cut.begins, number) - 1
