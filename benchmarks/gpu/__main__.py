"""What moves how fast between a GPU, page-locked memory and files: ``python -m benchmarks.gpu PARTS``, one table.

``[--dir DIR] [--seconds N] [--emulate]``. Parts, of kernels, bus and engine, run one after the other in this process
and share the time. Before ``engine`` each mover is tried alone, in a process that may crash or hang; ``movers`` does
only that. ``--emulate``: the same code on host memory that plays the device, with little data; it measures nothing. The
last line is JSON. Exits with 0 when all that this machine can run was measured, 1 when something brought other bytes, 2
without a GPU. What is measured and how: benchmarks/gpu/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace

import torch

from benchmarks import tables
from benchmarks.contest import Row, table
from benchmarks.gpu import kernels, ways
from benchmarks.gpu.bench import Scene

PARTS = {"kernels": kernels.measure, "bus": kernels.measure_bus, "engine": ways.measure}
PROBE_S = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; or movers (all)", default=[*PARTS])
    parser.add_argument("--dir", help="where files go; cuFile refuses a filesystem in memory (default: TMPDIR)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all parts (60)")
    parser.add_argument("--emulate", action="store_true", help="on host memory that plays the device")
    parser.add_argument("--probe", choices=ways.PROBED, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := {*chosen.parts} - {*PARTS, "movers"}:
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if not chosen.emulate and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here (--emulate shows that the script works)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="nixl-offload-gpu-", dir=chosen.dir) as scratch:
        scene = Scene.make(scratch, chosen.seconds, emulate=chosen.emulate)
        if chosen.probe:
            ways.probe(scene, chosen.probe)
            return 0
        if {"engine", "movers"} & {*chosen.parts}:
            limit_s = 60.0 if chosen.emulate else PROBE_S
            scene.unfit = ways.unfit_movers(scratch, limit_s, emulate=chosen.emulate)
        rows: list[Row] = []
        parts = [part for part in chosen.parts if part in PARTS]
        for number, part in enumerate(parts):
            for row in PARTS[part](replace(scene, deadline_s=scene.share(number, len(parts)))):
                print(json.dumps(asdict(row)), flush=True)  # what is measured outlives a crash
                rows.append(row)
    print(tables.machine(), table(rows), sep="\n")
    failed = [f"{', '.join(row.what)}, {row.side}: {row.note}" for row in rows if row.failed]
    # The larger the pieces, the later the row: what stays is the ratio with the largest.
    ratios = {(row.what[:-1], row.side): row.ratio for row in rows if row.ratio is not None}
    words = "; ".join(f"{what[-1]} by {side} {ratio:.2f}" for (what, side), ratio in ratios.items())
    if not rows:
        words = "; ".join(f"{name}: {why}" for name, why in scene.unfit.items()) or "all movers run"
    words = failed[0] if failed else words or f"{len(rows)} rows"
    print(json.dumps({"words": words, "wrong": failed, "unfit": scene.unfit}), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
