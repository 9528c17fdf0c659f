"""The durable index on a medium that refuses writes, from one moment to the next: rows wait, the process lives."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nixl_offload.index.durable import DurableIndex
from nixl_offload.tiers.slab.index_reader import IndexReader

if TYPE_CHECKING:
    from conftest import SmallFilesystem

GEOMETRY = {"extent_bytes": "4096"}
ENGINE = """
    import faulthandler, sys
    from nixl_offload.index.durable import DurableIndex
    from nixl_offload.types import Key, Location

    faulthandler.enable()
    index, rows = DurableIndex.open(sys.argv[1], {"extent_bytes": "4096"}, batch_delay_s=0.0, retry_interval_s=0.01)
    print(sum(len(piece.keys) for piece in rows), flush=True)
    for line in sys.stdin:
        if line == "close\\n":
            print(index.close(20.0), flush=True)
            break
        number, timeout_s = line.split()
        number = int(number)
        index.put(Key(number.to_bytes(32, "big") + bytes(4)), Location(0, number * 4096, 4096))
        print(index.flush(float(timeout_s)), flush=True)
"""
"""In a process of its own: a mapped page that cannot be written ends it by SIGBUS."""


class Engine:
    """Puts rows on command, and says whether they are on the medium."""

    def __init__(self, path: Path) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-c", textwrap.dedent(ENGINE), str(path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.rows_found = int(self._answer())

    def put(self, number: int, timeout_s: float = 20.0) -> bool:
        return self._ask(f"{number} {timeout_s}")

    def close(self) -> bool:
        return self._ask("close")

    def _ask(self, line: str) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._answer() == "True"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().strip()
        assert answer, f"the process has ended with {self.process.wait(20)}"
        return answer


@contextlib.contextmanager
def engine(path: Path) -> Iterator[Engine]:
    running = Engine(path)
    with running.process:
        try:
            yield running
        finally:
            running.process.kill()


@pytest.mark.parametrize("writable_again", [True, False])
def test_a_medium_that_refuses_writes_costs_rows_and_not_the_process(
    small_filesystem: SmallFilesystem, writable_again: bool
) -> None:
    """After what was written has reached the medium, so that its pages are clean: a mapped one could not be changed."""
    path = small_filesystem.path / "index.sqlite"
    with engine(path) as running:
        assert running.put(1)
        os.sync()
        small_filesystem.make_read_only()
        assert not running.put(2, timeout_s=0.5)
        assert [row.offset for row in IndexReader(path).rows()] == [4096]
        if writable_again:
            small_filesystem.make_writable()
            assert running.put(3)
        assert running.close() == writable_again
        assert running.process.wait(20) == 0
    small_filesystem.make_writable()
    index, rows = DurableIndex.open(str(path), GEOMETRY)
    offsets = [offset for piece in rows for _, offset, _ in piece]
    assert offsets == ([4096, 2 * 4096, 3 * 4096] if writable_again else [4096])
    assert index.close(20.0)


@pytest.mark.parametrize("small_filesystem", [8 << 20], indirect=True)
def test_a_full_medium_costs_rows_and_not_the_process(small_filesystem: SmallFilesystem) -> None:
    """No room for a transaction's journal: it waits until there is."""
    path = small_filesystem.path / "index.sqlite"
    with engine(path) as running:
        assert running.put(1)
        small_filesystem.fill()
        number = 1
        while running.put(number := number + 1, timeout_s=0.5):
            assert number < 10_000, "it never was full"
        small_filesystem.drain()
        assert running.put(number + 1)
        assert running.close()
        assert running.process.wait(20) == 0
    assert len(list(IndexReader(path).rows())) == number + 1
