"""Searches for chunks in a shared tier, and which request waits for which: the lookups of a step become searches.

Threading: ``Lookups`` is used by the scheduler's thread alone. A ``Search`` belongs to the prober until it has ended.
No I/O, no clock: time is passed in (monotonic seconds).

vLLM asks key by key. The keys of one KV-cache group that one request asks about in one step are a *batch*. If they come
front to back (a chain), a search finds where the prefix ends. If they come back to front (a window), only the last few
matter. The answer is RETRY until the search of the batch has ended. A request whose first unknown key is already
covered by another request's search waits for that search.

Prefixes are stored front to back, so chunks are nearly always present up to some point and absent after it. Each round
of a search asks about 16 positions and cuts the range by 17: three rounds settle a chain of up to 4,300 chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from nixl_offload.types import Key, Lookup, LookupContext, key_group

FAN_OUT: Final = 16
UNLIKELY: Final = 0.1
"""If searches find less than this part of their keys, the next one asks about its first key alone at first."""
NEWEST: Final = 0.2
"""The weight of the latest search in what they find and how long they take."""
WINDOW_KEYS: Final = 32
"""The search for a window asks about this many of the last keys one by one."""


class SearchKind(Enum):
    """The two kinds of searches."""

    CHAIN = "chain"
    """The end of a prefix; all chunks before it count as present."""
    WINDOW = "window"
    """The last few keys that are present: at the end, or, if none is there, before the end of a prefix."""


@dataclass(slots=True, eq=False)
class Search:
    """One search. Ask ``next_round``, pass each result to ``answer``, until ``done``; then ``boundary`` is the result.

    The first round includes the first and the last key, because "nothing" and "everything" are the commonest results.
    No key after one that is known to be absent counts as present. A key that was not asked about may be absent; then a
    load fails, and the chunk is computed.
    """

    kind: SearchKind
    keys: list[Key]
    certain: int = 0
    """This many keys before the boundary are asked about one by one. Earlier keys may count as present because a later
    one is."""
    is_unlikely: bool = False
    """Whether probably nothing is there: then the first round asks about the first key alone."""
    failed: bool = False
    """Whether a question failed, and its key counted as absent."""
    waiting: list[tuple[_Request, int]] = field(default_factory=list)
    """The requests that wait for this search, and the group each asks about."""
    is_over: bool = False
    """Whether it has ended or was cancelled; the prober's."""
    boundary: int = 0
    """How many leading keys count as present so far. Never beyond the first key known to be absent."""
    _high: int = field(init=False)
    """Position of the first key known to be absent."""
    _answers: dict[int, bool | None] = field(default_factory=dict)
    """By position asked about: whether the key is present; None until the answer comes."""

    def __post_init__(self) -> None:
        self._high = len(self.keys)

    @property
    def known(self) -> int:
        """``boundary`` before the search is ``done``: it stops at the first question without an answer."""
        return min([self.boundary, *(position for position, answer in self._answers.items() if answer is None)])

    @property
    def found_at_end(self) -> bool:
        """Whether any of the last ``WINDOW_KEYS`` keys is known to be present."""
        return any(self._answers.get(position) for position in self._end())

    @property
    def done(self) -> bool:
        """Whether no further answer could change the result."""
        return not self._open() and not self._is_waiting()

    def next_round(self) -> list[int]:
        """Return the positions to ask about now; empty while relevant answers are missing, and when done."""
        positions = [] if self._is_waiting() else self._open()
        self._answers.update(dict.fromkeys(positions))
        return positions

    def answer(self, position: int, is_there: bool) -> None:
        """Take the answer to a question. A question that failed counts as absent."""
        assert self._answers[position] is None, "nobody has asked, or it is answered"
        self._answers[position] = is_there
        if position >= self._high:
            return
        if is_there:
            self.boundary = max(self.boundary, position + 1)
            return
        self._high = position
        if self.boundary > position:  # a hole: keys after it are of no use
            before = (each for each, answer in self._answers.items() if answer and each < position)
            self.boundary = max(before, default=-1) + 1

    def _end(self) -> range:
        return range(max(0, len(self.keys) - WINDOW_KEYS), len(self.keys))

    def _is_waiting(self) -> bool:
        limit = len(self.keys) if self.kind is SearchKind.WINDOW else self._high
        return any(answer is None and position < limit for position, answer in self._answers.items())

    def _open(self) -> list[int]:
        """Return the positions worth asking about next."""
        low, unknown = self.boundary, self._high - self.boundary
        if self.is_unlikely and not self._answers:
            return [0]
        if self.kind is SearchKind.WINDOW:
            if not self._answers:
                return list(self._end())
            if self.found_at_end:
                return []
        if not unknown:
            return [each for each in range(max(0, low - self.certain), low) if each not in self._answers]
        if unknown <= FAN_OUT:
            return list(range(low, self._high))
        if not any(position < self._high for position in self._answers):
            return [step * (unknown - 1) // (FAN_OUT - 1) for step in range(FAN_OUT)]
        return [low + (step + 1) * (unknown + 1) // (FAN_OUT + 1) - 1 for step in range(FAN_OUT)]


@dataclass(slots=True, eq=False)
class _Request:
    first_s: float
    """When its wait began."""
    step: int
    """The step in which it last asked."""
    is_answered: bool = False
    """Whether all its searches have ended, none of them given up, and no question of the last one failed."""
    is_late: bool = False
    """Whether it has waited ``timeout_s``. Unknown keys then count as absent for it."""
    batches: dict[int, list[tuple[int, Key]]] = field(default_factory=dict)
    """By group: the keys that it has asked about in this step, and where each ends."""
    searches: dict[int, Search] = field(default_factory=dict)
    """By group, as ``batches``."""
    held_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By group: the step in which it last had to wait for a search, and the end token of the key it asked about."""
    ruled_out: set[Key] = field(default_factory=set)
    """Keys of window groups after the last present key of a finished search."""


class Lookups:
    """Collects lookups into searches. Each request waits ``timeout_s`` at most, counted from its first RETRY.

    If an answered request later asks about keys that were forgotten meanwhile, a new wait begins.
    """

    def __init__(self, timeout_s: float) -> None:
        self.infer = True
        """Whether chunks of a chain may count as present without a question about each."""
        self.late = 0
        """Requests that were not answered in time, since the start; for metrics."""
        self.found, self.search_s = 1.0, 0.0
        """The part of their keys that searches have found of late, and how long a request waited for one."""
        self._timeout_s = timeout_s
        self._requests: dict[str, _Request] = {}
        self._batching: dict[str, _Request] = {}
        self._searches: dict[Search, None] = {}
        self._covered: dict[Key, Search] = {}
        """Key -> the chain search that covers it."""
        self._step = 0

    def __len__(self) -> int:
        """Number of searches under way."""
        return len(self._searches)

    def ask(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """Look up a key of which nothing is known. Returns RETRY, or MISS once the request has waited ``timeout_s``."""
        request = self._requests.get(context.request_id)
        if request is None:
            request = self._requests[context.request_id] = _Request(now_s, self._step)
        elif request.is_answered and self._step > request.step + 1:
            request.first_s = now_s  # it did not ask in the last step, so this is a new wait
        request.step = self._step
        if not request.is_late and now_s - request.first_s >= self._timeout_s:
            request.is_late = True
            self.late += 1
        if request.is_late or not context.waits or key in request.ruled_out:
            return Lookup.MISS
        group, end = key_group(key), context.end_token or 0
        search = request.searches.get(group)
        if search is not None:
            # While its chain is searched, a request gets one RETRY per step, then MISS for the keys after it. vLLM
            # stops at a MISS and still asks again in the next step. After a RETRY it would go on through thousands of
            # keys, which would cost the step the time that the search saves.
            step, held_end = request.held_at.get(group, (-1, 0))
            if step == self._step and end > held_end and search.kind is SearchKind.CHAIN:
                return Lookup.MISS
            request.held_at[group] = self._step, end
            return Lookup.RETRY
        request.batches.setdefault(group, []).append((end, key))
        self._batching[context.request_id] = request
        return Lookup.RETRY

    def answered(self, request_id: str) -> bool | None:
        """Whether this request has the answers to all its lookups, and had them in time; None: not yet."""
        request = self._requests.get(request_id)
        if request is None or request.is_late:
            return request is None
        return None if request.batches or request.searches else request.is_answered

    def begin_searches(self) -> list[Search]:
        """Called at the end of each step. Returns the searches to begin now."""
        self._step += 1
        before, batching, self._batching = len(self._searches), self._batching, {}
        for request in batching.values():
            batches, request.batches = request.batches, {}
            # If a request asked twice in a step, the second batch repeats the first.
            keys = {group: list(dict.fromkeys(key for _, key in batch)) for group, batch in batches.items()}
            chains = {group for group, batch in batches.items() if batch[-1][0] >= batch[0][0]}
            for group in chains:
                self._begin_chain(request, group, keys[group])
            # How far a window's search must look back depends on the prefix of the other groups, so it begins last.
            if not any(search.kind is SearchKind.CHAIN for search in request.searches.values()):
                for group in keys.keys() - chains:
                    self._wait(request, group, Search(SearchKind.WINDOW, keys[group][::-1], certain=WINDOW_KEYS))
        return list(self._searches)[before:]

    def finish(self, search: Search, now_s: float) -> bool:
        """Take in a search that has ended; its requests may ask again. False: it had been given up."""
        if search not in self._searches:
            return False
        self._drop(search)
        if not search.failed:
            self.found += NEWEST * (search.boundary / len(search.keys) - self.found)
            self.search_s += NEWEST * (now_s - search.waiting[0][0].first_s - self.search_s)
        for request, _ in search.waiting:
            request.is_answered = not request.searches and not search.failed
            if search.kind is SearchKind.WINDOW and not search.failed and not search.found_at_end:
                request.ruled_out.update(search.keys[search.boundary :])
        return True

    def forget(self, request_id: str) -> list[Search]:
        """Forget a request that asks no more. Returns the searches for which no request waits any more."""
        request = self._requests.pop(request_id, None)
        self._batching.pop(request_id, None)
        return self._abandon([request]) if request is not None else []

    def give_up(self, now_s: float) -> list[Search]:
        """Give up the searches whose requests have all waited ``timeout_s``, and return them."""
        waiting = [request for search in self._searches for request, _ in search.waiting]
        return self._abandon([each for each in waiting if each.is_late or now_s - each.first_s >= self._timeout_s])

    def drop_all(self) -> list[Search]:
        """Give up every search and batch; return the searches. Waiting requests may ask again in the same wait."""
        dropped = list(self._searches)
        self._batching, self._searches, self._covered = {}, {}, {}
        for request in self._requests.values():
            request.is_answered &= not request.batches and not request.searches
            request.batches, request.searches, request.ruled_out = {}, {}, set()
        return dropped

    def _begin_chain(self, request: _Request, group: int, keys: list[Key]) -> None:
        search = self._covered.get(keys[0])
        if search is None:
            certain, is_unlikely = 0 if self.infer else len(keys), self.found < UNLIKELY
            search = Search(SearchKind.CHAIN, keys, certain, is_unlikely)
            self._covered.update(dict.fromkeys(keys, search))
        self._wait(request, group, search)

    def _wait(self, request: _Request, group: int, search: Search) -> None:
        self._searches[search] = None
        search.waiting.append((request, group))
        request.searches[group] = search
        request.is_answered = False

    def _drop(self, search: Search) -> None:
        self._searches.pop(search, None)
        for request, group in search.waiting:
            if request.searches.get(group) is search:
                del request.searches[group]
        for key in search.keys if search.kind is SearchKind.CHAIN else ():
            if self._covered.get(key) is search:
                del self._covered[key]

    def _abandon(self, requests: list[_Request]) -> list[Search]:
        abandoned = []
        for request in requests:
            searches, request.searches = request.searches, {}
            for search in searches.values():
                search.waiting = [waiter for waiter in search.waiting if waiter[0] is not request]
                if not search.waiting and search in self._searches:
                    self._drop(search)
                    abandoned.append(search)
        return abandoned
