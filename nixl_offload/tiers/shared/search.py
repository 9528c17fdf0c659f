"""Searches for chunks in a shared tier, and which request waits for which: the lookups of a step become searches.

Threading: ``Lookups`` is used by the scheduler's thread alone. A ``Search`` belongs to the prober until it has ended.
No I/O, no clock: time is passed in (monotonic seconds).

vLLM asks key by key. What one request asks in a step about one KV-cache group is a *batch*. Its keys come front to
back, and a search finds where the prefix ends; or back to front, and only the last few matter (a window). Until the
search of a batch has ended the answer is RETRY. A request whose first unknown key is already covered by
another's search waits for that one.

Prefixes are stored front to back, so "the chunk is there" is nearly always true up to some point and false from there
on. A search asks about 16 positions at once and cuts the range by 17 with each round: three rounds settle any chain of
up to 4,300 chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from nixl_offload.types import Key, Lookup, LookupContext, key_group

FAN_OUT: Final = 16
WINDOW_KEYS: Final = 32
"""So many of the last keys are asked about one by one while a window is looked for."""


class SearchKind(Enum):
    """What a search is to find out."""

    CHAIN = "chain"
    """Where a prefix ends; what lies before is there."""
    WINDOW = "window"
    """The last few keys that are there: at the end, or, where nothing is, before the point where a prefix ends."""


@dataclass(slots=True, eq=False)
class Search:
    """One search. Ask ``next_round``, pass each result to ``answer``, until ``done``; then ``boundary`` is the result.

    The first round asks about the first and the last key too: "nothing" and "everything" are the commonest answers.
    Where there is a hole, no key is claimed behind one that is known to be absent. What was not asked about may be
    wrong; then a load fails, and the chunk is computed.
    """

    kind: SearchKind
    keys: list[Key]
    certain: int = 0
    """Of the last keys before the boundary so many are asked about one by one; others may be taken for present because
    a later one is."""
    failed: bool = False
    """A question was not answered, and counted as absent."""
    waiting: list[tuple[_Request, int]] = field(default_factory=list)
    """Requests and their groups."""
    boundary: int = 0
    """How many leading keys are there, as far as is known. Never more than the first known to be absent."""
    _high: int = field(init=False)
    """The first key known to be absent."""
    _answers: dict[int, bool | None] = field(default_factory=dict)
    """Of each position that was asked about; None while the answer is out."""

    def __post_init__(self) -> None:
        self._high = len(self.keys)

    @property
    def known(self) -> int:
        """``boundary`` for those who cannot wait until it is ``done``: up to the first question that is still out."""
        return min([self.boundary, *(position for position, answer in self._answers.items() if answer is None)])

    @property
    def found_at_end(self) -> bool:
        """Whether any of the last keys is there, those that a window is looked for among."""
        return any(self._answers.get(position) for position in self._end())

    @property
    def done(self) -> bool:
        """Whether no answer that is still out could change the result."""
        return not self._open() and not self._is_waiting()

    def next_round(self) -> list[int]:
        """Return the positions to ask about now; empty while answers that matter are still out, and when done."""
        positions = [] if self._is_waiting() else self._open()
        self._answers.update(dict.fromkeys(positions))
        return positions

    def answer(self, position: int, is_there: bool) -> None:
        """Take the answer to a question that is out. If there was none to be had, say absent."""
        assert self._answers[position] is None, "nobody has asked, or it is answered"
        self._answers[position] = is_there
        if position >= self._high:
            return
        if is_there:
            self.boundary = max(self.boundary, position + 1)
            return
        self._high = position
        if self.boundary > position:  # a hole: what lies behind it is of no use
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
class _Batch:
    first_end: int
    last_end: int = 0
    keys: list[Key] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Request:
    first_s: float
    """When its wait began."""
    step: int
    """In which it asked last."""
    is_answered: bool = False
    """The last of its searches has ended, and was not given up."""
    is_late: bool = False
    """Waited long enough: what is not known is absent for it."""
    batches: dict[int, _Batch] = field(default_factory=dict)
    searches: dict[int, Search] = field(default_factory=dict)
    """By group, as ``batches``."""
    held_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By group: the step in which it last had to wait for a search, and the end of the key it asked about."""
    ruled_out: set[Key] = field(default_factory=set)
    """Behind the end of what is there of a group that has windows."""


class Lookups:
    """Each request is held back ``timeout_s`` at most, counted from its first RETRY.

    Once answered it may go on for a while and then ask about what has been forgotten meanwhile: that is another wait.
    """

    def __init__(self, timeout_s: float) -> None:
        self.infer = True
        """Whether chunks of a chain may be taken for present without asking about each."""
        self.late = 0
        """Requests that were not answered in time, ever; for metrics."""
        self._timeout_s = timeout_s
        self._requests: dict[str, _Request] = {}
        self._batching: dict[str, _Request] = {}
        self._searches: dict[Search, None] = {}
        self._covered: dict[Key, Search] = {}
        """Keys of chain searches -> the search."""
        self._step = 0

    def __len__(self) -> int:
        """Searches that are under way."""
        return len(self._searches)

    def ask(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        """A request asks about a key of which nothing is known: RETRY, or MISS once it has waited long enough."""
        request = self._requests.get(context.request_id)
        if request is None:
            request = self._requests[context.request_id] = _Request(now_s, self._step)
        elif request.is_answered and self._step > request.step + 1:
            request.first_s = now_s  # it has not asked for a step at least, so this is another wait
        request.step = self._step
        if not request.is_late and now_s - request.first_s >= self._timeout_s:
            request.is_late = True
            self.late += 1
        if request.is_late or key in request.ruled_out:
            return Lookup.MISS
        group, end = key_group(key), context.end_token or 0
        search = request.searches.get(group)
        if search is not None:
            # A request whose chain is being looked at gets RETRY once a step, then MISS for what lies behind. vLLM
            # stops at the MISS and still asks again in the next step. Going on through thousands of keys, as it does
            # after RETRY, would take from the step the time that the search is meant to save.
            step, held_end = request.held_at.get(group, (-1, 0))
            if step == self._step and end > held_end and search.kind is SearchKind.CHAIN:
                return Lookup.MISS
            request.held_at[group] = self._step, end
            return Lookup.RETRY
        batch = request.batches.setdefault(group, _Batch(end))
        self._batching[context.request_id] = request
        batch.last_end = end
        batch.keys.append(key)
        return Lookup.RETRY

    def is_late(self, request_id: str) -> bool:
        """Whether this request has waited long enough, and something was not known."""
        request = self._requests.get(request_id)
        return request is not None and request.is_late

    def begin_searches(self) -> list[Search]:
        """The step is over: return the searches that begin now."""
        self._step += 1
        before, batching, self._batching = len(self._searches), self._batching, {}
        for request in batching.values():
            batches, request.batches = request.batches, {}
            # Asked twice in a step: the second time repeats the first.
            chains = {group: batch for group, batch in batches.items() if batch.last_end >= batch.first_end}
            for group, batch in chains.items():
                self._begin_chain(request, group, list(dict.fromkeys(batch.keys)))
            # How far a window's scan must look back depends on how long the prefix of the other groups is.
            if not any(search.kind is SearchKind.CHAIN for search in request.searches.values()):
                for group in batches.keys() - chains.keys():
                    keys = list(dict.fromkeys(batches[group].keys))[::-1]
                    self._wait(request, group, Search(SearchKind.WINDOW, keys, certain=WINDOW_KEYS))
        return list(self._searches)[before:]

    def finish(self, search: Search) -> bool:
        """A search has ended: its requests may ask again. False: it had been given up."""
        if search not in self._searches:
            return False
        self._drop(search)
        for request, _ in search.waiting:
            request.is_answered = not request.searches
            if search.kind is SearchKind.WINDOW and not search.failed and not search.found_at_end:
                request.ruled_out.update(search.keys[search.boundary :])
        return True

    def forget(self, request_id: str) -> list[Search]:
        """No more questions from this request. Returns the searches that nobody waits for any more."""
        request = self._requests.pop(request_id, None)
        self._batching.pop(request_id, None)
        return self._abandon([request]) if request is not None else []

    def give_up(self, now_s: float) -> list[Search]:
        """Return the searches for which nobody waits any more because all have waited long enough."""
        waiting = [request for search in self._searches for request, _ in search.waiting]
        return self._abandon([each for each in waiting if each.is_late or now_s - each.first_s >= self._timeout_s])

    def drop_all(self) -> None:
        """Give up every search and every batch. Waiting requests may ask again; their time goes on."""
        self._batching, self._searches, self._covered = {}, {}, {}
        for request in self._requests.values():
            request.batches, request.searches, request.is_answered = {}, {}, False
            request.ruled_out = set()

    def _begin_chain(self, request: _Request, group: int, keys: list[Key]) -> None:
        search = self._covered.get(keys[0])
        if search is None:
            search = Search(SearchKind.CHAIN, keys, certain=0 if self.infer else len(keys))
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
