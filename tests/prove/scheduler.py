"""vLLM's real scheduler and block pool with our two halves, and random users: ``tests.vllm.fuzz_rig``.

Each request that begins with tokens which it did not compute is compared block by block with what belongs there, and so
is each chunk that is stored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.prove.cells import Cell, Outcome

RUNNERS = ("first", "second")
MEDIA = ("memory", "slab", "tree", "chain")
BLOCKS = (60, 40)
NEED_MANY_BLOCKS = ("large blocks, all kept", "drafts and windows")
FAMILIES = (
    *("full", "windows", "windows, all kept", "mixed", "mixed, all kept", "chunked", "large blocks, all kept"),
    *("state", "state, all kept", "state, tails", "drafts", "drafts and windows"),
    *("drafts with windows", "adapters", "adapters and windows", "beside", "beside, windows"),
)


def cells(seed: int) -> Iterator[Cell]:
    """Yield a cell for each family of models and model runner."""
    for family in FAMILIES:
        for runner in RUNNERS:
            yield Cell(f"{family}/{runner} runner", partial(fuzz, family, runner == "second", seed), limit_s=600.0)


def fuzz(family: str, second_runner: bool, seed: int, engines: int = len(MEDIA)) -> Outcome:
    """Try so many engines, each on the next medium, with more and fewer blocks by turns."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    from tests.vllm.fuzz_families import FAMILIES as FAMILY
    from tests.vllm.fuzz_families import start_family, write_base
    from tests.vllm.fuzz_rig import Fuzz, fuzzed

    outcome, model = Outcome(counts={"answers": 0, "stored chunks": 0}), write_base(Path("model").absolute())
    with fuzzed():
        for at in range(engines):
            medium = MEDIA[at % len(MEDIA)]
            blocks = BLOCKS[0 if family in NEED_MANY_BLOCKS else at % 2]
            engine = start_family(
                FAMILY[family], medium, model, Path(f"{at}").absolute(), second_runner=second_runner, blocks=blocks
            )
            number = 100 * seed + at
            try:
                Fuzz(engine, number, adapters=FAMILY[family].adapters).run(60)
                outcome.wrong += [f"{medium}, {blocks} blocks, seed {number}: {what}" for what in engine.rank.wrong]
                outcome.leaks += [f"{medium}, {blocks} blocks, seed {number}: {what}" for what in engine.left()]
            finally:
                outcome.counts["answers"] += engine.rank.answers
                outcome.counts["stored chunks"] += engine.rank.stored
                engine.close()
    return outcome
