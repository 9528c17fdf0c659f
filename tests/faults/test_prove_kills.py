"""A little of the proof's part ``kills``, with other seeds: see tests/prove/kills."""

from __future__ import annotations

from pathlib import Path

from tests.prove.running import cells_of
from tests.prove.trying import try_cells

MODULE = "tests.prove.kills"
SEED = 20
WANTED = ("slab/two ranks, io_uring/0", "slab/behind memory/1", "tree/two servers/0")


def test_after_each_kill_every_chunk_is_whole_or_a_miss(tmp_path: Path) -> None:
    cells = [cell for cell in cells_of(MODULE, SEED) if cell.name in WANTED]
    assert len(cells) == len(WANTED)
    outcomes = try_cells("kills", MODULE, cells, SEED, tmp_path)
    assert [name for name, outcome in outcomes.items() if not outcome.is_good()] == [], outcomes
    assert sum(outcome.counts["kills"] for outcome in outcomes.values()) == 4 * len(WANTED)
    assert all(outcome.counts["whole"] and outcome.counts["sure"] for outcome in outcomes.values()), outcomes
