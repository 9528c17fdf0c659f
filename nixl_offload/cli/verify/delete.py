"""What ``verify --delete-bad`` does: away with all shards of a bad chunk, if it is still the same bad one. Of a chunk
that is whole but for shards of ranks that can have none, only those go.

Threading: the main thread of ``verify``. In a tree or a bucket servers go on: what is gone is computed anew. In a slab
only the holder of the directory's lock may touch the index, so that the lock is taken for a few chunks at a time,
for moments, and an engine that starts just then waits; where an engine has it, everything is left: that engine finds a
bad slot itself when it loads it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.cli.common import refuse_anothers_directory
from nixl_offload.cli.inventory.base import Chunk, Held, Inventory
from nixl_offload.cli.inventory.index import IndexRow, drop_rows
from nixl_offload.cli.inventory.shared import SharedInventory
from nixl_offload.cli.inventory.slab import SlabInventory
from nixl_offload.cli.verify.judge import BAD, Verdict
from nixl_offload.errors import ConfigError, StoreError, TierError
from nixl_offload.tiers.lock import DirectoryLock

SLAB_BATCH: Final = 64
_LOCKED: Final = (
    "left: an engine has the directory open, and finds it bad itself when it loads it; stop the engine to delete it now"
)


class Deleted(NamedTuple):
    """What became of one bad chunk."""

    verdict: Verdict
    done: bool
    words: str


def delete_bad(inventory: Inventory, held: Held, bad: Sequence[Verdict]) -> list[Deleted]:
    """Delete what is still as it was judged. Raises nothing: what could not be deleted is told."""
    if isinstance(inventory, SlabInventory):
        return _from_slab(inventory, held, bad)
    assert isinstance(inventory, SharedInventory), "there is no third kind"
    return [_from_store(inventory, held, verdict) for verdict in bad]


def _from_store(inventory: SharedInventory, held: Held, verdict: Verdict) -> Deleted:
    bad, words = verdict.chunk, "deleted"
    if all(problem.reason == "rank" for problem in verdict.problems):
        strays = {problem.place for problem in verdict.problems}
        bad = bad._replace(shards=tuple(shard for shard in bad.shards if shard.place in strays))
        words = "deleted what belongs to no rank; the chunk stays"
    try:
        if inventory.look_again(held, verdict.chunk) != verdict.chunk:
            return Deleted(verdict, False, "changed meanwhile, left")
        inventory.delete(bad)
    except StoreError as error:
        return Deleted(verdict, False, str(error))
    return Deleted(verdict, True, words)


def _from_slab(inventory: SlabInventory, held: Held, bad: Sequence[Verdict]) -> list[Deleted]:
    lock = DirectoryLock(inventory.base / "lock", brief=True)
    try:
        refuse_anothers_directory(str(inventory.base), "verify")
        lock.acquire()
    except ConfigError as error:
        return [Deleted(verdict, False, str(error)) for verdict in bad]
    except TierError as error:
        words = _LOCKED if error.cause == "locked" else str(error)
        return [Deleted(verdict, False, words) for verdict in bad]
    try:
        rows = [_row(verdict.chunk) for verdict in bad]
        dropped = {row.key for row in drop_rows(inventory.index(held).path, rows)}
        found = []
        for verdict in bad:
            if verdict.chunk.key not in dropped:
                found.append(Deleted(verdict, False, "changed meanwhile, left"))
                continue
            if verdict.kind == BAD:
                _spoil_headers(verdict.chunk)
            found.append(Deleted(verdict, True, "deleted"))
        return found
    except TierError as error:
        return [Deleted(verdict, False, str(error)) for verdict in bad]
    finally:
        lock.release()


def _row(chunk: Chunk) -> IndexRow:
    return IndexRow(int(chunk.cursor), chunk.key, chunk.shards[0].offset, chunk.shards[0].size_bytes)


def _spoil_headers(chunk: Chunk) -> None:
    """Overwrite the header pages with zeros: nobody who looks through slots takes them for chunks. The row is gone."""
    for shard in chunk.shards:
        try:
            fd = os.open(shard.place.rpartition("@")[0], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # no file, no header
        try:
            if os.fstat(fd).st_size >= shard.offset + HEADER_BYTES:
                os.pwrite(fd, bytes(HEADER_BYTES), shard.offset)
        except OSError:
            continue  # a sector that cannot be written either; without its row nobody reads it
        finally:
            os.close(fd)
