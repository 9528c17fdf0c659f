"""The contract of a link: how a rank reaches one tier. It turns key and location into what a mover can open, makes a
finished write visible, and remembers whether the tier works.

Threading: the pump's thread, after ``connect`` at start. Nothing here blocks on data or on slow metadata: what takes
time is a generator that yields until it is done (on a thread of the link's own), and the flight goes on then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final, TypeVar

from nixl_offload.movers.base import FileId, Mover
from nixl_offload.types import Key, Location

T = TypeVar("T")

NOTHING_STORED: Final = "nothing is stored until this is over"
"""What links log while a tier is disabled for stores."""


@dataclass(slots=True, eq=False)
class Target:
    """An opened place for one chunk. Links subclass it with what they must remember."""

    file: FileId
    offset: int
    """Byte offset of the header page in ``file``."""


class Link(ABC):
    """After a failure still holds: other chunks are untouched, and what was visible before is unchanged.

    ``begin_*`` raise TierError after taking note of the cause. For each ``begin`` that returned there is exactly one
    ``end_*`` or ``fail_*``, called when every transfer of the target is final (or was given up with quarantine). An
    ``error`` of None says that storage is not to blame. ``end_*`` and ``fail_*`` let go of the target however they end.
    """

    name: str
    """For logs: ``slab tier /mnt/kv``."""
    mover: Mover
    shares_file: bool = False
    """Whether many chunks lie in one file, so that one transfer can move them. Where False, each has its own."""

    @abstractmethod
    def connect(self) -> None:
        """Make ready at start; trouble is remembered, not raised: the tier is tried again later."""

    @property
    @abstractmethod
    def trouble(self) -> str:
        """Why nothing is stored now, in a word; ``none`` while all is well."""

    @abstractmethod
    def may_store(self) -> bool:
        """Whether to store now; may be the trial that brings the tier back into use."""

    @abstractmethod
    def may_load(self) -> bool:
        """Whether to load now; likewise."""

    @property
    def in_doubt(self) -> bool:
        """Whether loads failed of late, so that what is in flight may never be answered. Pure and quick."""
        return False

    @abstractmethod
    def begin_write(self, key: Key, location: Location, length_bytes: int) -> Generator[None, None, Target]:
        """Make room for a shard of ``length_bytes``, header page included, and open it. Returns the target."""

    @abstractmethod
    def end_write(self, target: Target) -> Generator[None, None, None]:
        """All is written: make it visible as a whole. Raises TierError; then nothing has become visible."""

    @abstractmethod
    def fail_write(self, target: Target, error: str | None) -> None:
        """The write failed or was given up: undo what can be undone, and take note."""

    @abstractmethod
    def begin_read(self, key: Key, location: Location, length_bytes: int) -> Generator[None, None, Target]:
        """Open a stored shard of ``length_bytes``. Returns the target; raises TierError (``missing``: it is gone)."""

    @abstractmethod
    def end_read(self, target: Target) -> None:
        """Storage has answered: all wanted bytes have arrived (whether they verify is another matter), or the shard is
        gone.
        """

    @abstractmethod
    def fail_read(self, target: Target, error: str | None) -> None:
        """The read failed: take note."""

    def overdue(self) -> None:
        """A load was given up while its transfer goes on; ``end_read`` or ``fail_read`` of it still comes."""
        return

    @abstractmethod
    def close(self) -> None:
        """Close what is open in the mover and end threads. Nothing may be in flight. The mover stays open."""


def at_once(value: T) -> Generator[None, None, T]:
    """Return ``value`` without a wait: what a link yields from that has nothing to wait for."""
    yield from ()
    return value
