"""What the catalog asks of a tier.

Threading: the scheduler's thread alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nixl_offload.index import State
from nixl_offload.types import Asker, Key, Location, Lookup, Outcome


class Tier(Protocol):
    """One tier's index and capacity. None of it blocks, none of it raises for reasons of storage."""

    @property
    def in_use(self) -> bool:
        """Whether loads are expected to work. What is READY and also rests in another tier is served from there."""
        ...

    def state(self, key: Key) -> State | None: ...
    def reserve(self, key: Key, slot_bytes: int, evicted: list[Key]) -> Location | None:
        """Make ``key``, whose state is None, WRITING at a location, evicting as needed (victims are appended).

        None: no room, or the tier is out of use.
        """
        ...

    def commit(self, key: Key) -> bool:
        """WRITING to READY. False when the chunk was dropped meanwhile and its location is free now."""
        ...

    def abort(self, key: Key) -> None:
        """Forget a chunk that is being written, dropped meanwhile or not; its location is free now."""
        ...

    def retire(self, key: Key) -> None:
        """As ``abort``, but its location is never given to another chunk: something may still write there."""
        ...

    def pin(self, key: Key) -> Location: ...
    def unpin(self, key: Key) -> None: ...
    def touch(self, key: Key) -> None: ...
    def lookup(self, key: Key, asker: Asker, now_s: float) -> Lookup:
        """Say whether ``key`` can be loaded. RETRY: not known, and somebody goes to look once ``flush`` is called."""
        ...

    def flush(self, now_s: float) -> None:
        """The scheduler's step is over: begin what lookups have asked for, take in what was found."""
        ...

    def forget_asker(self, request_id: str) -> None:
        """No more lookups will come for this request."""
        ...

    def stored(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> None:
        """A store has been settled (committed or aborted already): take note of how the storage did."""
        ...

    def loaded(self, keys: Sequence[Key], failed: Mapping[Key, Outcome], now_s: float) -> list[Key]:
        """A load has been settled (unpinned already): never serve again what failed. Returns what was dropped."""
        ...

    def clear(self) -> None:
        """Drop every chunk, at a cost that does not grow with their number."""
        ...
