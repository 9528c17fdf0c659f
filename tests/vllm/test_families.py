"""Proves for models whose layers keep a state or look back a window only that a chunk is used whole or not at all.

A load brings the state of a boundary, the end of a window, and the attention before it. Where one of them is damaged,
alone or with the others, the request is computed anew: tokens and logprobs are those of a vLLM without us, also where a
prompt is found in part, and after a restart. ``python -m tests.families`` does the same for many families on every kind
of tier, and proves there that damage which nobody looks for would show.
"""

from __future__ import annotations

import pytest

from tests.families.layouts import LAYOUTS, try_layout
from tests.families.models import FAMILIES
from tests.families.trial import CHUNKS, TAIL, Trial
from tests.vllm.harness import Workshop


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
    cells = {cell.case: cell for cell in trial.run("slab", control=False)}
    assert {case: (cell.verdict, cell.note) for case, cell in cells.items()} == dict.fromkeys(cells, ("same", ""))
    alone = [f"damaged-{group}" for group in range(len(reference.groups))] if len(reference.groups) > 1 else []
    assert list(cells) == ["cold", "hit", "partial", "damaged", *alone, "restart"]
    whole = sum(len(prompt) - TAIL for prompt in reference.prompts)
    hits = [cells[case].hit_tokens for case in ("cold", "hit", "partial", "restart")]
    assert hits == [0, whole, whole // CHUNKS, whole]


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
