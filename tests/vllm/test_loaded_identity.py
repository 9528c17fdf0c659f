"""What ranks say of weights and adapters in their memory, and what the scheduler's half makes of it. No engine runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from nixl_offload.errors import NamespaceError
from nixl_offload.vllm.adapters import AdapterName, AdapterTable, AdapterUse, LoadedAdapters
from nixl_offload.vllm.messages import WeightsAnswer
from nixl_offload.vllm.rank_identity import adapter_digest, make_factors, piece_sums, sources_of, weights_digest
from nixl_offload.vllm.weights_check import ANSWER_WAIT_S, Trust, WeightsCheck

NAME = AdapterName("mine", "/adapters/mine")


def model(*, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Sizes that are no whole number of words, a transposed view, and a buffer of either kind."""
    made = torch.nn.Module()
    numbers = torch.Generator().manual_seed(3)
    made.weight = torch.nn.Parameter(torch.randn(33, 7, generator=numbers).to(dtype))
    made.turned = torch.nn.Parameter(torch.randn(8, 5, generator=numbers).to(dtype).t())
    made.holed = torch.nn.Parameter(torch.randn(6, 10, generator=numbers).to(dtype)[:, ::2])
    made.register_buffer("scale", torch.ones(3))
    made.register_buffer("table", torch.ones(3), persistent=False)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_any_byte_of_the_weights_counts(dtype: torch.dtype) -> None:
    """Buffers that are part of the checkpoint and drafts count, too."""
    right = weights_digest([model(dtype=dtype)])
    assert weights_digest([model(dtype=dtype)]) == right
    for name, last in (("weight", (32, 6)), ("weight", (0, 0)), ("turned", (4, 7)), ("holed", (5, 4))):
        other = model(dtype=dtype)
        parameter = other.get_parameter(name)
        with torch.no_grad():
            parameter[last] = 0.5 if float(parameter[last]) != 0.5 else 1.0
        assert weights_digest([other]) != right, name
    for name in ("scale", "table"):
        other = model(dtype=dtype)
        other.get_buffer(name)[2] = 2.0
        assert (weights_digest([other]) != right) is (name == "scale")
    assert weights_digest([model(dtype=dtype), model(dtype=dtype)]) != right


def test_sums_of_pieces_tell_what_changed() -> None:
    """As on a device: values that change places, within a piece and between pieces, a value in another piece, the last
    bytes of a piece that is no whole number of words, and a tensor that begins anywhere.
    """
    factors = make_factors(4)
    assert torch.equal(factors, make_factors(8)[:4])
    right = torch.arange(1, 38, dtype=torch.float32).to(torch.bfloat16)

    def sums(tensor: torch.Tensor) -> list[int]:
        return [int(each) for each in piece_sums(tensor, factors)]

    others = []
    for first, second in ((0, 9), (0, 30), (35, 36)):
        other = right.clone()
        other[[first, second]] = right[[second, first]]
        others.append(sums(other))
    for turned in (*([at] for at in range(len(right))), [1, 3], [3, 5], [0, 4]):
        other = right.clone()
        other[turned] *= -1
        others.append(sums(other))
    assert sums(right) not in others
    assert len({tuple(each) for each in others}) == len(others)
    shifted = torch.cat([right[:1], right])[1:]
    assert shifted.data_ptr() % 4
    assert sums(shifted) == sums(right)


def test_where_weights_come_from_is_named() -> None:
    """What the loader reads after a model's own files, and code that may read anything."""
    plain, ultravox = model(), model()
    ultravox.secondary_weights = [DefaultModelLoader.Source(model_or_path="org/llm", revision=None)]
    assert sources_of([plain]) == ()
    assert sources_of([plain, ultravox]) == ("org/llm",)
    plain.layer = type("Layer", (torch.nn.Module,), {"__module__": "transformers_modules.org.repo.abc.layers"})()
    assert sources_of([plain]) == ("transformers_modules.org.repo.abc.layers",)


def adapter(*, number: int = 1, value: float = 0.5, scaling: float | None = None) -> LoRAModel:
    a, b = torch.full((8, 4), 0.25), torch.full((6, 8), value)
    return LoRAModel(number, 8, {"layers.0.v_proj": LoRALayerWeights("layers.0.v_proj", 8, 16, a, b, scaling)})


def test_an_adapter_is_what_it_holds() -> None:
    """Not the number that this server gave it; and an object that nobody knows is an error."""
    right = adapter_digest(adapter())
    assert adapter_digest(adapter(number=7)) == right
    assert adapter_digest(adapter(value=0.75)) != right
    assert adapter_digest(adapter(scaling=1.0)) != right
    with pytest.raises(NamespaceError, match="nobody knows how to compare"):
        adapter_digest(SimpleNamespace(content=object()))


def test_an_adapter_that_cannot_be_told_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests are neither stored nor loaded, and a job whose keys stand for other content is refused."""
    rank, request = LoadedAdapters(), LoRARequest("mine", 1, "/adapters/mine")
    rank.loaded(request, SimpleNamespace(content=object()))
    assert "neither stored nor loaded" in caplog.text
    assert rank.take() == {NAME: (None,)}
    table = AdapterTable(world_size=1)
    table.hear({0: {NAME: (None,)}}, "cache")
    assert table.find(NAME, "cache") is None
    rank.loaded(request, adapter())
    rank.loaded(request, adapter(value=0.75))
    ((first, second),) = rank.take().values()
    assert first is not None
    assert second is not None
    assert not rank.take()
    assert rank.agrees(None, 0)
    assert rank.agrees(AdapterUse(NAME, (second,)), 0)
    assert not rank.agrees(AdapterUse(NAME, (first,)), 0)
    assert not rank.agrees(AdapterUse(AdapterName("other", "/"), (second,)), 0)


def test_keys_stand_for_what_all_ranks_have() -> None:
    table = AdapterTable(world_size=2)
    assert table.may_come(NAME, step=5, heard_steps=4), "ranks tell of what they have loaded with this step"
    assert not table.may_come(NAME, step=6, heard_steps=5), "nobody has loaded it"
    assert not table.hear({1: {NAME: ("b",)}}, "cache")
    assert table.find(NAME, "cache") is None
    assert not table.hear({0: {NAME: ("a",)}}, "cache")
    use = table.find(NAME, "cache")
    assert use == AdapterUse(NAME, ("a", "b"))
    tags = {use.tag(bytes(32)), use.tag(bytes(31) + b"\1"), AdapterUse(NAME, ("b", "a")).tag(bytes(32))}
    assert len(tags) == 3
    assert {len(tag) for tag in tags} == {32}
    assert not table.hear({0: {NAME: ("a",)}}, "cache"), "read again, and the same"
    assert table.hear({0: {NAME: ("c",)}}, "cache") == {NAME}
    assert table.find(NAME, "cache") is None, "vLLM's cache holds blocks of both"
    assert table.find(NAME, "another cache") == AdapterUse(NAME, ("c", "b"))
    assert table.hear({0: {NAME: ("d", "c")}}, "another cache") == {NAME}, "in between it was another one"


def check(*first: str | None) -> WeightsCheck:
    made = WeightsCheck(len(first))
    made.look("cache 0")
    made.start(first)
    return made


def answer(of: WeightsCheck, *digests: str | None) -> bool:
    of.want(0.0)
    question = of.take_question()
    assert question
    assert not of.take_question(), "once"
    return of.hear({rank: WeightsAnswer(question, digest) for rank, digest in enumerate(digests)})


def test_weights_are_asked_for_after_a_reset() -> None:
    weights = check("a", "b")
    weights.look("cache 0")
    assert weights.trust is Trust.SETTLED
    weights.look("cache 1")
    assert weights.trust is Trust.ASKED
    assert not weights.take_question(), "not before somebody wants to know: the weights may be asleep"
    assert not answer(weights, "a", "b")
    assert (weights.trust, weights.generation) == (Trust.SETTLED, None)
    weights.look("cache 2")
    assert answer(weights, "a", "c")
    other = weights.generation
    assert other
    weights.suspect()
    weights.want(0.0)
    old_question = weights.take_question()
    weights.suspect()
    assert not weights.hear({rank: WeightsAnswer(old_question, "x") for rank in range(2)}), "of a question before"
    assert weights.trust is Trust.ASKED
    assert not answer(weights, "a", "c")
    assert weights.generation == other
    weights.look("cache 3")
    assert answer(weights, "a", "b")
    assert weights.generation is None, "those of the start again"


def test_weights_that_nobody_knows_are_shared_with_nobody() -> None:
    weights = check(None)
    generations = set()
    for number in range(1, 4):
        weights.look(f"cache {number}")
        assert answer(weights, None)
        generations.add(weights.generation)
    assert len(generations) == 3
    assert None not in generations


def test_ranks_that_do_not_answer_block_nobody_for_ever() -> None:
    weights = check("a")
    weights.suspect()
    weights.want(10.0)
    weights.want(10.0 + ANSWER_WAIT_S)
    assert weights.trust is Trust.ASKED
    weights.want(10.1 + ANSWER_WAIT_S)
    assert weights.trust is Trust.BLOCKED


def test_with_shards_what_ranks_agree_on_counts_once() -> None:
    """So engines with other numbers of ranks have the same keys; ranks that disagree still count, in their order."""
    table = AdapterTable(world_size=2)
    table.of_any_size = True
    table.hear({0: {NAME: ("a",)}, 1: {NAME: ("a",)}}, "cache")
    use = table.find(NAME, "cache")
    assert use is not None
    assert use.tag(bytes(32)) == AdapterUse(NAME, ("a",)).tag(bytes(32))
    assert AdapterUse(NAME, ("a", "a")).tag(bytes(32)) != use.tag(bytes(32)), "rank by rank they count as ever"
    unlike = {AdapterUse(NAME, digests, of_any_size=True).tag(bytes(32)) for digests in (("a", "b"), ("b", "a"))}
    assert len(unlike | {use.tag(bytes(32))}) == 3
