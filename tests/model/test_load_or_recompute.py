"""Load or recompute over servers fast and slow, simulated: as many requests per second as the better of always loading
and always computing, and no worse TTFT where one of them is better in both.

No clock: vLLM's steps with a token budget (running requests first, chunked prefill, loads beside the GPU), and a tier
that serves one load after the other. As many requests at a time as asked for. The rule is the real
``vllm.load_decision.LoadDecider``; it learns from what the simulation observes.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from nixl_offload.types import Location
from nixl_offload.vllm.load_decision import MIN_TOKENS, Hit, LoadDecider, LoadNotes, weight_of
from nixl_offload.vllm.messages import LoadSample

TOKEN_BYTES = 128 << 10
"""KV cache of an 8B model."""

_BASE_S = 0.010
_BUDGET_TOKENS = 8192
_LATENCY_S = 0.001
_HIT_TOKENS = (1000, 2000, 3000, 4000, 6000)
_NEW_TOKENS = (100, 500)
_OUTPUT_TOKENS = (50, 150)
_WARM_SHARE = 0.3
"""Of the requests: not measured, for estimates are learned in them."""


@dataclass(eq=False)
class Request:
    """One request, from its arrival to its last token. Times in seconds of the simulation."""

    number: int
    arrived_s: float
    hit_tokens: int
    new_tokens: int
    output_tokens: int
    loaded_tokens: int = 0
    began_s: float = 0.0
    ready_s: float = 0.0
    context_tokens: int = 0
    rest_tokens: int = 0
    first_token_s: float = -1.0


class Policy:
    """Decides how many tokens of a hit are loaded (None: asks to be asked later), and observes what became of it. This
    one always, or never, loads.
    """

    def __init__(self, *, loads: bool) -> None:
        self._loads = loads

    def choose(self, request: Request, waiting: int, running: int, now_s: float) -> int | None:
        return request.hit_tokens if self._loads else 0

    def loaded(self, request: Request, now_s: float) -> None: ...
    def computed(self, tokens: int, context_tokens: int, seconds: float) -> None: ...


class Rule(Policy):
    """The connector's rule."""

    def __init__(self) -> None:
        self._rule = LoadDecider(1, token_bytes={0: TOKEN_BYTES})
        self._notes: defaultdict[int, LoadNotes] = defaultdict(LoadNotes)
        """By request."""

    def choose(self, request: Request, waiting: int, running: int, now_s: float) -> int | None:
        tokens, notes = request.hit_tokens, self._notes[request.number]
        hit = Hit((0,), 0, tokens, tokens, {})
        loaded_tokens = self._rule.tokens_to_load(hit, notes, now_s, weight=weight_of(waiting, running))
        if loaded_tokens:
            self._rule.begin_load(request.number, [Location(0, 0, loaded_tokens * TOKEN_BYTES)], notes, now_s)
        return loaded_tokens

    def loaded(self, request: Request, now_s: float) -> None:
        self._rule.observe_loads([LoadSample(0, request.ready_s - request.began_s, False, request.number)])
        self._rule.end_load(request.number, now_s)

    def computed(self, tokens: int, context_tokens: int, seconds: float) -> None:
        if tokens >= MIN_TOKENS:  # as PrefillSpeed does
            self._rule.prefill.observe(tokens, max(seconds - _BASE_S, 0.1 * seconds), context_tokens)


class Server(NamedTuple):
    """A cell of the grid."""

    at_a_time: int
    prefill_tokens_per_s: float
    tier_bytes_per_s: float


class Figures(NamedTuple):
    """What a policy achieved."""

    requests_per_s: float
    ttft_s: float


def simulate(server: Server, policy: Policy, requests: int) -> Figures:
    """Serve ``requests`` one after the other as room becomes free, and return what was measured after the warm-up."""
    source = random.Random(1)
    now_s = tier_free_s = started_s = 0.0
    made = 0

    def arrive() -> Request:
        nonlocal made
        made += 1
        return Request(
            number=made,
            arrived_s=now_s,
            hit_tokens=source.choice(_HIT_TOKENS),
            new_tokens=source.randint(*_NEW_TOKENS),
            output_tokens=source.randint(*_OUTPUT_TOKENS),
        )

    waiting = deque(arrive() for _ in range(server.at_a_time))
    loading: list[Request] = []
    ready: deque[Request] = deque()
    running, done = list[Request](), list[Request]()
    warm = int(requests * _WARM_SHARE)
    while len(done) < requests:
        for request in [request for request in loading if request.ready_s <= now_s]:
            loading.remove(request)
            policy.loaded(request, now_s)
            request.context_tokens = request.loaded_tokens
            ready.append(request)
        budget = _BUDGET_TOKENS
        step, held = list[tuple[Request, int]](), list[Request]()
        for request in running:
            tokens = min(budget, request.rest_tokens or 1)
            if tokens:
                step.append((request, tokens))
                budget -= tokens
        while budget and (ready or waiting):
            if ready:
                request = ready.popleft()
            else:
                request = waiting.popleft()
                tokens_to_load = policy.choose(request, len(waiting), len(running), now_s)
                if tokens_to_load is None:
                    held.append(request)
                    continue
                request.loaded_tokens = tokens_to_load
                if request.loaded_tokens:
                    tier_free_s = (
                        max(tier_free_s, now_s) + request.loaded_tokens * TOKEN_BYTES / server.tier_bytes_per_s
                    )
                    request.began_s, request.ready_s = now_s, tier_free_s + _LATENCY_S
                    loading.append(request)
                    continue
            request.rest_tokens = request.hit_tokens - request.loaded_tokens + request.new_tokens
            running.append(request)
            tokens = min(budget, request.rest_tokens)
            step.append((request, tokens))
            budget -= tokens
        waiting.extendleft(reversed(held))
        if not step:
            next_s = min(request.ready_s for request in loading)
            now_s = min(next_s, now_s + _BASE_S) if held else next_s
            continue
        total = sum(tokens for _, tokens in step)
        seconds = _BASE_S + total / server.prefill_tokens_per_s
        now_s += seconds
        policy.computed(total, sum(request.context_tokens * tokens for request, tokens in step) // total, seconds)
        for request, tokens in step:
            request.context_tokens += tokens
            if request.rest_tokens:
                request.rest_tokens -= tokens
                if request.rest_tokens:
                    continue
                request.first_token_s = now_s
            request.output_tokens -= 1
            if request.output_tokens <= 0:
                running.remove(request)
                done.append(request)
                waiting.append(arrive())
                if len(done) == warm:
                    started_s = now_s
    measured = done[warm:]
    return Figures(
        len(measured) / (now_s - started_s),
        sum(request.first_token_s - request.arrived_s for request in measured) / len(measured),
    )


GRID = [
    Server(at_a_time, prefill, speed)
    for at_a_time in (1, 4, 32)
    for prefill in (2e3, 2e4, 1e5)
    for speed in (0.2e9, 1e9, 5e9, 20e9)
]


@pytest.mark.parametrize("server", GRID, ids=lambda server: "-".join(f"{value:g}" for value in server))
def test_no_server_is_slower_than_with_the_better_fixed_rule(server: Server) -> None:
    policies = Rule(), Policy(loads=True), Policy(loads=False)
    ours, *fixed = (simulate(server, policy, requests=1000) for policy in policies)
    better = max(fixed)  # in requests per second
    rate_ratio, ttft_ratio = ours.requests_per_s / better.requests_per_s, ours.ttft_s / better.ttft_s
    assert rate_ratio >= 0.95
    if rate_ratio < 1.05:
        assert ttft_ratio <= 1.15, "a trial is measured, too"
    else:
        assert ttft_ratio <= 1.7, "more requests per second are served, by both the tier and the GPU"
