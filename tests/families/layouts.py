"""Models that vLLM's CPU build starts and cannot run, or whose cached KV it cannot use: their KV caches alone.

vLLM makes the model, asks its layers for their KV cache specs, groups and allocates them; nothing is ever computed. For
each KV cache group bytes go through the rank's worker, out and back, and are compared where vLLM's layers see them.

Threading: one thread. Ownership: engines end with each layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from nixl_offload.chunk.header import HEADER_BYTES
from tests.families.checkpoints import CPU_MLA, write_mla
from tests.families.models import FAMILIES, Family
from tests.families.trial import Cell
from tests.prove.happenings import DAMAGES, Piece
from tests.vllm.harness import Workshop, file_tier


def _deepseek_mtp(directory: Path) -> Path:
    """A DeepSeek-V3 without experts, with one layer that predicts a token more; config alone."""
    file = write_mla(directory) / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": config["num_hidden_layers"] + 1,
        "n_group": 1,
        "topk_group": 1,
    }
    file.write_text(json.dumps(config))
    return directory


_SERVED: Final = {"serve_without_prefix_caching": True}
"""Of our config: for MLA vLLM's CPU build turns prefix caching off."""
_MTP: Final = {**CPU_MLA, "method": "mtp", "num_speculative_tokens": 1}
LAYOUTS: Final = {
    family.name: family
    for family in (
        FAMILIES["qwen3-next MTP"],
        FAMILIES["jamba"],
        replace(FAMILIES["deepseek-mla"], fields=_SERVED),
        Family("deepseek MTP", _deepseek_mtp, {**CPU_MLA, "load_format": "dummy", "speculative_config": _MTP}, _SERVED),
    )
}


def try_layout(workshop: Workshop, family: Family) -> Iterator[Cell]:
    """Yield two cells for each KV cache group: its bytes after a round trip, and after damage. Raises EngineError."""
    name = family.name.replace(" ", "-")
    path = workshop.scratch / f"layout-{name}"
    with workshop.start_engine(
        model=family.write(workshop.scratch / f"layout-of-{name}"),
        connector=file_tier(path, **family.fields),
        worker_extension_cls="tests.families.round_trip.RoundTripExtension",
        **{"max_num_batched_tokens": 2048, **family.options},
    ) as engine:
        for group, (kind, layers) in enumerate(engine.worker("kv_groups")[0]):
            [(offsets, chunk_bytes, wrong)] = engine.worker("round_trip", group)
            about = f"{kind}, {layers} layers, {chunk_bytes} bytes a chunk"
            yield Cell(f"bytes-{group}", "WRONG" if wrong else "same", note="; ".join(wrong) or about)
            [slab] = path.glob("*/*.slab")
            for offset in offsets:
                piece = Piece(slab, offset, HEADER_BYTES + chunk_bytes)
                DAMAGES["flipped"](piece, piece, 0.5)
            [wrong] = engine.worker("load_damaged", group)
            yield Cell(f"damaged-{group}", "WRONG" if wrong else "same", note="; ".join(wrong))
        engine.stop()
