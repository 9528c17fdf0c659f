"""Runs families of models on kinds of tiers, on shared tiers that fail, and through their memory alone; prints a table:
``make families``, ``python -m tests.families``.

Each answer is compared, tokens and logprobs, with that of a vLLM without a connector. With ``--json`` results are
written as they come, and what the file has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.demo.engine import EngineError, quick_environment
from tests.families.faults import BUCKET_FAULTS, PLACES, try_place
from tests.families.features import FEATURES, try_feature
from tests.families.layouts import LAYOUTS, try_layout
from tests.families.media import TIERS
from tests.families.models import FAMILIES
from tests.families.trial import Cell, Trial, why
from tests.s3.servers import RcloneServer
from tests.vllm.harness import ONE_CORE, Workshop
from tests.vllm.zygote import Zygote

BAD = ("WRONG", "VACUOUS", "NOT REFUSED", "NOT PREEMPTED", "MISS", "NOT MET", "NOT FOUND AGAIN")
FAULTY = {f"{name} in trouble": FAMILIES[name] for name in ("nemotron-h", "qwen3-next")}
"""Families with state, whose shared tiers fail."""
MEMORY = {f"memory of {name}": family for name, family in LAYOUTS.items()}
Results = dict[str, dict[str, Any]]
"""``FAMILY/TIER`` -> ``cells`` by case, or ``failed``, and ``groups``."""


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing; print the table. Returns 1 when an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("--only", default="", help="rows with this in their names, such as llama, /slab or trouble")
    parser.add_argument("--list", action="store_true", help="print the names, try none")
    parser.add_argument("--json", type=Path, help="write results to this file as they come, and go on from it")
    parser.add_argument("--logs", type=Path, help="copy the engines' logs to this directory")
    chosen = parser.parse_args(arguments)
    every: dict[str, Sequence[str]] = dict.fromkeys(FAMILIES, TIERS) | dict.fromkeys((*FEATURES, *MEMORY), ("slab",))
    every |= dict.fromkeys(FAULTY, PLACES)
    wanted = {name: [tier for tier in tiers if chosen.only in f"{name}/{tier}"] for name, tiers in every.items()}
    rows = [f"{name}/{tier}" for name, tiers in wanted.items() for tier in tiers]
    if chosen.list:
        print(*rows, sep="\n")
        return 0
    results: Results = {}
    if chosen.json is not None and chosen.json.exists():
        results = json.loads(chosen.json.read_text())
    try:
        for name, tier, row in _run(wanted, results, chosen.logs):
            results[f"{name}/{tier}"] = row
            print(f"[{time.strftime('%H:%M:%S')}] {name}, {tier}: {_sentence(row)}", file=sys.stderr, flush=True)
            if chosen.json is not None:
                chosen.json.write_text(json.dumps(results, indent=1))
    finally:
        shown = {name: results[name] for name in rows if name in results}
        print("| on | what came out |\n| --- | --- |")
        for name, row in shown.items():
            print(f"| {name} | {_sentence(row)} |")
    return 1 if any(word in json.dumps(shown) for word in BAD) else 0


def _run(
    wanted: Mapping[str, Sequence[str]], results: Results, logs: Path | None
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, tier and row of what is wanted and not in ``results``."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-families-") as scratch_name, RcloneServer() as server:
        scratch = Path(scratch_name)
        zygote = Zygote(scratch / "log", {**quick_environment(scratch=scratch, in_process=True), **ONE_CORE})
        try:
            for name, tiers in wanted.items():
                missing = [tier for tier in tiers if f"{name}/{tier}" not in results]
                if not missing:
                    continue
                workshop = Workshop(zygote)
                try:
                    trier = _trier(name, workshop, server)
                    for tier in missing:
                        yield name, tier, trier(tier)
                finally:
                    if logs is not None:
                        _keep(workshop, logs, name)
                    workshop.close()
        finally:
            zygote.close()


def _trier(name: str, workshop: Workshop, server: RcloneServer) -> Callable[[str], dict[str, Any]]:
    """Return what makes a row of a tier's or place's name."""
    if name in FEATURES:
        return lambda _: _row({}, try_feature(workshop, FEATURES[name]))
    if name in MEMORY:
        return lambda _: _row({}, try_layout(workshop, MEMORY[name]))
    if name in FAULTY:
        trial = Trial(workshop, FAULTY[name], server, prompts=1, fresh=len(BUCKET_FAULTS))
        return lambda place: _try(trial, lambda: try_place(trial, place, server, workshop.scratch))
    trial = Trial(workshop, FAMILIES[name], server)
    return lambda tier: _try(trial, lambda: trial.run(tier))


def _try(trial: Trial, run: Callable[[], Iterator[Cell]]) -> dict[str, Any]:
    try:
        reference = trial.reference()
    except EngineError as error:
        return {"failed": f"without a connector: {why(error)}"}
    except Exception as error:  # noqa: BLE001 - a checkpoint that cannot be written is a row of the table
        return {"failed": f"no checkpoint: {type(error).__name__}: {error}"}
    return _row({"block_tokens": reference.block_tokens, "groups": reference.groups}, run())


def _row(told: dict[str, Any], cells: Iterator[Cell]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    row = {**told, "cells": found}
    try:
        for cell in cells:
            found[cell.case] = cell.told()
    except EngineError as error:
        row["failed"] = why(error)
    return row


def _keep(workshop: Workshop, logs: Path, name: str) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for log in workshop.scratch.glob("engine-*.log"):
        (logs / f"{name.replace(' ', '-')}-{log.name}").write_bytes(log.read_bytes())


def _sentence(row: Mapping[str, Any]) -> str:
    """What came out of each case in a word, and by how much logprobs differ where they do."""
    words = []
    for case, cell in row.get("cells", {}).items():
        delta = f" {cell['delta']:.0e}" if cell["verdict"] in ("close", "WRONG") else ""
        note = f" ({cell['note']})" if cell.get("note") else ""
        found = f" of {cell['hit_tokens']} tokens found" if cell.get("hit_tokens") else ""
        words.append(f"{case} {cell['verdict']}{delta}{found}{note}")
    return "; ".join([*words, *filter(None, [row.get("failed", "")])])


if __name__ == "__main__":
    sys.exit(main())
