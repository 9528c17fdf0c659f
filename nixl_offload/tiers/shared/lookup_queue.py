"""Who waits to learn what about a shared store: a step's lookups become searches, one per question.

Threading: none; the scheduler's thread alone. No I/O, no clock: time is passed in (monotonic seconds).

vLLM asks key by key. Within a step, one request's questions about one KV-cache group are a *note*: front to back, of
which a chain search finds the end; or back to front, of which only the last few matter (a sliding window). A note
becomes a *flight*, and while that is out the request is told to ask again. A request whose first unknown key is already
covered by another's flight waits for that one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from nixl_offload.tiers.shared.chain_search import AskAll, ChainSearch, Search
from nixl_offload.types import Asker, Key, Lookup, key_group

WINDOW_KEYS = 16
"""A window's scan begins with so many keys from the end, and doubles while all are there."""
MAX_WINDOW_KEYS = 256
_MAX_RECORDS = 10_000
_IDLE_S = 600.0


class Kind(Enum):
    """What a flight wants to know."""

    CHAIN = "chain"
    """Where a prefix ends; what lies before is there."""
    WINDOW = "window"
    """Each of a few keys."""
    EDGE = "edge"
    """Where to begin the scan for a window: nothing was there at the end. Says nothing of keys it did not ask about."""


@dataclass(slots=True, eq=False)
class _Note:
    first_end: int
    last_end: int = 0
    keys: list[Key] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Record:
    """One request."""

    request_id: str
    first_s: float
    last_s: float
    late: bool = False
    """Waited long enough: what is not known is absent for it."""
    notes: dict[int, _Note] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    """By group, as ``notes``."""
    held_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By group: the step in which it was told last to wait for a flight, and the end of the key it asked about."""
    ruled_out: set[Key] = field(default_factory=set)
    """Behind the edge."""
    window_keys: dict[int, int] = field(default_factory=dict)
    """How many to ask about next, 0 after nothing was there: then the edge is looked for."""


@dataclass(slots=True, eq=False)
class Flight:
    """One search that is out."""

    number: int
    kind: Kind
    keys: list[Key]
    plan: Search
    askers: list[tuple[_Record, int]]


class Inquiries:
    """Each request is held back ``timeout_s`` at most, counted from the first time that it was told to ask again."""

    def __init__(self, timeout_s: float) -> None:
        self.infer = True
        """Whether a chain's links may be taken for present without asking about each."""
        self.late = 0
        """Requests that were not answered in time, ever; for metrics."""
        self._timeout_s = timeout_s
        self._records: dict[str, _Record] = {}
        self._noting: dict[str, _Record] = {}
        self._flights: dict[int, Flight] = {}
        self._covered: dict[Key, Flight] = {}
        """Keys of chain flights -> the flight."""
        self._numbers = count(1)
        self._step = 0

    def __len__(self) -> int:
        """Flights that are out."""
        return len(self._flights)

    @property
    def requests(self) -> int:
        """Requests that are remembered."""
        return len(self._records)

    def ask(self, key: Key, asker: Asker, now_s: float) -> Lookup:
        """A request wants to know of a key that nothing is known of: RETRY, or MISS once it has waited long enough."""
        record = self._records.get(asker.request_id)
        if record is None:
            record = self._records[asker.request_id] = _Record(asker.request_id, now_s, now_s)
        record.last_s = now_s
        if record.late or now_s - record.first_s >= self._timeout_s:
            if not record.late:
                record.late = True
                self.late += 1
            return Lookup.MISS
        if key in record.ruled_out:
            return Lookup.MISS
        group, end = key_group(key), asker.end_token or 0
        flight = record.flights.get(group)
        if flight is not None:
            return self._hold(record, group, flight, end)
        note = record.notes.get(group)
        if note is None:
            note = record.notes[group] = _Note(end)
            self._noting[asker.request_id] = record
        note.last_end = end
        note.keys.append(key)
        return Lookup.RETRY

    def depart(self, now_s: float) -> list[Flight]:
        """The step is over: return the flights that begin now."""
        self._step += 1
        begun: list[Flight] = []
        for record in self._noting.values():
            # Asked twice in a step: the second time repeats the first.
            chains = {group: note for group, note in record.notes.items() if note.last_end >= note.first_end}
            for group, note in chains.items():
                self._depart_chain(record, group, list(dict.fromkeys(note.keys)), begun)
            # How far a window's scan must look back depends on how long the prefix of the other groups is.
            if not any(flight.kind is Kind.CHAIN for flight in record.flights.values()):
                for group, note in record.notes.items():
                    if group not in chains:
                        self._depart_window(record, group, list(dict.fromkeys(note.keys)), begun)
            record.notes = {}
        self._noting = {}
        if len(self._records) > _MAX_RECORDS:
            self._prune(now_s)
        return begun

    def arrive(self, number: int, boundary: int, found: int) -> Flight | None:
        """A search is over: its requests may ask again. Returns its flight, None for one that was given up."""
        flight = self._flights.pop(number, None)
        if flight is None:
            return None
        self._land(flight)
        for record, group in flight.askers:
            if flight.kind is Kind.WINDOW:
                grown = min(2 * len(flight.keys), MAX_WINDOW_KEYS) if found == len(flight.keys) else WINDOW_KEYS
                record.window_keys[group] = grown if found else 0
            elif flight.kind is Kind.EDGE:
                record.ruled_out.update(flight.keys[boundary:])
                record.window_keys[group] = WINDOW_KEYS
        return flight

    def forget(self, request_id: str) -> list[int]:
        """No more questions from this request. Returns the flights that nobody waits for any more."""
        record = self._records.pop(request_id, None)
        self._noting.pop(request_id, None)
        return [flight.number for flight in self._leave([record])] if record is not None else []

    def give_up(self, now_s: float) -> list[Flight]:
        """Return the flights for which nobody waits any more because all have waited long enough."""
        late = [
            record
            for flight in self._flights.values()
            for record, _ in flight.askers
            if record.late or now_s - record.first_s >= self._timeout_s
        ]
        return self._leave(late)

    def drop_all(self) -> None:
        """Give up every flight and every note. Waiting requests may ask again; their time goes on."""
        for flight in self._flights.values():
            self._land(flight)
        self._flights, self._covered = {}, {}
        for record in self._records.values():
            record.notes, record.ruled_out, record.window_keys = {}, set(), {}
        self._noting = {}

    def _hold(self, record: _Record, group: int, flight: Flight, end: int) -> Lookup:
        """A request whose chain is being looked at is told so once a step: RETRY, then MISS for what lies behind.

        vLLM stops at the MISS and still asks again in the next step. Going on through thousands of keys, as it does
        after RETRY, would take from the step the time that the search is meant to save.
        """
        step, held_end = record.held_at.get(group, (-1, 0))
        if step == self._step and end > held_end and flight.kind is Kind.CHAIN:
            return Lookup.MISS
        record.held_at[group] = self._step, end
        return Lookup.RETRY

    def _depart_chain(self, record: _Record, group: int, keys: list[Key], begun: list[Flight]) -> None:
        flight = self._covered.get(keys[0])
        if flight is None:
            flight = self._begin(Kind.CHAIN, keys, ChainSearch(len(keys), infer=self.infer), begun)
            for key in keys:
                self._covered[key] = flight
        flight.askers.append((record, group))
        record.flights[group] = flight

    def _depart_window(self, record: _Record, group: int, keys: list[Key], begun: list[Flight]) -> None:
        wanted = record.window_keys.get(group, WINDOW_KEYS)
        if wanted:
            keys = keys[:wanted]
            flight = self._begin(Kind.WINDOW, keys, AskAll(len(keys)), begun)
        else:
            keys.reverse()
            flight = self._begin(Kind.EDGE, keys, ChainSearch(len(keys)), begun)
        flight.askers.append((record, group))
        record.flights[group] = flight

    def _begin(self, kind: Kind, keys: list[Key], plan: Search, begun: list[Flight]) -> Flight:
        flight = Flight(next(self._numbers), kind, keys, plan, [])
        self._flights[flight.number] = flight
        begun.append(flight)
        return flight

    def _land(self, flight: Flight) -> None:
        for record, group in flight.askers:
            if record.flights.get(group) is flight:
                del record.flights[group]
        if flight.kind is Kind.CHAIN:
            for key in flight.keys:
                if self._covered.get(key) is flight:
                    del self._covered[key]

    def _leave(self, records: list[_Record]) -> list[Flight]:
        abandoned = []
        for record in records:
            for flight in record.flights.values():
                flight.askers = [asker for asker in flight.askers if asker[0] is not record]
                if not flight.askers and self._flights.pop(flight.number, None) is not None:
                    self._land(flight)
                    abandoned.append(flight)
            record.flights = {}
        return abandoned

    def _prune(self, now_s: float) -> None:
        for request_id, record in list(self._records.items()):
            if not record.flights and now_s - record.last_s > _IDLE_S:
                del self._records[request_id]
