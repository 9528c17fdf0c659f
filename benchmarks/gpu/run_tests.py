"""The ``gpu`` tests in one go: ``python -m benchmarks.gpu.run_tests --out DIR [--seconds N] [--collect-only]``.

What the rest is built of comes first: kernels, packers, the engine, movers. Each file runs in a process of its own, and
where a process does not reach the end of its file, because a test crashed, hung, or left the device's context broken,
another one goes on behind that test: no failure hides what comes after it. ``tests.log`` has all that pytest said.
Exits with 0 when everything passed or was skipped, 1 when not, 5 when there was no test.
This module is also the pytest plugin that writes down, line by line, what happened to each test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
ORDER = (
    "kernels",
    "checksum",
    "streams",
    "packer",
    "batched_copy",
    "device_packer",
    "memory",
    "engine",
    "movers",
    "autotune",
    "tensor_digests",
)
"""``tests/gpu/test_NAME_cuda.py``: what others rest on comes before them."""
OPTIONS = ["-m", "gpu", "-v", "-c", "pyproject.toml", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.run_tests"]
OPTIONS += ["--timeout=60", "--durations=5", "--durations-min=1"]
# Another Python and another torch than the pinned ones warn of other things: here that shall fail no test.
OPTIONS += ["-W", "default"]
LEAST_S = 10.0
"""What a file gets when those before it have used the time up."""
_RECORD = "NIXL_OFFLOAD_GPU_TESTS"
"""Environment: the file in which the plugin writes [test, "started" or outcome, words]."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", help="default: all of tests/gpu")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--collect-only", action="store_true")
    options = parser.parse_args()
    files = options.files or [f"tests/gpu/test_{name}_cuda.py" for name in ORDER]
    if options.collect_only:
        collect = [sys.executable, "-m", "pytest", *OPTIONS, "-qq", "--collect-only", *files]
        return subprocess.run(collect, cwd=REPOSITORY, check=False).returncode
    outcomes: dict[str, tuple[str, str]] = {}
    end_s = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as scratch, open(options.out / "tests.log", "w", encoding="utf-8") as log:
        for file in files:
            left_s = end_s - time.monotonic()
            outcomes.update(_run(file, time.monotonic() + max(LEAST_S, left_s / 2), Path(scratch), log))
    for name, (outcome, words) in outcomes.items():
        if outcome not in ("passed", "skipped"):
            print(f"{outcome.upper()} {name}: {words}"[:250])
    reasons = Counter(words for outcome, words in outcomes.values() if outcome == "skipped")
    for words, count in reasons.most_common(12):
        print(f"{count} skipped: {words}"[:250])
    counts = Counter(outcome for outcome, _ in outcomes.values())
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "no test")
    return 5 if not outcomes else int(any(outcome not in ("passed", "skipped") for outcome in counts))


def _run(file: str, end_s: float, scratch: Path, log: IO[str]) -> dict[str, tuple[str, str]]:
    """Run one file, in as many processes as it takes, and return outcome and words by test."""
    record = scratch / f"{Path(file).stem}.jsonl"
    record.touch()
    outcomes: dict[str, tuple[str, str]] = {}
    while True:
        known = len(outcomes)
        command = [sys.executable, "-m", "pytest", *OPTIONS, f"--basetemp={scratch}/pytest", file]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, _RECORD: str(record)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
            how = f"the process was killed by signal {-(process.returncode or 0)}"
        except subprocess.TimeoutExpired:
            how = "the time for this file was up"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)  # a driver that hangs may keep even this from ending it
        for node, outcome, words in _records(record):
            name = f"{Path(file).name}::{node.partition('::')[2]}"
            if outcome != "started":
                outcomes[name] = outcome, words
            elif name not in outcomes:
                outcomes[name] = "crashed", how
        if process.returncode in (0, 1, 5):
            return outcomes
        if time.monotonic() > end_s:
            return {**outcomes, f"{Path(file).name}, the rest": ("left out", how)}
        if len(outcomes) == known:  # not even one more test was started
            why = how if (process.returncode or 0) < 0 else f"pytest ended with {process.returncode}, see tests.log"
            return {**outcomes, Path(file).name: ("error", why)}


def _records(record: Path) -> Iterator[tuple[str, str, str]]:
    for line in record.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # the line that a crash cut off
            name, outcome, words = json.loads(line)
            yield name, outcome, words


# The plugin


def _write(*record: str) -> None:
    if _RECORD in os.environ:
        with open(os.environ[_RECORD], "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what was started already."""
    if _RECORD in os.environ:
        started = {name for name, _, _ in _records(Path(os.environ[_RECORD]))}
        items[:] = [item for item in items if item.nodeid not in started]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down that the test begins."""
    _write(nodeid, "started", "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how it ended; a failure of its teardown counts."""
    if report.when == "call" or not report.passed:
        _write(report.nodeid, report.outcome, _words(report))


def _words(report: pytest.TestReport) -> str:
    """Return the line that says why a test was skipped or failed."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = report.longreprtext.splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E  ")), lines[-1] if lines else "")


def pytest_runtest_logfinish() -> None:
    """End the process when the test has left the device's context broken: in it nothing works any more."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the device's context is broken: {error}", returncode=2)


if __name__ == "__main__":
    sys.exit(main())
