"""What a prober is given to do, and what it tells of it.

Threading: immutable values, but for ``ProbeCounts``, which is copied before it is handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from nixl_offload.stores.base import Store
from nixl_offload.types import Key


class ProbeResult(Enum):
    """What a look at one object gave."""

    PRESENT = "present"
    ABSENT = "absent"
    """Not there, or too old to count."""
    DAMAGED = "damaged"
    """There, with a size that no good shard has."""
    ERROR = "error"
    """The store did not say."""


class ProbeAnswer(NamedTuple):
    """One object was looked at."""

    key: Key
    found: ProbeResult
    asked_s: float
    """When the question went out, on the prober's clock. What happened to the key since is not in the answer."""
    modified_s: float = 0.0
    """Of what is PRESENT, by the store's clock."""
    cause: str = ""
    """Of an ERROR: a ``StoreError.cause``."""
    message: str = ""


class Overdue(NamedTuple):
    """A question that is out for too long."""

    key: Key
    asked_s: float
    is_new: bool
    """Not told before."""


class SearchEnd(NamedTuple):
    """A search is over."""

    number: int
    boundary: int
    found: int


class TrialEnd(NamedTuple):
    """A trial is over; ``cause`` is empty when the store answered, whatever it answered."""

    cause: str
    message: str = ""


class BackgroundTask(Protocol):
    """Something small to do to the store. Its results are its own attributes, read once it comes back."""

    def run(self, store: Store) -> None:
        """Do it, on a thread of the prober. Raises StoreError."""
        ...


class TaskEnd(NamedTuple):
    """A task is over; ``cause`` is empty when it was done."""

    task: BackgroundTask
    cause: str
    message: str = ""


Event = ProbeAnswer | SearchEnd | TrialEnd | TaskEnd


@dataclass(slots=True)
class ProbeCounts:
    """What a prober has done since it was made."""

    searches: int = 0
    rounds: int = 0
    questions: int = 0
    """Links that searches asked about; several may share one HEAD."""
    heads: int = 0
    errors: int = 0
    seconds: float = 0.0
    """Spent in HEADs, summed over threads."""
    tasks: int = 0
    task_errors: int = 0
