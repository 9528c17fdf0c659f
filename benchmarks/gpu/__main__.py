"""What moves how fast between a GPU, page-locked memory and files: ``python -m benchmarks.gpu``, one table.

``[--dir DIR] [--out DIR] [--seconds N] [--parts kernels,bus,file,engine] [--json] [--emulate] [--here]``. Each part
runs in a process of its own with a share of the time: what crashes or hangs takes only its own rows along, and leaves
one that says so. Movers are tried alone first, for the same reason. ``--emulate``: the same code on host memory that
plays the device, with little data; it measures nothing. ``--parts=`` only tries the movers. Exits with 0 when all that
this machine can run was measured, 1 when a part failed or brought other bytes, 2 without a GPU. What is measured and
how: benchmarks/gpu/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.rounds import Row, reason

if TYPE_CHECKING:  # it imports torch, which the parent can do without
    from benchmarks.gpu.scene import Scene

SHARES = {"kernels": 3, "bus": 2, "file": 4, "engine": 5}
"""The parts, and how they share the time."""
START_S, END_S = 12.0, 30.0
"""What a process takes to start, which is part of its share, and what it may take beside that before it is killed."""
MOVERS = ("gds_mt", "kvikio", "posix")
PROBE_S = 15.0
UNFIT = "unfit.json"


def main() -> int:
    options = _options()
    if not options.emulate and not _has_cuda():
        print("no CUDA device: nothing to measure here (--emulate shows that the script works)", file=sys.stderr)
        return 2
    if options.probe:
        return _probe(options)
    if options.part:
        return _part(options)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nixl-offload-gpu-", dir=options.dir) as scratch:
        if not options.parts:
            unfit = _unfit(options, scratch, out / "benchmark.log")
            words = "; ".join(f"{name}: {why.partition(f'{scratch}: ')[2] or why}" for name, why in unfit.items())
            print(json.dumps({"words": words or f"{', '.join(MOVERS)} run", "unfit": unfit}))
            return 0
        rows = list(_here(options, scratch) if options.here else _processes(options, scratch, out))
        from benchmarks.gpu.report import machine, summary, table

        about = machine(Path(scratch))
    failed = [f"{row.part}, {row.case}, {row.way}: {row.note}" for row in rows if row.failed]
    result = {"machine": about, "rows": [asdict(row) for row in rows], "words": failed[0] if failed else summary(rows)}
    result |= {"wrong": failed} if failed else {}
    (out / "benchmark.json").write_text(json.dumps(result, indent=1))
    text = table(rows, about)
    (out / "table.txt").write_text(text + "\n")
    print(text, file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps(result), flush=True)
    return int(bool(failed))


def _processes(options: argparse.Namespace, scratch: str, out: Path) -> Iterator[Row]:
    """Each part in a process of its own."""
    end_s = time.monotonic() + options.seconds
    log_path = out / "benchmark.log"
    log_path.write_bytes(b"")
    if {"file", "engine"} & set(options.parts):
        (Path(scratch) / UNFIT).write_text(json.dumps(_unfit(options, scratch, log_path)))
    for position, part in enumerate(options.parts):
        left = end_s - time.monotonic()
        share = SHARES[part] / sum(SHARES[later] for later in options.parts[position:])
        seconds = max(5.0, left * share - START_S)
        rows_path = Path(scratch) / f"{part}.jsonl"
        rows_path.touch()
        _say(options, f"{part}: {seconds:.0f} s")
        begun, logged = time.monotonic(), log_path.stat().st_size
        ended = _ended(_start(options, scratch, log_path, "--part", part, seconds, rows_path), seconds + END_S)
        found = [Row(**json.loads(line)) for line in rows_path.read_text().splitlines()]
        _say(options, f"{part}: {len(found)} rows in {time.monotonic() - begun:.0f} s{'; ' if ended else ''}{ended}")
        yield from found
        if ended:
            words = f"{ended} after {len(found)} rows; see {log_path.name}: {_last_line(log_path, logged)}"
            yield Row(part, "the rest", "", note=words, failed=True)


def _unfit(options: argparse.Namespace, scratch: str, log_path: Path) -> dict[str, str]:
    """Which movers do not run here, and why; all are tried at once, each in a process that may crash or hang."""
    unfit = _try(options, scratch, log_path, MOVERS)
    if "gds_mt" in unfit and os.environ.pop("CUFILE_ENV_PATH_JSON", None):
        again = _try(options, scratch, log_path, ("gds_mt",))
        unfit["gds_mt"] += f"; without our cufile.json: {again.get('gds_mt', 'runs')}"
    return unfit


def _try(options: argparse.Namespace, scratch: str, log_path: Path, movers: Sequence[str]) -> dict[str, str]:
    """Probe these at once. Returns what stands against each that does not run."""
    _say(options, f"movers: {', '.join(movers)}")
    answers = {name: Path(scratch) / f"{name}.probe" for name in movers}
    for answer in answers.values():
        answer.unlink(missing_ok=True)
    limit_s = 60.0 if options.emulate else PROBE_S
    processes = {
        name: _start(options, scratch, log_path, "--probe", name, limit_s, answer) for name, answer in answers.items()
    }
    unfit = {}
    end_s = time.monotonic() + limit_s
    for name, process in processes.items():
        ended = _ended(process, max(0.1, end_s - time.monotonic()))
        answer = answers[name].read_text() if answers[name].exists() else ""
        if ended:
            unfit[name] = f"{name}, tried alone: {ended}"
        elif answer:
            unfit[name] = answer
        _say(options, f"  {name}: {unfit.get(name, 'runs')}")
    return unfit


def _start(
    options: argparse.Namespace, scratch: str, log_path: Path, what: str, name: str, seconds: float, rows: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.gpu", what, name, "--dir", scratch, "--rows", str(rows)]
    command += ["--seconds", f"{seconds:.0f}", *(["--emulate"] if options.emulate else [])]
    with log_path.open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def _ended(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """How a process came to a bad end, or nothing."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "it was not over in time and was killed"
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with {code}" if code else ""


def _here(options: argparse.Namespace, scratch: str) -> Iterator[Row]:
    """All parts in this process."""
    for part in options.parts:
        yield from _rows_of(part, scratch, options.seconds / len(options.parts), emulate=options.emulate)


def _probe(options: argparse.Namespace) -> int:
    """Try one mover; what stands against it is written down."""
    from benchmarks.gpu.files import try_mover

    try:
        try_mover(_scene(options.dir, options.seconds, emulate=options.emulate), options.probe)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the reason
        Path(options.rows).write_text(reason(error))
    return 0


def _part(options: argparse.Namespace) -> int:
    """One part: rows are written as they come, so that what is measured outlives a crash."""
    with Path(options.rows).open("a") as rows:
        for row in _rows_of(options.part, options.dir, options.seconds, emulate=options.emulate):
            rows.write(json.dumps(asdict(row)) + "\n")
            rows.flush()
    return 0


def _rows_of(part: str, directory: str, seconds: float, *, emulate: bool) -> Iterator[Row]:
    yield from _measure(part)(_scene(directory, seconds, emulate=emulate))


def _scene(directory: str, seconds: float, *, emulate: bool) -> Scene:
    from benchmarks.gpu.scene import FULL, SMALL, Scene, find_device

    unfit = Path(directory) / UNFIT
    return Scene(
        find_device(emulate=emulate),
        Path(directory),
        SMALL if emulate else FULL,
        time.monotonic() + seconds,
        json.loads(unfit.read_text()) if unfit.exists() else {},
    )


def _measure(part: str) -> Callable[..., Iterator[Row]]:
    if part == "bus":
        from benchmarks.gpu.bus import measure
    elif part == "file":
        from benchmarks.gpu.files import measure
    elif part == "engine":
        from benchmarks.gpu.ways import measure
    else:
        return _kernels
    return measure


def _kernels(scene: object) -> Iterator[Row]:
    from benchmarks.gpu import kernels

    yield from kernels.measure(scene)


def _say(options: argparse.Namespace, words: str) -> None:
    print(words, file=sys.stderr if options.json else sys.stdout, flush=True)


def _last_line(path: Path, begin: int) -> str:
    """The last line of a log since ``begin``, whose last lines go to stderr."""
    lines = path.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
    print(*lines[-30:], sep="\n", file=sys.stderr, flush=True)
    return reason(RuntimeError(lines[-1])) if lines else "nothing"


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="on the filesystem to be measured")
    parser.add_argument("--out", default="gpu-results", help="table, JSON and log")
    parser.add_argument("--seconds", type=float, default=240, help="for all parts together")
    parser.add_argument("--parts", type=lambda words: words.split(",") if words else [], default=list(SHARES))
    parser.add_argument("--json", action="store_true", help="a line of JSON at the end; the table goes to stderr")
    parser.add_argument("--emulate", action="store_true", help="host memory plays the device")
    parser.add_argument("--here", action="store_true", help="all parts in this process")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(SHARES):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(SHARES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
