"""``make bench-scale``: costs of the scheduler's half by keys, requests and ranks; 1,000 servers on one bucket.

    python -m benchmarks.scale                              # two minutes: up to 100,000 keys, 64 servers
    python -m benchmarks.scale --full --plot docs/scale.png # up to 10 M keys (5 GB of memory), 1,000 servers; an hour

Prints JSON. Costs are processor time and depend on the machine; so does ``gc``s processor time, and nothing else here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.scale.bucket import EXPRESS, STANDARD, Prices
from benchmarks.scale.collect import PETABYTE, collect
from benchmarks.scale.costs import by_keys, by_ranks, by_requests
from benchmarks.scale.fleet import Figures, Fleet, Load
from benchmarks.scale.shapes import LARGE, LONG, SHAPES, Shape

SECONDS_PER_MONTH: Final = 730 * 3600
SERVERS: Final = 1000
CASES: Final[dict[str, Callable[..., dict[str, float]]]] = {"keys": by_keys, "requests": by_requests, "ranks": by_ranks}


def in_process(case: str, *numbers: int) -> dict[str, float]:
    """Measure in a new process, so that one case's memory does not disturb the next."""
    command = [sys.executable, "-m", "benchmarks.scale", "--case", case, *map(str, numbers)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def simulate(load: Load) -> Figures:
    """Run one fleet."""
    fleet = Fleet(load)
    try:
        return fleet.run()
    finally:
        fleet.close()


def fleet_report(figures: Figures) -> dict[str, Any]:
    """The figures of a fleet: per request served, and per second for ``SERVERS`` servers."""
    load, shape = figures.load, figures.load.shape
    rate = SERVERS * load.requests_per_s
    chunks = sum(figures.chunks.values())
    stored_gb_s = figures.calls.get("put", 0.0) * rate * shape.shard_bytes / 1e9
    return {
        "shape": shape.name,
        "servers": load.servers,
        "sticky": load.sticky,
        "partitions": load.partitions,
        "requests": figures.requests,
        "calls": figures.calls,
        "throttled": figures.throttled,
        "parts": {where: count / chunks for where, count in sorted(figures.chunks.items())},
        "again": figures.again / max(1.0, figures.calls.get("put", 0.0) * figures.requests),
        "wait_ms": {"p50": figures.wait_ms(0.5), "p99": figures.wait_ms(0.99)},
        "busiest_partition_per_s": {"reads": figures.busiest_reads, "writes": figures.busiest_writes},
        "breaker_openings": figures.openings,
        "late": figures.late,
        "fleet_per_s": {kind: calls * rate for kind, calls in figures.calls.items()},
        "fleet_stores_gb_per_s": stored_gb_s,
        "petabyte_holds_hours": PETABYTE / 1e9 / max(stored_gb_s, 1e-9) / 3600,
        "dollars_per_month": {prices.name: dollars(figures, rate, prices) for prices in (STANDARD, EXPRESS)},
    }


def dollars(figures: Figures, rate: float, prices: Prices) -> dict[str, float]:
    """What a fleet's requests cost in a month of this load, by kind; and a petabyte."""
    size_bytes = figures.load.shape.shard_bytes
    each = {
        kind: prices.of({kind: calls * rate * SECONDS_PER_MONTH}, size_bytes)
        for kind, calls in figures.calls.items()
        if kind in ("head", "get", "put")
    }
    return {**each, "storage": PETABYTE / 1e9 * prices.stored_gb_month}


def gc_report(shape: Shape, chunks: int) -> dict[str, Any]:
    """One run of gc over a petabyte, a tenth of it deleted; linear in objects, as the two sizes show."""
    small, run = collect(shape, chunks // 4), collect(shape, chunks)
    objects = PETABYTE / shape.shard_bytes
    return {
        "objects": objects,
        "processor_us_per_listed": [small.processor_us_per_listed, run.processor_us_per_listed],
        "counted": {"objects": run.objects, "lists": run.lists, "deletes": run.deletes},
        "one_at_a_time": run.scaled(objects, objects / 10, parallel=False),
        "now": run.scaled(objects, objects / 10, parallel=True),
    }


def median_of(rounds: int, case: str, *numbers: int) -> dict[str, float]:
    """Medians over processes: a busy machine is slow for seconds at a time."""
    runs = [in_process(case, *numbers) for _ in range(rounds)]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measure_costs(*, full: bool) -> dict[str, Any]:
    """Processor time by keys, requests and ranks."""
    rounds = 3 if full else 1
    known = [10**power for power in range(3, 8 if full else 6)]
    return {
        "by_keys": {keys: median_of(rounds if keys < 10**7 else 1, "keys", keys) for keys in known},
        "by_requests": {count: median_of(rounds, "requests", count, 100_000) for count in (1, 4, 16, 64)},
        "by_ranks": {ranks: median_of(rounds, "ranks", ranks, 100_000) for ranks in (1, 2, 4, 8)},
    }


def measure_bucket(*, full: bool) -> dict[str, Any]:
    """Fleets and gc."""
    base = Load(seconds=45.0 if full else 30.0)
    sizes = (10, 30, 100, 300, SERVERS) if full else (4, 16, 64)
    one = replace(base, servers=50 if full else 16)
    variants = [replace(one, sticky=0.9), replace(one, shape=LARGE), replace(one, shape=LONG)]
    variants += [replace(one, partitions=count, limit_servers=SERVERS) for count in (16, 4, 1)]
    chunks = 200_000 if full else 20_000
    return {
        "fleets": [fleet_report(simulate(replace(base, servers=servers))) for servers in sizes],
        "variants": [fleet_report(simulate(load)) for load in variants],
        "gc": {name: gc_report(shape, chunks // shape.ranks) for name, shape in SHAPES.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="up to 10 M keys and 1,000 servers")
    parser.add_argument("--plot", type=Path, help="write a page of plots to this PNG")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    if arguments.case:
        case, *numbers = arguments.case
        print(json.dumps(CASES[case](*map(int, numbers))))
        return
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    report = {"machine": machine, **measure_costs(full=arguments.full), **measure_bucket(full=arguments.full)}
    if arguments.plot:
        from benchmarks.scale.plot import draw

        draw(report, arguments.plot)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
