"""The table of model families: every family on every kind of tier, whole and damaged, and through its memory alone:
``make families``. Each answer is compared, tokens and logprobs, with that of a vLLM without a connector.
"""

from __future__ import annotations

import re

import pytest

from examples.demo.engine import EngineError
from tests.families.models import FAMILIES, LAYOUTS
from tests.families.trial import TIERS, Trial, try_layout, why
from tests.s3.servers import RcloneServer
from tests.vllm.harness import Workshop

FINDING = re.compile(r"[A-Z]{4}")
"""In what came out of a case."""
ROWS = [f"{name}/{tier}" for name in FAMILIES for tier in TIERS] + [f"memory of {name}/slab" for name in LAYOUTS]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", ROWS)
def test_family(row: str, workshop: Workshop, server: RcloneServer, capsys: pytest.CaptureFixture[str]) -> None:
    name, _, tier = row.rpartition("/")
    layout, family = LAYOUTS.get(name.removeprefix("memory of ")), FAMILIES.get(name)
    cells = []
    try:
        for cell in Trial(workshop, family, server).run(tier) if family else try_layout(workshop, layout):
            cells.append(str(cell))  # noqa: PERF401 - what came before an engine died is shown, too
    except EngineError as error:
        cells.append(f"DIED: {why(error)}")
    with capsys.disabled():
        print(f"\n| {row} | {'; '.join(cells)} |")
    assert not any(FINDING.search(cell.replace("Spec", "")) for cell in cells)
