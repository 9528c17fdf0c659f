"""Runs families of models on kinds of tiers, and through their memory alone; prints a table: ``make families``.

Each answer is compared, tokens and logprobs, with that of a vLLM without a connector.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from examples.demo.engine import EngineError
from tests.families.models import FAMILIES, LAYOUTS
from tests.families.trial import TIERS, Cell, Trial, try_layout, why
from tests.s3.servers import RcloneServer
from tests.vllm.harness import Workshop, start_zygote

FINDING = re.compile(r"[A-Z]{4}")
"""In what came out of a case."""


def main(arguments: list[str] | None = None) -> int:
    """Try what is wanted; print the table. Returns 1 when something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("--only", default="", help="rows with this in their names, such as llama or /slab")
    parser.add_argument("--list", action="store_true", help="print the names, try none")
    chosen = parser.parse_args(arguments)
    rows = [f"{name}/{tier}" for name in FAMILIES for tier in TIERS] + [f"memory of {name}/slab" for name in LAYOUTS]
    wanted = [row for row in rows if chosen.only in row]
    if chosen.list:
        print(*wanted, sep="\n")
        return 0
    print("| on | what came out |\n| --- | --- |", flush=True)
    found = 0
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RcloneServer())
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="nixl-offload-families-"))
        zygote = stack.enter_context(contextlib.closing(start_zygote(Path(scratch))))
        for row in wanted:
            with contextlib.closing(Workshop(zygote)) as workshop:
                cells = [str(cell) for cell in _cells(row, workshop, server)]
            found += any(FINDING.search(cell.replace("Spec", "")) for cell in cells)
            print(f"| {row} | {'; '.join(cells)} |", flush=True)
    return 1 if found else 0


def _cells(row: str, workshop: Workshop, server: RcloneServer) -> Iterator[Cell | str]:
    name, _, tier = row.rpartition("/")
    try:
        if name in FAMILIES:
            yield from Trial(workshop, FAMILIES[name], server).run(tier)
        else:
            yield from try_layout(workshop, LAYOUTS[name.removeprefix("memory of ")])
    except EngineError as error:
        yield f"DIED: {why(error)}"


if __name__ == "__main__":
    sys.exit(main())
