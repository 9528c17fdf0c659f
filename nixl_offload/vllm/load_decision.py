"""Load or recompute: how much of a request's hit to load, so that the server as a whole is fastest.

The GPU and each tier are queues. A load waits for the loads that are out; it does not use the GPU. A prefill uses the
GPU, and delays the requests that wait for it and those that decode. So a load costs the time until it is done, queue
included. Computing costs its time on the GPU, once for each request that waits, and in part for those that decode.

Threading: the scheduler's thread. Reads no clock: time is passed in. Old observations fade.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from nixl_offload.tiers.base import Tier
    from nixl_offload.types import Location
    from nixl_offload.vllm.messages import LoadSample

TRIAL_INTERVAL_S: Final = 30.0
"""A tier that is judged too slow is tried again after this time. Each further trial waits four times as long as the one
before, ``TRIAL_LIMIT_S`` at most."""
TRIAL_LIMIT_S: Final = 600.0
SLOW_FAILURE_S: Final = 1.0
"""A load that fails sooner was refused, and says nothing of how long loads take."""
LOADS_AT_ONCE: Final = 4
"""Most loads that are out at a time on a tier of unknown speed, or while the speed of computing is unknown."""
WAIT_S: Final = 0.5
"""How long a hit waits for such loads while the speed of computing is unknown. Later the limit is the time that
computing the hit would take."""
FETCH_FROM_S: Final = 0.1
"""A hit whose load takes longer is read into memory before its request has blocks. That takes one or two steps more."""
MIN_TOKENS: Final = 64
"""Steps with fewer tokens decode, or are too short to measure."""

_TOLERANCE: Final = 1.05
"""A load is preferred while it costs at most this many times as much as computing."""
_RUNNING_WEIGHT: Final = 0.4
_MOST_RUNNING: Final = 2.0
"""A prefill delays the next token of each running request. Each counts as ``_RUNNING_WEIGHT`` waiting requests, and all
together as at most ``_MOST_RUNNING``: the full weight would accept a long TTFT for a few more requests per second
(decision 0018)."""
_FEWEST: Final = 3
"""Observations that an estimate needs."""
_OUTLIER: Final = 16.0
"""An observation counts as at most this many times its estimate, so that one stall does not decide."""
_SPREAD: Final = 0.2
"""If the standard deviation of the sizes is below this part of their mean, they count as one size, without a slope."""
_TIER_KEEP: Final = 0.9
"""The part of their weight that older loads keep at each new one: about the last ten count."""
_TIER_HALF_LIFE_S: Final = 6.0
"""Where loads are rare, the last one counts most: one slow load shows that a tier has become slow, not ten."""
_PREFILL_HALF_LIFE_TOKENS: Final = 32768.0
_MIN_SHARE: Final = 0.1
"""The least part of a step's time that its prompt tokens count for. If an estimate is too low, the next long prompt is
computed and corrects it. If it is too high, every hit is loaded and nothing corrects it."""
_STEP_KEEP: Final = 0.9
"""The part of its old value that the price of a step keeps at each step that only decodes."""
_MOST_OPEN_STEPS: Final = 16

Counts = Mapping[tuple[str | int, ...], int]
"""By the name of a metric, then its labels; an int is the position of a tier."""
Decision = Literal["taken", "skipped", "unknown", "trial"]
"""The decision about a tier's part of a hit. skipped: computing is expected to be faster. unknown: computed, because a
speed is not known yet and ``LOADS_AT_ONCE`` loads are out. trial: loaded although the tier was judged too slow.
"""


def weight_of(waiting: int = 0, running: int = 0) -> float:
    """Return how many times a prefill counts: it delays requests that wait for the GPU, and those that decode."""
    return 1.0 + waiting + min(_RUNNING_WEIGHT * running, _MOST_RUNNING)


class _Line:
    """The line y = a + b·x, neither of them negative, through weighted points that fade."""

    def __init__(self, *, is_level: bool) -> None:
        """``is_level``: points of one size give a level line; otherwise they give a line through the origin."""
        self._is_level = is_level
        self._count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_known(self) -> bool:
        """Whether enough points were added to say something."""
        return self._count >= _FEWEST

    def add(self, x: float, y: float, *, weight: float = 1.0, keep: float) -> None:
        """Add a point; earlier points keep the part ``keep`` of their weight."""
        expected = self.at(x)
        if expected is not None:
            y = min(y, _OUTLIER * max(expected, 1e-9))
        self._count += 1
        self._weight = keep * self._weight + weight
        self._x = keep * self._x + weight * x
        self._y = keep * self._y + weight * y
        self._xx = keep * self._xx + weight * x * x
        self._xy = keep * self._xy + weight * x * y

    def at(self, x: float) -> float | None:
        """Return y at ``x``; None: too little is known."""
        if not self.is_known:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance <= (_SPREAD * mean_x) ** 2:
            return mean_y if self._is_level else mean_y / mean_x * x
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / variance)
        base = mean_y - slope * mean_x
        return self._xy / self._xx * x if base < 0.0 else base + slope * x


@dataclass(slots=True)
class _OpenLoad:
    """A load that some rank has not reported."""

    size_bytes: int
    queued_bytes: int
    """Bytes of the loads that were out when it began."""
    began_s: float
    """inf: another tier decides how long this load is out."""
    seconds: float = 0.0
    """How long it took on the slowest rank so far."""
    failed: bool = False
    """Whether it failed on some rank."""


class _TierSpeed:
    """How long loads of one tier take: a line over their bytes and the bytes queued before them."""

    def __init__(self) -> None:
        self.line: Final = _Line(is_level=False)
        self.open: Final[dict[int, _OpenLoad]] = {}
        """Loads that are out, by ticket."""
        self._queued_bytes = 0
        self._is_on_trial = False
        """Whether the next load to end replaces all that was observed before."""
        self.learned_s = -math.inf
        """When a load or read was last observed, or a trial begun."""
        self.pause_s = TRIAL_INTERVAL_S
        """How long after that the tier is tried again, if it is judged too slow."""

    def begin(self, ticket: int, size_bytes: int, now_s: float, *, is_slowest: bool, on_trial: bool) -> None:
        """Record that a load goes out. ``is_slowest``: false if another tier decides how long it is out.

        ``on_trial``: the tier was judged too slow, and this load says anew how fast it is.
        """
        if on_trial:
            self.learned_s, self._is_on_trial = now_s, True
            self.pause_s = min(4 * self.pause_s, TRIAL_LIMIT_S)
        self.open[ticket] = _OpenLoad(size_bytes, self._queued_bytes, now_s if is_slowest else math.inf)
        self._queued_bytes += size_bytes

    def observe(self, ticket: int, seconds: float, *, failed: bool) -> None:
        """Record how long a load took on one rank."""
        if (load := self.open.get(ticket)) is not None:
            load.seconds, load.failed = max(load.seconds, seconds), load.failed or failed

    def end(self, ticket: int, now_s: float) -> None:
        """Learn from a load that has ended on all ranks. If it failed, it counts only if it took longer than expected,
        and a load that no rank has timed does not count.
        """
        if (load := self.open.pop(ticket, None)) is None:
            return
        self._queued_bytes -= load.size_bytes
        work_bytes = load.size_bytes + load.queued_bytes
        if load.seconds > (max(SLOW_FAILURE_S, self.line.at(work_bytes) or 0.0) if load.failed else 0.0):
            keep = _TIER_KEEP * 0.5 ** (max(0.0, now_s - self.learned_s) / _TIER_HALF_LIFE_S)
            self.line.add(work_bytes, load.seconds, keep=0.0 if self._is_on_trial else keep)
            self.learned_s, self._is_on_trial = now_s, False

    def oldest_s(self, now_s: float) -> float:
        """Return how long the oldest load has been out, 0 if none is."""
        return max([0.0, *(now_s - load.began_s for load in self.open.values())])

    def seconds(self, size_bytes: int, now_s: float) -> float:
        """Return how long a load would take after those that are out; at least the age of the oldest.

        0 while nothing is known, so that a first load finds out.
        """
        return max(self.line.at(self._queued_bytes + size_bytes) or 0.0, self.oldest_s(now_s))

    def may_try(self, now_s: float) -> bool:
        """Whether it is time to try a tier that is judged too slow."""
        return not self.open and now_s - self.learned_s >= self.pause_s


class PrefillSpeed:
    """The time per token of computing a prompt: a line over the tokens before it.

    A step has a price of its own, which decoding requests pay in any case: it is measured on steps that only decode,
    and subtracted from those that compute prompts. Steps end in the order in which they were scheduled. With
    asynchronous scheduling a step is scheduled while the one before it runs, so it counts from the end of that one.
    """

    def __init__(self) -> None:
        self.line: Final = _Line(is_level=True)
        self._open_steps: deque[tuple[float, int, int]] = deque()
        """When a step was scheduled, its tokens, and the mean number of tokens before one of them."""
        self._ended_s = 0.0
        self._step_s = 0.0

    def scheduled(self, output: SchedulerOutput, now_s: float) -> None:
        """Record the start of a step."""
        if len(self._open_steps) == _MOST_OPEN_STEPS:  # vLLM does not report their ends
            self._open_steps.clear()
        tokens, context_tokens = output.total_num_scheduled_tokens, 0
        if tokens >= MIN_TOKENS:
            before = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            scheduled = output.num_scheduled_tokens
            context_tokens = sum(before.get(name, 0) * each for name, each in scheduled.items()) // tokens
        self._open_steps.append((now_s, tokens, context_tokens))

    def ended(self, now_s: float) -> None:
        """Record the end of the oldest step in flight."""
        if not self._open_steps:
            return
        scheduled_s, tokens, context_tokens = self._open_steps.popleft()
        seconds = now_s - max(scheduled_s, self._ended_s)
        self._ended_s = now_s
        if not tokens or seconds <= 0:
            return
        if tokens < MIN_TOKENS:
            self._step_s = _STEP_KEEP * self._step_s + (1 - _STEP_KEEP) * seconds if self._step_s else seconds
        else:
            self.observe(tokens, max(seconds - self._step_s, _MIN_SHARE * seconds), context_tokens)

    def observe(self, tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """Learn from a step that has computed ``tokens`` prompt tokens after ``context_tokens`` earlier tokens.

        For a step of several requests: the sum of their tokens, and the mean of their contexts, weighted by tokens.
        """
        keep = 0.5 ** (tokens / _PREFILL_HALF_LIFE_TOKENS)
        self.line.add(context_tokens + tokens / 2, seconds / tokens, weight=tokens, keep=keep)

    def seconds(self, tokens: int, context_tokens: int) -> float | None:
        """Return how long computing ``tokens`` after ``context_tokens`` takes. None: too little is known."""
        if tokens <= 0:
            return 0.0
        token_s = self.line.at(context_tokens + tokens / 2)
        return None if token_s is None else tokens * token_s


class Part(NamedTuple):
    """A run of a hit that one tier serves."""

    tier: int
    tokens: int
    size_bytes: int
    """Bytes on one rank. Ranks load in parallel."""


class Hit(NamedTuple):
    """What a lookup found for a request: ``tokens`` from ``first_token`` on."""

    tiers: Iterable[int | None]
    """The tier that would serve each chunk, in order; None: the chunk is gone. The first chunk may begin before
    ``first_token``. Tokens after the last chunk are taken with it, or not at all."""
    first_token: int
    tokens: int
    chunk_tokens: int
    windows: Mapping[int, int]
    """By KV cache group with a window: how many tokens are loaded at most."""


@dataclass(slots=True)
class LoadNotes:
    """The decisions about one request."""

    waits_since_s: float | None = None
    """When it began to wait for storage, so that it waits once; None: it does not wait."""
    found: tuple[int, int] | None = None
    """First token and length of the hit that was decided last, so that each hit is decided once."""
    loaded_tokens: int = 0
    parts: Sequence[Part] = ()
    trial: int | None = None
    """The tier that this load tries although it was judged too slow."""
    waits: bool = True
    """Whether it waits for lookups."""


class LoadDecider:
    """Decides how much of a hit is loaded. While a tier's speed is unknown, a few loads at a time measure it."""

    def __init__(self, tiers: int, *, token_bytes: Mapping[int, float], skips_slow: bool = True) -> None:
        """``token_bytes``: bytes of a token on each rank, by KV cache group; the caller may fill it later.
        ``skips_slow``: if False, every hit is loaded.
        """
        self._tiers = tuple(_TierSpeed() for _ in range(tiers))
        self.prefill: Final = PrefillSpeed()
        self._token_bytes = token_bytes
        self._skips_slow = skips_slow
        self.counts: Counter[tuple[str | int, ...]] = Counter()
        """Decisions since the start, counted in requests."""

    def tokens_to_load(self, hit: Hit, notes: LoadNotes, now_s: float, *, weight: float = 1.0) -> int | None:
        """Return how many of a hit's tokens to load, from its beginning. The same hit gets the same answer.

        None: ask again in a later step, when loads that are out have shown how fast a tier is. Without this wait, most
        requests that reach an idle server together would be computed, however fast the tier.
        ``weight``: how many times computing counts.
        """
        if notes.found == (hit.first_token, hit.tokens):
            return notes.loaded_tokens
        parts = self._parts(hit)
        if not parts:
            notes.found, notes.parts = None, ()
            return hit.tokens
        taken = len(parts)
        if self._skips_slow:
            allowed = self._allowed(parts)
            if allowed < len(parts):
                context_tokens = hit.first_token + sum(part.tokens for part in parts[:allowed])
                tokens = sum(part.tokens for part in parts[allowed:])
                if self.wait_left_s(parts[allowed].tier, tokens, context_tokens, notes, now_s) > 0:
                    return None
            taken, notes.trial = self._choose(parts, allowed, hit.first_token, now_s, weight)
        notes.found, notes.parts = (hit.first_token, hit.tokens), parts
        notes.loaded_tokens = sum(part.tokens for part in parts[:taken])
        return notes.loaded_tokens

    def is_long(self, notes: LoadNotes, now_s: float) -> bool:
        """Whether to read the hit that was decided last into memory first. A trial measures the load itself."""
        parts = zip(notes.parts, accumulate(part.tokens for part in notes.parts), strict=True)
        taken = [part for part, end in parts if end <= notes.loaded_tokens and part.tier]  # without what is in memory
        seconds = max((self._tiers[part.tier].seconds(part.size_bytes, now_s) for part in taken), default=0.0)
        return notes.trial is None and seconds > FETCH_FROM_S

    def wait_left_s(self, tier: int | None, tokens: int, context_tokens: int, notes: LoadNotes, now_s: float) -> float:
        """Return how long a request may still wait for a load of ``tier``, or for its own stores (None).

        The limit is how long computing ``tokens`` after ``context_tokens`` takes. It counts from the start of the wait,
        or of the tier's oldest load if that is earlier.
        """
        if notes.waits_since_s is None:
            notes.waits_since_s = now_s
        limit_s = self.prefill.seconds(tokens, context_tokens)
        oldest_s = 0.0 if tier is None else self._tiers[tier].oldest_s(now_s)
        return (WAIT_S if limit_s is None else limit_s) - max(oldest_s, now_s - notes.waits_since_s)

    def may_wait(self, most: Hit, tiers: Iterable[Tier], notes: LoadNotes, now_s: float, *, weight: float) -> bool:
        """Whether a request may wait on for a lookup: while that takes less than what a hit can be expected to save.

        ``most``: all that could be found. If the answer is False, it stays so.
        """
        if not self._skips_slow or not notes.waits:
            return notes.waits
        if notes.waits_since_s is None:
            notes.waits_since_s = now_s
        prefill_s = self.prefill.seconds(most.tokens, most.first_token)
        compute_s, waited_s = WAIT_S if prefill_s is None else weight * prefill_s, now_s - notes.waits_since_s
        sizes = [(size, most.windows.get(group, most.tokens)) for group, size in self._token_bytes.items()]
        size_bytes = round(sum(size * min(tokens, most.tokens) for size, tokens in sizes))
        notes.waits = False
        for tier, speed in zip(tiers, self._tiers, strict=True):
            load_s = 0.0 if speed.may_try(now_s) else speed.seconds(size_bytes, now_s) / _TOLERANCE
            notes.waits |= tier.found * (compute_s - load_s) > max(tier.search_s, waited_s)
        return notes.waits

    def observe_reads(self, tier: int, reads: Iterable[tuple[int, float]], now_s: float) -> None:
        """Learn from the bytes and seconds of reads that no request waited for, unless loads were before."""
        speed = self._tiers[tier]
        for size_bytes, seconds in () if speed.line.is_known else reads:
            speed.line.add(size_bytes, seconds, keep=_TIER_KEEP)
            speed.learned_s = now_s

    def begin_load(self, ticket: int, locations: Iterable[Location], notes: LoadNotes, now_s: float) -> None:
        """Record that a load goes out, or a fetch."""
        trial, notes.trial = notes.trial, None  # no second trial, if a preempted request loads again
        size_bytes: Counter[int] = Counter()
        for location in locations:
            if location.tier >= 0:
                size_bytes[location.tier] += location.slot_bytes
        for tier, size in size_bytes.items():
            # A load ends with its last part, so its age counts for its farthest tier alone.
            is_slowest = tier == max(size_bytes)
            self._tiers[tier].begin(ticket, size, now_s, is_slowest=is_slowest, on_trial=tier == trial)

    def observe_loads(self, samples: Iterable[LoadSample]) -> None:
        """Record how long loads took on some rank; before ``end_load`` of their tickets."""
        for sample in samples:
            if sample.tier < len(self._tiers):  # else of a rank with another config
                self._tiers[sample.tier].observe(sample.ticket, sample.seconds, failed=sample.failed)

    def end_load(self, ticket: int, now_s: float, fetch_failed: bool | None = None) -> None:
        """Learn from a load that has ended on all ranks. ``fetch_failed``: of a fetch, which ranks do not time."""
        for speed in self._tiers:
            if fetch_failed is not None and ticket in speed.open:
                speed.observe(ticket, now_s - speed.open[ticket].began_s, failed=fetch_failed)
            speed.end(ticket, now_s)

    # Inside

    def _parts(self, hit: Hit) -> tuple[Part, ...]:
        """Return the parts of a hit, from its beginning on. Empty if some chunk is gone: the load will find out.

        The last part includes the tokens after the last chunk, and the windows.
        """
        sizes, end, at = self._token_bytes, hit.first_token + hit.tokens, hit.first_token
        chunk_bytes = round(hit.chunk_tokens * sum(size for group, size in sizes.items() if group not in hit.windows))
        chunks = hit.first_token // hit.chunk_tokens
        parts: list[Part] = []
        for tier, run in groupby(hit.tiers):
            if tier is None:
                return ()
            count = sum(1 for _ in run)
            chunks += count
            until = min(end, chunks * hit.chunk_tokens)
            parts.append(Part(tier, until - at, count * chunk_bytes))
            at = until
        if parts:
            window_bytes = round(sum(sizes[group] * min(hit.tokens, most) for group, most in hit.windows.items()))
            last = parts[-1]
            parts[-1] = Part(last.tier, last.tokens + end - at, last.size_bytes + window_bytes)
        return tuple(parts)

    def _allowed(self, parts: Sequence[Part]) -> int:
        """Return how many parts come before the first one whose tier may not have another load out."""
        for at, part in enumerate(parts):
            speed = self._tiers[part.tier]
            if len(speed.open) >= LOADS_AT_ONCE and not (speed.line.is_known and self.prefill.line.is_known):
                return at
        return len(parts)

    def _choose(
        self, parts: Sequence[Part], allowed: int, first_token: int, now_s: float, weight: float
    ) -> tuple[int, int | None]:
        """Return how many of the first ``allowed`` parts to load, and the tier that this load tries. The rest is
        computed, at ``weight`` times its duration. The least cost wins; among equals, the longest load.
        """
        context_tokens, rest_tokens = first_token, sum(part.tokens for part in parts)
        size_bytes: Counter[int] = Counter()
        taken, least_s, load_s = allowed, math.inf, 0.0
        for count in range(allowed + 1):
            if count:
                part = parts[count - 1]
                rest_tokens -= part.tokens
                context_tokens += part.tokens
                size_bytes[part.tier] += part.size_bytes
                # Tiers load in parallel: a load takes as long as its slowest tier.
                load_s = max(load_s, self._tiers[part.tier].seconds(size_bytes[part.tier], now_s))
            prefill_s = self.prefill.seconds(rest_tokens, context_tokens)
            if prefill_s is not None and load_s / _TOLERANCE + weight * prefill_s <= least_s:
                taken, least_s = count, load_s / _TOLERANCE + weight * prefill_s
        trial = None
        if taken < allowed and self._tiers[parts[taken].tier].may_try(now_s):
            trial = parts[taken].tier
            taken = next((at for at in range(taken, allowed) if parts[at].tier != trial), allowed)
        not_taken: Decision = "unknown" if taken == allowed else "skipped"
        decisions: set[tuple[int, Decision]] = {(part.tier, not_taken) for part in parts[taken:]}
        for part in parts[:taken]:
            decisions.add((part.tier, "trial" if part.tier == trial else "taken"))
            if part.tier != trial:
                self._tiers[part.tier].pause_s = TRIAL_INTERVAL_S
        self.counts.update(("hit_decisions", *decision) for decision in decisions)
        return taken, trial
