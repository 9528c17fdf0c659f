"""Small frozen types that all layers share. No behaviour, no I/O.

Threading: immutable values, safe anywhere.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, NamedTuple, NewType

Key = NewType("Key", bytes)
"""vLLM's ``OffloadKey``: block hash (16 to 60 bytes) followed by the KV-cache group index, 4 bytes big-endian."""

Verify = Literal["checksum", "always", "header"]
"""Which checks a load makes before its blocks are used: see ``config.schema.Config.verify``."""

PAGE_BYTES = 4096
"""Alignment of every offset, length and address that may meet O_DIRECT; also the size of a header page."""


def key_group(key: Key) -> int:
    """Return the KV-cache group index that ``key`` carries in its last four bytes."""
    return int.from_bytes(key[-4:], "big")


def align_up(value_bytes: int, alignment_bytes: int = PAGE_BYTES) -> int:
    """Round ``value_bytes`` up to a multiple of ``alignment_bytes``."""
    return -(-value_bytes // alignment_bytes) * alignment_bytes


class Location(NamedTuple):
    """Where a chunk rests in a tier: the same on every rank, because all ranks have slabs of equal geometry."""

    tier: int
    """Position of the tier in the config's ``tiers`` list."""
    offset: int
    """Byte offset of the slot in each rank's slab, or what ``SlotPlaces.seen_from`` translates to it; a multiple of
    ``PAGE_BYTES``. 0 if each shard has its own object or file, named by key and rank (``tiers.shared.naming``)."""
    slot_bytes: int
    """Size of the slot, header page included; names the size class."""


class Locations(tuple[Location, ...]):
    """Locations of chunks in a message. They are pickled by column, in an eighth of the time."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_columns, tuple(zip(*self, strict=True))


def _of_columns(*columns: tuple[int, ...]) -> Locations:
    return Locations(map(Location, *columns) if columns else ())


class LookupContext(NamedTuple):
    """The request that looks a key up, the token of the request at which the key ends (None: unknown), and whether the
    request waits for storage to answer. If not, unknown keys count as absent, and its searches go on.
    """

    request_id: str
    end_token: int | None = None
    waits: bool = True


class Lookup(Enum):
    """Answer to "is this chunk there?"."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"
    """Being written; will be readable soon."""
    RETRY = "retry"
    """Not known yet; a search is under way. Ask again."""


class Outcome(Enum):
    """The result for one chunk of a job on one rank."""

    OK = "ok"
    FAILED = "failed"
    """Storage failed: I/O error, full, read-only, vanished, timed out."""
    CORRUPT = "corrupt"
    """Bytes arrived but identity, length or checksum disagree with the key."""
    DROPPED = "dropped"
    """Never attempted, or given up to shed load; nothing is wrong with the storage."""
    TAINTED = "tainted"
    """FAILED, and late I/O may still write to the location, which must never be given to another chunk."""


_SEVERITY = (Outcome.OK, Outcome.DROPPED, Outcome.FAILED, Outcome.CORRUPT, Outcome.TAINTED)


def worst(*outcomes: Outcome) -> Outcome:
    """Return the gravest of ``outcomes``. It is the chunk's outcome when ranks disagree."""
    return max(outcomes, key=_SEVERITY.index)
