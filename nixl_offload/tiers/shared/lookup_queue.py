"""Who waits to learn what about a shared store: a step's lookups become searches, one per question.

Threading: none; the scheduler's thread alone. No I/O, no clock: time is passed in (monotonic seconds).

vLLM asks key by key. What one request asks in a step about one KV-cache group is a *batch*. Its keys come front to
back, and a chain search finds where the prefix ends; or back to front, and only the last few matter (a window). A
batch becomes a *search*, and until that ends the request is told to ask again. A request whose first unknown key is
already covered by another's search waits for that one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from nixl_offload.tiers.shared.chain_search import AskAll, ChainSearch, Search
from nixl_offload.types import Key, Lookup, LookupContext, key_group

WINDOW_KEYS = 16
"""A window's scan begins with so many keys from the end, and doubles while all are there."""
MAX_WINDOW_KEYS = 256
_MAX_REQUESTS = 10_000
_IDLE_S = 600.0


class SearchKind(Enum):
    """What a search is to find out."""

    CHAIN = "chain"
    """Where a prefix ends; what lies before is there."""
    WINDOW = "window"
    """Each of a few keys."""
    EDGE = "edge"
    """Where to begin the scan for a window: nothing was there at the end. Says nothing of keys it did not ask about."""


@dataclass(slots=True, eq=False)
class _KeyBatch:
    first_end: int
    last_end: int = 0
    keys: list[Key] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Request:
    """One request."""

    request_id: str
    first_s: float
    """When its wait began."""
    last_s: float
    step: int
    """In which it asked last."""
    answered: bool = False
    """The last of its searches has ended, and was not given up."""
    late: bool = False
    """Waited long enough: what is not known is absent for it."""
    batches: dict[int, _KeyBatch] = field(default_factory=dict)
    searches: dict[int, QueuedSearch] = field(default_factory=dict)
    """By group, as ``batches``."""
    held_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By group: the step in which it was told last to wait for a search, and the end of the key it asked about."""
    ruled_out: set[Key] = field(default_factory=set)
    """Behind the edge."""
    window_keys: dict[int, int] = field(default_factory=dict)
    """How many to ask about next, 0 after nothing was there: then the edge is looked for."""


@dataclass(slots=True, eq=False)
class QueuedSearch:
    """A search that is under way, and who waits for it: requests and their groups."""

    number: int
    kind: SearchKind
    keys: list[Key]
    plan: Search
    waiting: list[tuple[_Request, int]]


class LookupQueue:
    """Each request is held back ``timeout_s`` at most, counted from the first time that it was told to ask again.

    Once answered it may go on for a while and then ask about what has been forgotten meanwhile: that is another wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self.infer = True
        """Whether a chain's links may be taken for present without asking about each."""
        self.late = 0
        """Requests that were not answered in time, ever; for metrics."""
        self._timeout_s = timeout_s
        self._requests: dict[str, _Request] = {}
        self._batching: dict[str, _Request] = {}
        self._searches: dict[int, QueuedSearch] = {}
        self._covered: dict[Key, QueuedSearch] = {}
        """Keys of chain searches -> the search."""
        self._numbers = count(1)
        self._step = 0

    def __len__(self) -> int:
        """Searches that are under way."""
        return len(self._searches)

    @property
    def requests(self) -> int:
        """Requests that are remembered."""
        return len(self._requests)

    def ask(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """A request wants to know of a key that nothing is known of: RETRY, or MISS once it has waited long enough."""
        record = self._requests.get(context.request_id)
        if record is None:
            record = self._requests[context.request_id] = _Request(context.request_id, now_s, now_s, self._step)
        elif record.answered and self._step > record.step + 1:
            record.first_s = now_s  # it has not asked for a step at least: not because it was told to wait
        record.last_s, record.step = now_s, self._step
        if record.late or now_s - record.first_s >= self._timeout_s:
            if not record.late:
                record.late = True
                self.late += 1
            return Lookup.MISS
        if key in record.ruled_out:
            return Lookup.MISS
        group, end = key_group(key), context.end_token or 0
        search = record.searches.get(group)
        if search is not None:
            return self._hold(record, group, search, end)
        batch = record.batches.get(group)
        if batch is None:
            batch = record.batches[group] = _KeyBatch(end)
            self._batching[context.request_id] = record
        batch.last_end = end
        batch.keys.append(key)
        return Lookup.RETRY

    def is_late(self, request_id: str) -> bool:
        """Whether this request has waited long enough, and something was not known."""
        record = self._requests.get(request_id)
        return record is not None and record.late

    def begin_searches(self, now_s: float) -> list[QueuedSearch]:
        """The step is over: return the searches that begin now."""
        self._step += 1
        begun: list[QueuedSearch] = []
        for record in self._batching.values():
            # Asked twice in a step: the second time repeats the first.
            chains = {group: batch for group, batch in record.batches.items() if batch.last_end >= batch.first_end}
            for group, batch in chains.items():
                self._begin_chain(record, group, list(dict.fromkeys(batch.keys)), begun)
            # How far a window's scan must look back depends on how long the prefix of the other groups is.
            if not any(search.kind is SearchKind.CHAIN for search in record.searches.values()):
                for group, batch in record.batches.items():
                    if group not in chains:
                        self._begin_window(record, group, list(dict.fromkeys(batch.keys)), begun)
            record.batches = {}
        self._batching = {}
        if len(self._requests) > _MAX_REQUESTS:
            self._prune(now_s)
        return begun

    def finish(self, number: int, boundary: int, found: int) -> QueuedSearch | None:
        """A search is over: its requests may ask again. Returns its search, None for one that was given up."""
        search = self._searches.pop(number, None)
        if search is None:
            return None
        self._detach(search)
        for record, group in search.waiting:
            record.answered = not record.searches
            if search.kind is SearchKind.WINDOW:
                grown = min(2 * len(search.keys), MAX_WINDOW_KEYS) if found == len(search.keys) else WINDOW_KEYS
                record.window_keys[group] = grown if found else 0
            elif search.kind is SearchKind.EDGE:
                record.ruled_out.update(search.keys[boundary:])
                record.window_keys[group] = WINDOW_KEYS
        return search

    def forget(self, request_id: str) -> list[int]:
        """No more questions from this request. Returns the searches that nobody waits for any more."""
        record = self._requests.pop(request_id, None)
        self._batching.pop(request_id, None)
        return [search.number for search in self._abandon([record])] if record is not None else []

    def give_up(self, now_s: float) -> list[QueuedSearch]:
        """Return the searches for which nobody waits any more because all have waited long enough."""
        late = [
            record
            for search in self._searches.values()
            for record, _ in search.waiting
            if record.late or now_s - record.first_s >= self._timeout_s
        ]
        return self._abandon(late)

    def drop_all(self) -> None:
        """Give up every search and every batch. Waiting requests may ask again; their time goes on."""
        for search in self._searches.values():
            self._detach(search)
        self._searches, self._covered = {}, {}
        for record in self._requests.values():
            record.batches, record.ruled_out, record.window_keys = {}, set(), {}
            record.answered = False
        self._batching = {}

    def _hold(self, record: _Request, group: int, search: QueuedSearch, end: int) -> Lookup:
        """A request whose chain is being looked at is told so once a step: RETRY, then MISS for what lies behind.

        vLLM stops at the MISS and still asks again in the next step. Going on through thousands of keys, as it does
        after RETRY, would take from the step the time that the search is meant to save.
        """
        step, held_end = record.held_at.get(group, (-1, 0))
        if step == self._step and end > held_end and search.kind is SearchKind.CHAIN:
            return Lookup.MISS
        record.held_at[group] = self._step, end
        return Lookup.RETRY

    def _begin_chain(self, record: _Request, group: int, keys: list[Key], begun: list[QueuedSearch]) -> None:
        search = self._covered.get(keys[0])
        if search is None:
            search = self._begin(SearchKind.CHAIN, keys, ChainSearch(len(keys), infer=self.infer), begun)
            for key in keys:
                self._covered[key] = search
        self._wait(record, group, search)

    def _begin_window(self, record: _Request, group: int, keys: list[Key], begun: list[QueuedSearch]) -> None:
        wanted = record.window_keys.get(group, WINDOW_KEYS)
        if wanted:
            keys = keys[:wanted]
            search = self._begin(SearchKind.WINDOW, keys, AskAll(len(keys)), begun)
        else:
            keys.reverse()
            search = self._begin(SearchKind.EDGE, keys, ChainSearch(len(keys)), begun)
        self._wait(record, group, search)

    def _wait(self, record: _Request, group: int, search: QueuedSearch) -> None:
        search.waiting.append((record, group))
        record.searches[group] = search
        record.answered = False

    def _begin(self, kind: SearchKind, keys: list[Key], plan: Search, begun: list[QueuedSearch]) -> QueuedSearch:
        search = QueuedSearch(next(self._numbers), kind, keys, plan, [])
        self._searches[search.number] = search
        begun.append(search)
        return search

    def _detach(self, search: QueuedSearch) -> None:
        for record, group in search.waiting:
            if record.searches.get(group) is search:
                del record.searches[group]
        if search.kind is SearchKind.CHAIN:
            for key in search.keys:
                if self._covered.get(key) is search:
                    del self._covered[key]

    def _abandon(self, records: list[_Request]) -> list[QueuedSearch]:
        abandoned = []
        for record in records:
            for search in record.searches.values():
                search.waiting = [context for context in search.waiting if context[0] is not record]
                if not search.waiting and self._searches.pop(search.number, None) is not None:
                    self._detach(search)
                    abandoned.append(search)
            record.searches = {}
        return abandoned

    def _prune(self, now_s: float) -> None:
        for request_id, record in list(self._requests.items()):
            if not record.searches and now_s - record.last_s > _IDLE_S:
                del self._requests[request_id]
