"""Proves, for models whose layers keep a state or only a window, that a chunk is used whole or not at all; and that a
bucket, or a shared directory, is one prefix cache for engines that know nothing of each other.

A load brings the state of a boundary, the end of a window, and the attention before it. Where one of them is damaged,
alone or with the others, the request is computed anew: tokens and logprobs are those of a vLLM without us, also where a
prompt is found in part, by another engine, and after a restart. ``make families`` does the same for many
families on every kind of tier, and proves there that damage which nobody looks for would show.
"""

from __future__ import annotations

import pytest

from tests.families.models import FAMILIES, LAYOUTS
from tests.families.trial import CHUNKS, TAIL, Trial, try_layout
from tests.s3.servers import RcloneServer
from tests.vllm.damage import ENGINE_OPTIONS, Reference, chunk_prompts, hits
from tests.vllm.harness import Workshop
from tests.vllm.media import MOVERS, bucket, tree


@pytest.mark.parametrize(
    ("family", "tier", "kinds"),
    [
        ("qwen3-next", "slab", {"MambaSpec", "FullAttentionSpec"}),
        ("nemotron-h", "slab", {"MambaSpec", "FullAttentionSpec"}),
        ("mistral-window", "slab", {"SlidingWindowSpec"}),
        ("llama", "tree", {"FullAttentionSpec"}),
        ("llama", "obj", {"FullAttentionSpec"}),
        ("llama", "obstore", {"FullAttentionSpec"}),
        ("llama-windows", "tree", {"SlidingWindowSpec", "FullAttentionSpec"}),
        ("llama-windows", "obj", {"SlidingWindowSpec", "FullAttentionSpec"}),
        ("llama-windows", "slab", {"SlidingWindowSpec", "FullAttentionSpec"}),
    ],
)
def test_whole_or_not_at_all(workshop: Workshop, server: RcloneServer, family: str, tier: str, kinds: set[str]) -> None:
    """``kinds`` of KV cache groups: GDN and Mamba 2 are of one kind. With windows on a slab, loads of three requests
    fail at once; what these recompute in one batch has other shapes, so that logprobs are only close from then on.
    """
    together = (family, tier) == ("llama-windows", "slab")
    trial = Trial(workshop, FAMILIES[family], server, prompts=3 if together else 1)
    assert set(trial.groups) == kinds
    cells = {cell.case: cell for cell in trial.run(tier, control=False, together=together)}
    allowed = {("same", ""), ("close", "")} if together else {("same", "")}
    assert {(cell.verdict, cell.note) for cell in cells.values()} <= allowed, list(map(str, cells.values()))
    alone = [f"damaged-{group}" for group in range(len(trial.groups))] if len(trial.groups) > 1 else []
    beside = [] if tier == "slab" else ["other", "back"]
    assert list(cells) == ["cold", "hit", "partial", "damaged", *alone, *beside, "restart"]
    whole = sum(len(prompt) - TAIL for prompt in trial.prompts)
    found = {case: cells[case].hit_tokens for case in ("hit", *beside, "restart")}
    assert found == dict.fromkeys(found, whole)
    # Of windows and state vLLM keeps what a prompt's end needs: one that ends earlier is not found before it was asked.
    ways = 2 if kinds == {"FullAttentionSpec"} else 1
    assert (cells["cold"].hit_tokens, cells["partial"].hit_tokens) == (0, ways * whole // CHUNKS)


@pytest.mark.parametrize("name", ["tree", MOVERS[0]])
def test_a_reset_counts_for_one_engine(
    workshop: Workshop, server: RcloneServer, reference: Reference, name: str
) -> None:
    """After ``reset_prefix_cache`` nothing stored before is served to this engine; other engines lose nothing."""
    medium = tree(workshop.scratch / "reset") if name == "tree" else bucket(server, name, prefix="reset")
    asked = chunk_prompts(1, seed=203)
    one, other = (
        workshop.start_engine(connector=medium.config(), environment=medium.environment, **ENGINE_OPTIONS)
        for _ in range(2)
    )
    reference.check(one, asked)
    assert one.settle()
    reference.until_loaded(other, asked)
    before = medium.shards()
    assert one.reset_prefix_cache(connector=True)
    assert hits(reference.check(one, asked)) == 0
    reference.until_loaded(other, asked)
    assert one.settle()
    assert medium.shards() == before
    reference.until_loaded(one, asked)
    one.stop()
    other.stop()


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
