"""Proves for models whose layers keep a state or look back a window only that a chunk is used whole or not at all.

A load brings the state of a boundary, the end of a window, and the attention before it. Where one of them is damaged,
alone or with the others, the request is computed anew: tokens and logprobs are those of a vLLM without us, also where a
prompt is found in part, and after a restart. ``python -m tests.families`` does the same for many families on every kind
of tier, and proves there that damage which nobody looks for would show.
"""

from __future__ import annotations

import random

import pytest

from tests.families.layouts import LAYOUTS, try_layout
from tests.families.models import FAMILIES
from tests.families.trial import CHUNKS, TAIL, Trial
from tests.vllm.harness import Workshop, file_tier


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3-next", {"MambaSpec", "FullAttentionSpec"}),
        ("nemotron-h", {"MambaSpec", "FullAttentionSpec"}),
        ("mistral-window", {"SlidingWindowSpec"}),
    ],
)
def test_whole_or_not_at_all(workshop: Workshop, family: str, kinds: set[str]) -> None:
    """On a slab, which outlives the engine. ``kinds`` of KV cache groups: GDN and Mamba 2 are of one kind."""
    trial = Trial(workshop, FAMILIES[family], prompts=1)
    reference = trial.reference()
    assert set(reference.groups) == kinds
    cells = {cell.case: cell for cell in trial.run("slab", ["partial", "damaged", "restart"])}
    assert {case: (cell.verdict, cell.note) for case, cell in cells.items()} == dict.fromkeys(cells, ("same", ""))
    alone = [f"damaged-{group}" for group in range(len(reference.groups))] if len(reference.groups) > 1 else []
    assert list(cells) == ["cold", "hit", "partial", "damaged", *alone, "restart"]
    whole = sum(len(prompt) - TAIL for prompt in reference.prompts)
    hits = [cells[case].hit_tokens for case in ("cold", "hit", "partial", "restart")]
    assert hits == [0, whole, whole // CHUNKS, whole]


@pytest.mark.long
def test_prompts_that_begin_alike_hit_what_they_hit_in_vllms_own_cache(workshop: Workshop) -> None:
    """To the last bit: a request loads the states that vLLM would have kept, and is computed in the same pieces. Blocks
    of 288 tokens are no multiple of the 64 that vLLM's scan of a state goes by, so other pieces give other bits.
    """
    family, source = FAMILIES["qwen3-next TP 2"], random.Random(17)
    options = {
        **family.options,
        "block_size": 32,
        "prefix_match_unit": 32,
        "model": family.write(workshop.scratch / "state"),
    }
    document, other = (source.choices(range(2, 1000), k=1024) for _ in range(2))
    shares = [(document, 928, 41), (document, 288, 299), (document, 608, 82), (document, 608, 123)]
    shares += [(other, 640, 21), (other, 928, 64), (other, 864, 300)]
    prompts = [shared[:tokens] + source.choices(range(2, 1000), k=own) for shared, tokens, own in shares]
    with workshop.start_engine(**options) as engine:
        right = engine.generate(prompts)
    answers = []
    with workshop.start_engine(connector=file_tier(workshop.scratch / "parts"), **options) as engine:
        assert engine.about["block_size"] == 288
        for prompt in prompts:
            answers += engine.generate([prompt])
            assert engine.settle()
            engine.reset_prefix_cache()
    assert [answer.external_hit_tokens for answer in answers] == [answer.cached_tokens for answer in right]
    assert [answer.cached_tokens for answer in right] == [0, 0, 288, 576, 0, 640, 864]
    assert [answer.same_as(own) for answer, own in zip(answers, right, strict=True)] == [True] * len(prompts)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("qwen3-next MTP", ["MambaSpec", "FullAttentionSpec"]), ("deepseek MTP", ["MLAAttentionSpec"])],
)
def test_the_memory_of_models_that_cannot_be_run_here(workshop: Workshop, family: str, kinds: list[str]) -> None:
    """Each group's bytes come back as they were, to where vLLM's layers look for them; damaged ones do not."""
    cells = {cell.case: cell for cell in try_layout(workshop, LAYOUTS[family])}
    assert {cell.verdict for cell in cells.values()} == {"same"}
    assert [cells[f"bytes-{group}"].note.partition(",")[0] for group in range(len(kinds))] == kinds
    assert len(cells) == 2 * len(kinds)
