"""Load or recompute: how much of a request's hit to load, so that the server as a whole gets on fastest.

The GPU and each tier are queues. A load waits for the loads that are out already; it does not use the GPU. A prefill
uses the GPU, and delays the requests that wait for it and those that decode. So a load costs the time until it is done,
queue included, and computing costs its time on the GPU, counted once for each request that waits for it, and in part
for those that decode.

Threading: no lock, no clock, no I/O; one owner (the scheduler's half), who passes the time in. Estimates come from
recent observations: older ones fade, an outlier counts only in part, and a tier that is judged too slow is tried again
now and then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

TRIAL_INTERVAL_S: Final = 30.0
"""A tier that is judged too slow is left alone for at least this long. The first trial, which may find that it was only
cold, comes then, whatever it costs; each of the next ones after four times as long as the one before."""
TRIAL_LIMIT_S: Final = 600.0
"""Two trials lie no farther apart than this, whatever they cost."""
TRIAL_SHARE: Final = 0.01
"""Trials come sooner while they take no more than this part of the time that is spent on computing what the tier could
have loaded."""
SLOW_FAILURE_S: Final = 1.0
"""A load that fails sooner was refused, and says nothing of how long loads take."""
LOADS_AT_ONCE: Final = 4
"""Most loads that are out at a time on a tier of unknown speed, or while that of computing is unknown."""
WAIT_S: Final = 0.5
"""A hit waits for such loads to end no longer than this, nor for one that is out for longer, while the speed of
computing is unknown; once it is known, what computing the hit would take is the limit."""

_TOLERANCE: Final = 1.05
"""A load is preferred while it costs at most this many times as much as computing."""
_RUNNING_WEIGHT: Final = 0.4
_MOST_RUNNING: Final = 2.0
"""A prefill delays each running request's next token. They count by this weight, together at most as so many waiting
requests: with the full weight a server would accept a TTFT many times as long for a few more requests per second
(docs/decisions/0018-load-or-recompute.md)."""
_FEWEST: Final = 3
"""Observations without which nothing is said."""
_OUTLIER: Final = 16.0
"""An observation counts as at most so many times what was expected: one stall raises an estimate, no more."""
_SPREAD: Final = 0.2
"""Standard deviation of the sizes, by their mean, below which they count as one size: no line through one point."""
_REACH: Final = 4.0
"""How far, as a multiple of the one size that was seen, an estimate goes beyond it."""
_LEAST_S: Final = 1e-6


class _Line:
    """The line y = a + b·x, neither of them negative, through weighted points that fade."""

    __slots__ = ("_count", "_fewest", "_is_flat", "_weight", "_x", "_xx", "_xy", "_y")

    def __init__(self, *, is_flat: bool, observers: int = 1) -> None:
        """``is_flat``: through points of one size goes a level line, else one through the origin. ``observers`` add a
        point each of what they all saw.
        """
        self._is_flat = is_flat
        self._fewest = _FEWEST * observers
        self._count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float, *, weight: float, keep: float) -> None:
        """Add a point; all before keep the part ``keep`` of their weight."""
        self._count += 1
        self._weight = keep * self._weight + weight
        self._x = keep * self._x + weight * x
        self._y = keep * self._y + weight * y
        self._xx = keep * self._xx + weight * x * x
        self._xy = keep * self._xy + weight * x * y

    def fit(self) -> tuple[float, float, float] | None:
        """Return a, b, and the largest x for which they mean something. None: too few points."""
        if not self.is_known:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        if spread <= (_SPREAD * mean_x) ** 2:
            return (mean_y, 0.0, _REACH * mean_x) if self._is_flat else (0.0, mean_y / mean_x, _REACH * mean_x)
        slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        base = mean_y - slope * mean_x
        if base < 0.0:
            return 0.0, self._xy / self._xx, math.inf
        return base, slope, math.inf

    @property
    def is_known(self) -> bool:
        """Whether enough points were added to say something."""
        return self._count >= self._fewest

    def at(self, x: float, *, extrapolates: bool = False) -> float | None:
        """Return y at ``x``. None: too little known; with ``extrapolates``, only where nothing is."""
        line = self.fit()
        return None if line is None or (x > line[2] and not extrapolates) else line[0] + line[1] * x


class _OpenLoad(NamedTuple):
    """A load that has not ended."""

    size_bytes: int
    queued_bytes: int
    """Of the loads that were out when it began."""
    began_s: float
    due_s: float
    """When it was expected to end; infinite: nothing was known, or another tier has the slowest part."""
    is_slowest: bool
    """No other tier was expected to take longer over its part."""


class TierSpeed:
    """What one tier's loads cost: latency, and time per byte, its own and those queued before it."""

    __slots__ = (
        "_is_on_trial",
        "_line",
        "_open",
        "_share",
        "computed_s",
        "observed_s",
        "patience_s",
        "queued_bytes",
        "tried_s",
    )

    _KEEP: Final = 0.9
    """Per observation: the last ten or so count."""
    _HALF_LIFE_S: Final = 6.0
    """Short against the interval of trials: a tier that was slow for a while is judged by its next trial."""

    def __init__(self, ranks: int = 1) -> None:
        """``ranks`` observe each load, once each: together they count as one observation."""
        self._share = 1.0 / ranks
        self._line = _Line(is_flat=False, observers=ranks)
        self._open: dict[int, _OpenLoad] = {}
        self._is_on_trial = False
        self.queued_bytes = 0
        """Of all loads that are out."""
        self.observed_s = -math.inf
        """When the last load ended, on the caller's clock."""
        self.tried_s = -math.inf
        """When it was last tried although it was judged too slow."""
        self.patience_s = TRIAL_INTERVAL_S
        """After so long it is tried whatever that costs."""
        self.computed_s = 0.0
        """Time spent since the last trial on computing what this tier could have loaded."""

    @property
    def is_known(self) -> bool:
        """Whether enough loads were observed."""
        return self._line.is_known

    @property
    def loads(self) -> int:
        """How many loads are out."""
        return len(self._open)

    def begin(
        self, ticket: int, size_bytes: int, now_s: float, *, is_slowest: bool = True, on_trial: bool = False
    ) -> None:
        """Record that a load goes out. ``is_slowest``: false where another tier is expected to take longer over its
        part. A load ends with its last part, so how long it is out says something of the slowest tier alone.
        ``on_trial``: the tier was judged too slow, and the next load to end alone says how fast it is.
        """
        if on_trial:
            self.tried_s, self.computed_s, self._is_on_trial = now_s, 0.0, True
            self.patience_s = min(4 * self.patience_s, TRIAL_LIMIT_S)
        expected_s = self._line.at(self.queued_bytes + size_bytes)
        due_s = math.inf if expected_s is None or not is_slowest else now_s + expected_s
        self._open[ticket] = _OpenLoad(size_bytes, self.queued_bytes, now_s, due_s, is_slowest)
        self.queued_bytes += size_bytes

    def end(self, ticket: int) -> None:
        """Record that a load has ended on all ranks."""
        if (load := self._open.pop(ticket, None)) is not None:
            self.queued_bytes -= load.size_bytes

    def observe(self, size_bytes: int, seconds: float, now_s: float, ticket: int = 0, *, failed: bool = False) -> None:
        """Learn from a load that ends; call it before ``end``.

        What was queued when ``ticket`` began counts with it, so that a tier is not judged by what its queue did to a
        load. One that ``failed`` would have taken longer than ``seconds``: that says something only where it was
        expected to take less. An observation of no bytes or no time says nothing and is left out.
        """
        if size_bytes <= 0 or not 0.0 < seconds < math.inf:
            return
        load = self._open.get(ticket)
        work_bytes = size_bytes + (load.queued_bytes if load is not None else 0)
        expected_s = self._line.at(work_bytes)
        if failed and seconds <= max(SLOW_FAILURE_S, expected_s or 0.0):
            return
        if expected_s is not None:
            seconds = min(seconds, _OUTLIER * max(expected_s, _LEAST_S))
        age_s = max(0.0, now_s - self.observed_s)
        keep = 0.0 if self._is_on_trial else self._KEEP**self._share * 0.5 ** (age_s / self._HALF_LIFE_S)
        self._is_on_trial = False
        self._line.add(work_bytes, seconds, weight=self._share, keep=keep)
        self.observed_s = max(self.observed_s, now_s)

    def oldest_s(self, now_s: float) -> float:
        """Return how long the oldest load has been out, 0 if none is."""
        return max((now_s - load.began_s for load in self._open.values()), default=0.0)

    def seconds(self, size_bytes: int, now_s: float) -> float | None:
        """Return how long a load of so many bytes would take from now on, behind those that are out.

        - Enough is known: what the line says. Loads that are late delay it further.
        - Too little is known, and loads are out: at least as long as the oldest of them of which this tier has the
          slowest part has taken; 0 where it has that of none.
        - Too little is known and none is out, or nothing of that size: None. One load at a time may find out. A tier
          that was judged too slow is not asked anew for each size: its trial speaks for all.
        """
        is_slow = self.patience_s > TRIAL_INTERVAL_S
        seconds = self._line.at(self.queued_bytes + size_bytes, extrapolates=is_slow or bool(self._open))
        if not self._open:
            return seconds
        if seconds is None:
            return max((0.0, *(now_s - load.began_s for load in self._open.values() if load.is_slowest)))
        late_s = max(now_s - load.due_s for load in self._open.values())
        return seconds + max(0.0, late_s)  # a load that is late delays those behind it


class PrefillSpeed:
    """What computing a prompt costs per token, and how that grows with the tokens before it. Memory: six numbers."""

    __slots__ = ("_line",)

    _HALF_LIFE_TOKENS: Final = 32768.0

    def __init__(self) -> None:
        self._line = _Line(is_flat=True)

    @property
    def is_known(self) -> bool:
        """Whether enough steps were observed."""
        return self._line.is_known

    def observe(self, tokens: int, seconds: float, context_tokens: int = 0) -> None:
        """Take note of a step that has computed ``tokens`` prompt tokens, behind ``context_tokens`` others.

        Steps of several requests: the sum of their tokens, and the mean of their contexts by tokens.
        """
        if tokens <= 0 or context_tokens < 0 or not 0.0 < seconds < math.inf:
            return
        x, token_s = context_tokens + tokens / 2, seconds / tokens
        expected_s = self._line.at(x)
        if expected_s is not None:
            token_s = min(token_s, _OUTLIER * max(expected_s, _LEAST_S / tokens))
        self._line.add(x, token_s, weight=tokens, keep=0.5 ** (tokens / self._HALF_LIFE_TOKENS))

    def seconds(self, tokens: int, context_tokens: int) -> float | None:
        """Return how long computing ``tokens`` behind ``context_tokens`` takes. None: too little known."""
        if tokens <= 0:
            return 0.0
        token_s = self._line.at(context_tokens + tokens / 2)
        return None if token_s is None else tokens * token_s


class Decision(Enum):
    """What was decided about a tier's part of a hit."""

    TAKEN = "taken"
    SKIPPED = "skipped"
    """Computing is expected to be faster."""
    UNKNOWN = "unknown"
    """Computed without knowing: as many loads are out as a tier of unknown speed may have."""
    TRIAL = "trial"
    """Judged too slow, and taken to see whether that is still so."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a hit that one tier serves."""

    tier: int
    tokens: int
    size_bytes: int
    """Of one rank: ranks load side by side."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How much of a hit to take."""

    tokens: int
    """From its beginning on; the rest is to be computed."""
    decisions: tuple[tuple[int, Decision], ...]
    """What was decided about each tier, for those who count: a tier that serves several parts may stand there twice,
    taken and skipped."""
    trial: int | None
    """The tier that is tried. Its trial begins with the load, see ``TierSpeed.begin``."""


class LoadOrRecompute:
    """Decides how much of a hit is loaded. What is not known is loaded, a few at a time: so it becomes known."""

    def __init__(self, tiers: int, *, ranks: int = 1) -> None:
        """Know nothing yet of ``tiers`` tiers. ``ranks``: how many observe each load."""
        self.tiers: Final = tuple(TierSpeed(ranks) for _ in range(tiers))
        """By position; told by the caller when a load begins, what the ranks observed of it, and when it ended."""
        self.prefill: Final = PrefillSpeed()
        self._counts: Counter[tuple[int, Decision]] = Counter()

    def choose(
        self, parts: Sequence[Part], computed_tokens: int, now_s: float, *, waiting: int = 0, running: int = 0
    ) -> Choice:
        """Decide about one request's hit: consecutive parts, nearest the prompt's beginning first.

        ``computed_tokens`` lie before them and need neither load nor computing. ``waiting``: other requests that wait
        for the GPU; ``running``: requests that decode. Each call is a decision that counts: call it once per request,
        and remember the answer.
        """
        weight = 1.0 + waiting + min(_RUNNING_WEIGHT * running, _MOST_RUNNING)
        allowed = self._allowed(parts)
        taken = self._least(parts, allowed, computed_tokens, now_s, weight, on_trial=None)
        trial = None
        if taken < allowed and self._may_try(parts[taken], now_s):
            trial = parts[taken].tier
            taken = max(taken + 1, self._least(parts, allowed, computed_tokens, now_s, weight, on_trial=trial))
        decisions: dict[tuple[int, Decision], None] = {}
        context_tokens = computed_tokens
        for at, part in enumerate(parts):
            if at >= taken == allowed:
                decisions[part.tier, Decision.UNKNOWN] = None
            elif at >= taken:
                decisions[part.tier, Decision.SKIPPED] = None
                self.tiers[part.tier].computed_s += self.prefill.seconds(part.tokens, context_tokens) or 0.0
            elif part.tier == trial:
                decisions[part.tier, Decision.TRIAL] = None
            else:
                decisions[part.tier, Decision.TAKEN] = None
                self.tiers[part.tier].patience_s = TRIAL_INTERVAL_S
            context_tokens += part.tokens
        self._counts.update(decisions.keys())
        return Choice(sum(part.tokens for part in parts[:taken]), tuple(decisions), trial)

    def must_wait(self, parts: Sequence[Part], computed_tokens: int, now_s: float, since_s: float) -> bool:
        """Whether ``choose`` is better called later: loads that are out will soon say how fast a tier is.

        Otherwise, where many requests find an idle server at once, most would be computed, however fast the tier is.
        ``since_s``: when this request was first told to wait; ``now_s`` if it was not.
        """
        allowed = self._allowed(parts)
        if allowed == len(parts):
            return False
        context_tokens = computed_tokens + sum(part.tokens for part in parts[:allowed])
        tokens = sum(part.tokens for part in parts[allowed:])
        return self.wait_left_s(parts[allowed].tier, tokens, context_tokens, now_s, since_s) > 0

    def wait_left_s(self, tier: int | None, tokens: int, context_tokens: int, now_s: float, since_s: float) -> float:
        """Return how long a request may still wait for a load of ``tier``, rather than be computed: as long as
        computing ``tokens`` takes, since the oldest load went out, or since it began to wait, if that is earlier.
        """
        limit_s = self.prefill.seconds(tokens, context_tokens)
        oldest_s = 0.0 if tier is None else self.tiers[tier].oldest_s(now_s)
        return (WAIT_S if limit_s is None else limit_s) - max(oldest_s, now_s - since_s)

    def counts(self) -> Mapping[tuple[int, Decision], int]:
        """How often it was decided so about a tier, in requests, since the beginning."""
        return dict(self._counts)

    def _allowed(self, parts: Sequence[Part]) -> int:
        """Return how many parts lie before the first whose tier has as many loads out as it may."""

        def is_full(speed: TierSpeed) -> bool:
            return speed.loads >= LOADS_AT_ONCE and not (speed.is_known and self.prefill.is_known)

        return next((at for at, part in enumerate(parts) if is_full(self.tiers[part.tier])), len(parts))

    def _least(
        self,
        parts: Sequence[Part],
        allowed: int,
        computed_tokens: int,
        now_s: float,
        weight: float,
        *,
        on_trial: int | None,
    ) -> int:
        """Return how many of the first ``allowed`` parts to take at the least cost; the most among equals."""
        rest_tokens = sum(part.tokens for part in parts)
        context_tokens = computed_tokens
        size_bytes: Counter[int] = Counter()
        load_s = 0.0
        best, best_s = allowed, math.inf
        for taken in range(allowed + 1):
            if taken:
                part = parts[taken - 1]
                rest_tokens -= part.tokens
                context_tokens += part.tokens
                size_bytes[part.tier] += part.size_bytes
                if part.tier != on_trial:
                    # Tiers load side by side: what the slowest takes is what the load takes.
                    load_s = max(load_s, self.tiers[part.tier].seconds(size_bytes[part.tier], now_s) or 0.0)
            prefill_s = self.prefill.seconds(rest_tokens, context_tokens)
            if prefill_s is None:
                continue  # for all that is known, this would take for ever
            total_s = load_s / _TOLERANCE + weight * prefill_s
            if total_s <= best_s:
                best, best_s = taken, total_s
        return best

    def _may_try(self, part: Part, now_s: float) -> bool:
        """Whether a tier that is judged too slow is tried with this part."""
        speed = self.tiers[part.tier]
        idle_s = now_s - max(speed.observed_s, speed.tried_s)
        if speed.loads or idle_s < TRIAL_INTERVAL_S:
            return False
        cost_s = speed.seconds(part.size_bytes, now_s) or 0.0
        return cost_s <= TRIAL_SHARE * speed.computed_s or idle_s >= speed.patience_s
