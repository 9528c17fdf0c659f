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
from typing import Final

from tests.prove.cells import Cell, Outcome
from tests.vllm.fuzz_families import FAMILIES, MEDIA, RUNNERS, start_family, write_base

BLOCKS: Final = (60, 40)
NEED_MANY_BLOCKS: Final = ("large blocks, all kept", "drafts and windows")


def cells(seed: int) -> Iterator[Cell]:
    """Yield a cell for each family of models and model runner."""
    for family in FAMILIES:
        for runner, is_second in RUNNERS.items():
            yield Cell(f"{family}/{runner}", partial(fuzz, family, is_second, seed), limit_s=600.0)


def fuzz(name: str, second_runner: bool, seed: int) -> Outcome:
    """Try an engine on each medium, with more and fewer blocks by turns."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    from tests.vllm.fuzz_rig import Fuzz, fuzzed

    outcome, model = (
        Outcome(counts={"answers": 0, "stored chunks": 0, "loaded bytes": 0, "fetched bytes": 0}),
        write_base(Path("model").absolute()),
    )
    with fuzzed():
        for at, medium in enumerate(MEDIA):
            blocks, number = BLOCKS[0 if name in NEED_MANY_BLOCKS else at % 2], 100 * seed + at
            path = Path(f"{at}").absolute()
            engine = start_family(FAMILIES[name], medium, model, path, second_runner=second_runner, blocks=blocks)
            try:
                Fuzz(engine, number, adapters=FAMILIES[name].adapters).run(60)
                outcome.wrong += [f"{medium}, {blocks} blocks, seed {number}: {what}" for what in engine.rank.wrong]
                outcome.leaks += [f"{medium}, {blocks} blocks, seed {number}: {what}" for what in engine.left()]
            finally:
                outcome.counts["answers"] += engine.rank.answers
                outcome.counts["stored chunks"] += engine.rank.stored
                outcome.counts["loaded bytes"] += engine.rank.moved["load"]
                outcome.counts["fetched bytes"] += engine.rank.moved["fetch"]
                engine.close()
    if not outcome.counts["loaded bytes"]:
        outcome.missed.append("nothing was loaded from any medium")
    return outcome
