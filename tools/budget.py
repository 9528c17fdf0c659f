"""``make lint-budget``: fails where a room of the code has more lines or characters than ``tools/budget.toml`` allows.

A room is a folder of the package, the files beside them, tests or benchmarks. Numbers only fall: lower them in the
commit that shrinks a room. ``python -m tools.budget --renew`` writes today's; targets stay as they are.
Threading: one thread.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = "nixl_offload"
SLACK_LINES: Final = 100
"""A room may be so much smaller than its budget before the budget must be lowered."""


def measure(root: Path) -> dict[str, dict[str, int]]:
    """Return the lines and characters of the Python files of each room."""
    lines, chars = Counter[str](), Counter[str]()
    for top in (PACKAGE, "tests", "benchmarks"):
        for file in sorted((root / top).rglob("*.py")):
            parts = file.relative_to(root).parts
            room = top if top != PACKAGE else f"{PACKAGE}/{parts[1]}" if len(parts) > 2 else f"{PACKAGE}/*.py"
            text = file.read_text()
            lines[room] += text.count("\n")
            chars[room] += len(text)
    return {room: {"lines": lines[room], "chars": chars[room]} for room in lines}


def problems(found: dict[str, dict[str, int]], budget: dict[str, dict[str, int]]) -> list[str]:
    """Return a sentence for each number that is above its budget, or so far below that the budget must fall."""
    said = [f"{room}: has no budget" for room in found if room not in budget]
    for room, allowed in budget.items():
        has = found.get(room, {"lines": 0, "chars": 0})
        said += [
            f"{room}: {has[unit]} {unit}, {has[unit] - allowed[unit]} above its budget of {allowed[unit]}"
            for unit in ("lines", "chars")
            if has[unit] > allowed[unit]
        ]
        if (under := allowed["lines"] - has["lines"]) > SLACK_LINES:
            said.append(f"{room}: {under} lines below its budget; lower it: python -m tools.budget --renew")
    return said


def renewed(text: str, found: dict[str, dict[str, int]]) -> str:
    """Return the budget file with the numbers found; comments and targets stay."""
    for room, has in found.items():
        numbers = f"lines = {has['lines']}, chars = {has['chars']}"
        text = re.sub(rf'(?m)^("{re.escape(room)}" = {{ )lines = \d+, chars = \d+', rf"\g<1>{numbers}", text)
    return text


def main(root: Path = ROOT) -> int:
    """Check, or write with ``--renew``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", action="store_true", help="write today's numbers")
    file, found = root / "tools" / "budget.toml", measure(root)
    if parser.parse_args().renew:
        file.write_text(renewed(file.read_text(), found))
    said = problems(found, tomllib.loads(file.read_text()))
    print(*said, sep="\n", end="\n" if said else "", file=sys.stderr)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
