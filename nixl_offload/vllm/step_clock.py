"""Measures what prompt tokens add to a step, for the estimate of prefill speed.

A step has a price of its own, which decoding requests pay in any case: it is measured on steps that only decode, and
subtracted from those that compute prompts.

Threading: the scheduler's thread. Steps end in the order in which they were scheduled; with asynchronous scheduling a
step is scheduled while the one before it runs, so a step counts from the end of the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MIN_TOKENS = 64
"""Steps with fewer tokens decode, or are too short to measure."""
_MIN_SHARE = 0.1
"""Prompt tokens count at least as this part of their step. An estimate that is too low is corrected by the next long
prompt, for that is computed; one that is too high would not be, for every hit would be loaded."""
_KEEP = 0.9
"""What the price of a step keeps of its old value at each step that only decodes."""
_MOST_OPEN = 16


class StepClock:
    """Calls ``observe(tokens, context_tokens, seconds)`` after each step that computes at least ``MIN_TOKENS``.

    ``seconds``: what the tokens added to the step.
    """

    def __init__(self, observe: Callable[[int, int, float], None], clock: Callable[[], float]) -> None:
        self._observe = observe
        self._clock = clock
        self._open: deque[tuple[float, int, int]] = deque()
        """When a step was scheduled, its tokens, and how many precede one of them on average."""
        self._ended_s = 0.0
        self._base_s = 0.0

    def scheduled(self, output: SchedulerOutput) -> None:
        """Record the start of a step."""
        if len(self._open) == _MOST_OPEN:  # vLLM does not report their ends
            self._open.clear()
        tokens = output.total_num_scheduled_tokens
        self._open.append((self._clock(), tokens, _context(output) if tokens >= MIN_TOKENS else 0))

    def done(self) -> None:
        """Record the end of the oldest step in flight."""
        if not self._open:
            return
        (scheduled_s, tokens, context_tokens), now_s = self._open.popleft(), self._clock()
        seconds = now_s - max(scheduled_s, self._ended_s)
        self._ended_s = now_s
        if not tokens or seconds <= 0:
            return
        if tokens < MIN_TOKENS:
            self._base_s = _KEEP * self._base_s + (1 - _KEEP) * seconds if self._base_s else seconds
        else:
            self._observe(tokens, context_tokens, max(seconds - self._base_s, _MIN_SHARE * seconds))


def _context(output: SchedulerOutput) -> int:
    """Return how many tokens precede a token of the step, on average."""
    scheduled = output.num_scheduled_tokens
    before = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    weighted = sum(before.get(request, 0) * tokens for request, tokens in scheduled.items())
    return weighted // output.total_num_scheduled_tokens
