"""SIGKILL of a process that writes an index's journal: what is found is what the calls up to some point have made, and
no earlier point than the last flush.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import signal
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from nixl_offload.errors import TierError
from nixl_offload.index.durable import DurableIndex
from nixl_offload.tiers.slab.index_reader import IndexReader
from nixl_offload.types import Key, Location
from tests.prove.cells import Cell, Outcome

KILLS = 4
KEYS = 3000
SLOTS = 2000
CELLS = 6
LATEST_S = 0.5
GEOMETRY = {"extent_bytes": "4096", "world_size": "1"}
Rows = dict[Key, int]


def index_cells(seed: int) -> Iterator[Cell]:
    """Return the cells."""
    for number in range(CELLS):
        yield Cell(f"index/{number}", partial(_run, f"{seed} index {number}"))


def _key(number: int) -> Key:
    return Key(hashlib.sha512(b"%d" % number).digest()[: 60 if number % 2 else 32] + bytes(4))


def _operations(seed: str) -> Iterator[tuple[str, int, int]]:
    """Yield puts, deletes and, rarely, clears, without end."""
    choose = random.Random(seed)
    while True:
        dice = choose.random()
        kind = "clear" if dice < 0.0001 else "delete" if dice < 0.2 else "put"
        yield kind, choose.randrange(KEYS), choose.randrange(SLOTS) * 4096


class _Model:
    """What the rows are after each call: a key has one row, an offset has one key, the last put wins."""

    def __init__(self, rows: Rows) -> None:
        self._offset_of = dict(rows)
        self._key_at = {offset: key for key, offset in rows.items()}
        self.mark = 0
        for row in rows.items():
            self.mark ^= hash(row)

    def apply(self, kind: str, number: int, offset: int) -> None:
        """Do what a call does."""
        key = _key(number)
        if kind == "clear":
            self.__init__({})  # type: ignore[misc]
            return
        self._remove(key)
        if kind == "put":
            if offset in self._key_at:
                self._remove(self._key_at[offset])
            self._offset_of[key], self._key_at[offset] = offset, key
            self.mark ^= hash((key, offset))

    def _remove(self, key: Key) -> None:
        offset = self._offset_of.pop(key, None)
        if offset is not None:
            del self._key_at[offset]
            self.mark ^= hash((key, offset))


def _write(path: str, seed: str, told: np.ndarray) -> None:
    """In the process that is killed: ``told`` is how many calls have begun, how many were flushed, and that it runs."""
    choose = random.Random(seed + " pauses")
    journal, rows = DurableIndex.open(path, GEOMETRY, batch_delay_s=choose.choice([0.0, 0.002, 0.05]))
    for _ in rows:
        pass
    told[2] = 1
    for number, (kind, key_number, offset) in enumerate(_operations(seed), 1):
        told[0] = number
        if kind == "put":
            journal.put(_key(key_number), Location(0, offset, 4096))
        elif kind == "delete":
            journal.delete(_key(key_number))
        else:
            journal.clear()
        if choose.random() < 0.001 and journal.flush(20.0):
            told[1] = number
        if choose.random() < 0.002:
            time.sleep(choose.random() * 0.01)


def _run(seed: str) -> Outcome:
    choose, outcome = random.Random(seed), Outcome()
    path = str(Path("index.sqlite").absolute())
    before: Rows = {}
    operations = 0
    for kill in range(KILLS):
        told = np.frombuffer(mmap.mmap(-1, 24), dtype=np.int64)
        own_seed = f"{seed} {kill}"
        pid = os.fork()
        if not pid:
            try:
                _write(path, own_seed, told)
            finally:
                os._exit(1)
        while not told[2] and choose.random() > 0.0002:  # some kills meet the opening
            time.sleep(0.0002)
        time.sleep(choose.uniform(0.0, LATEST_S) if told[2] else 0.0)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        begun, flushed, operations = int(told[0]), int(told[1]), operations + int(told[0])
        if status != signal.SIGKILL:
            outcome.dead.append(f"kill {kill} of {seed!r} ended by itself with {status}")
        found, why = _read(Path(path))
        reread = _reopened(path)
        if reread is None:
            outcome.dead.append(f"kill {kill} of {seed!r}: the index cannot be opened again, or closed")
            break
        if found is None and reread:
            outcome.dead.append(f"kill {kill} of {seed!r}: a reader cannot read what was left: {why}")
        elif reread != (found or {}):
            outcome.wrong.append(
                f"kill {kill} of {seed!r}: {len(reread)} rows are reopened, a reader finds {len(found or {})}"
            )
        if not _is_prefix(before, own_seed, flushed, begun, reread):
            outcome.wrong.append(
                f"kill {kill} of {seed!r}: {len(reread)} rows, which no call between {flushed} and {begun} has left"
            )
        before = reread
    outcome.counts = {"kills": KILLS, "operations": operations}
    return outcome


def _read(path: Path) -> tuple[Rows | None, str]:
    """Read the rows as commands do; None, and why: there is no index, or none that was ever whole."""
    try:
        return {row.key: row.offset for row in IndexReader(path).rows()}, ""
    except TierError as error:
        return None, str(error)


def _reopened(path: str) -> Rows | None:
    """In a process of its own, for the next one is forked from this, which must have no thread. None: it failed."""
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            journal, pieces = DurableIndex.open(path, GEOMETRY)
            rows = [(key, int(offset)) for piece in pieces for key, offset, _ in piece]
            assert journal.close(20.0), "it cannot be closed in 20 s"
            with os.fdopen(send, "wb") as file:
                for key, offset in rows:
                    file.write(len(key).to_bytes(1, "big") + key + offset.to_bytes(8, "big"))
            code = 0
        except BaseException:  # noqa: BLE001 - told by the code, and in the log
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(send)
    rows_found: Rows = {}
    with os.fdopen(receive, "rb") as file:
        while size := file.read(1):
            key = Key(file.read(size[0]))
            rows_found[key] = int.from_bytes(file.read(8), "big")
    return None if os.waitpid(pid, 0)[1] else rows_found


def _is_prefix(before: Rows, seed: str, flushed: int, begun: int, found: Rows) -> bool:
    model, wanted = _Model(before), _Model(found).mark
    for number, operation in enumerate(_operations(seed)):
        if number >= flushed and model.mark == wanted and model._offset_of == found:
            return True
        if number >= begun:
            return False
        model.apply(*operation)
    return False
