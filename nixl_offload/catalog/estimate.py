"""How long a load takes, how long computing takes, and which of the two a request should do: estimates, no promises.

Threading: no lock, no clock, no I/O; one owner (the scheduler's half), who passes the time in. An estimate is made from
what was observed lately: older observations fade, a single outlier moves it only so far, and nothing is ever final: a
tier that is judged too slow is tried again now and then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

FACTOR: Final = 1.25
"""A load is refused only where it is expected to take this many times as long as computing."""
TRIAL_INTERVAL_S: Final = 30.0
"""A tier that is judged too slow gets one request in this time all the same."""

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

    __slots__ = ("_count", "_is_flat", "_weight", "_x", "_xx", "_xy", "_y")

    def __init__(self, *, is_flat: bool) -> None:
        """``is_flat``: through points of one size goes a level line, else one through the origin."""
        self._is_flat = is_flat
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
        if self._count < _FEWEST:
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

    def at(self, x: float) -> float | None:
        """Return y at ``x``. None: too little known."""
        line = self.fit()
        return None if line is None or x > line[2] else line[0] + line[1] * x


class TierSpeed:
    """What one tier's loads cost: latency, and time per byte. Memory: seven numbers."""

    __slots__ = ("_line", "_share", "observed_s")

    _KEEP: Final = 0.9
    """Per observation: the last ten or so count."""
    _HALF_LIFE_S: Final = 6.0
    """Short against the interval of trials: a tier that was slow for a while is judged by its next trial."""

    def __init__(self, ranks: int = 1) -> None:
        """``ranks`` tell of each load, one observation each: together they count as one."""
        self._share = 1.0 / ranks
        self._line = _Line(is_flat=False)
        self.observed_s = -math.inf
        """When the last load ended, on the caller's clock."""

    def observe(self, bytes_moved: int, seconds: float, now_s: float) -> None:
        """Take note of a load that has ended, whether well or not: one that stalled is told with the time it took.

        An observation of no bytes or no time says nothing and is left out.
        """
        if bytes_moved <= 0 or not 0.0 < seconds < math.inf:
            return
        expected_s = self._line.at(bytes_moved)
        if expected_s is not None:
            seconds = min(seconds, _OUTLIER * max(expected_s, _LEAST_S))
        age_s = max(0.0, now_s - self.observed_s)
        keep = self._KEEP**self._share * 0.5 ** (age_s / self._HALF_LIFE_S)
        self._line.add(bytes_moved, seconds, weight=self._share, keep=keep)
        self.observed_s = max(self.observed_s, now_s)

    def seconds(self, bytes_moved: int) -> float | None:
        """Return how long a load of so many bytes takes. None: too little known, or nothing of that size."""
        return self._line.at(bytes_moved)


class PrefillSpeed:
    """What computing a prompt costs per token, and how that grows with the tokens before it. Memory: six numbers."""

    __slots__ = ("_line",)

    _HALF_LIFE_TOKENS: Final = 32768.0

    def __init__(self) -> None:
        self._line = _Line(is_flat=True)

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


class LoadOrRecompute:
    """Decides how much of a hit is loaded. What is not known is loaded: that is how it becomes known."""

    def __init__(
        self, tiers: int, *, ranks: int = 1, factor: float = FACTOR, trial_interval_s: float = TRIAL_INTERVAL_S
    ) -> None:
        """Know nothing yet of ``tiers`` tiers. ``ranks``: how many tell of each load."""
        self.tiers: Final = tuple(TierSpeed(ranks) for _ in range(tiers))
        """By position; told by whoever learns how a load ended."""
        self.prefill: Final = PrefillSpeed()
        self._factor = factor
        self._trial_interval_s = trial_interval_s
        self._next_trial_s: dict[int, float] = {}
        self._counts: Counter[tuple[int, Decision]] = Counter()

    def choose(self, parts: Sequence[Part], computed_tokens: int, now_s: float) -> Choice:
        """Decide about one request's hit: consecutive parts, nearest the prompt's beginning first.

        ``computed_tokens`` lie before them and need neither load nor computing. Each call is a decision that counts,
        and may use up a tier's trial: call it once per request, and remember the answer.
        """
        taken = self._least(parts, computed_tokens, on_trial=None)
        trial = None
        if taken < len(parts) and self._may_try(parts[taken].tier, now_s):
            trial = parts[taken].tier
            taken = max(taken + 1, self._least(parts, computed_tokens, on_trial=trial))
        decisions: dict[tuple[int, Decision], None] = {}
        for at, part in enumerate(parts):
            if at >= taken:
                decisions[part.tier, Decision.SKIPPED] = None
            else:
                decisions[part.tier, Decision.TRIAL if part.tier == trial else Decision.TAKEN] = None
        self._counts.update(decisions.keys())
        return Choice(sum(part.tokens for part in parts[:taken]), tuple(decisions))

    def counts(self) -> Mapping[tuple[int, Decision], int]:
        """How often it was decided so about a tier, in requests, since the beginning."""
        return dict(self._counts)

    def _least(self, parts: Sequence[Part], computed_tokens: int, *, on_trial: int | None) -> int:
        """Return how many parts to take so that load and prefill of the rest take least; the most among equals."""
        rest_tokens = sum(part.tokens for part in parts)
        context_tokens = computed_tokens
        size_bytes: Counter[int] = Counter()
        load_s = 0.0
        best, best_s = len(parts), math.inf
        for taken in range(len(parts) + 1):
            if taken:
                part = parts[taken - 1]
                rest_tokens -= part.tokens
                context_tokens += part.tokens
                size_bytes[part.tier] += part.size_bytes
                if part.tier != on_trial:
                    # Tiers load side by side: what the slowest takes is what the load takes.
                    load_s = max(load_s, self.tiers[part.tier].seconds(size_bytes[part.tier]) or 0.0)
            prefill_s = self.prefill.seconds(rest_tokens, context_tokens)
            if prefill_s is None:
                continue  # for all that is known, this would take for ever
            total_s = load_s / self._factor + prefill_s
            if total_s <= best_s:
                best, best_s = taken, total_s
        return best

    def _may_try(self, tier: int, now_s: float) -> bool:
        """Whether a tier's trial is due. What has not been heard of for an interval is tried at once."""
        last_s = self.tiers[tier].observed_s
        if now_s < self._next_trial_s.setdefault(tier, last_s + self._trial_interval_s):
            return False
        self._next_trial_s[tier] = now_s + self._trial_interval_s
        return True
