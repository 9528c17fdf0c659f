"""Decides how much of a request's hit is loaded, by what loading and computing cost the server.

Threading: the scheduler's thread. Reads no clock: time is passed in.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from nixl_offload.catalog import Catalog
from nixl_offload.catalog.estimate import Decision, LoadOrRecompute, Part
from nixl_offload.catalog.tickets import LoadTicket
from nixl_offload.types import Key
from nixl_offload.vllm.messages import LoadSample


class ServerLoad(NamedTuple):
    """How many requests a prefill would delay."""

    waiting: int = 0
    """For the GPU; not those that wait for a load."""
    running: int = 0


class LoadDecision(NamedTuple):
    """What was decided about a request's hit. Kept with the request, so that it is decided once."""

    first_token: int
    tokens: int
    loaded_tokens: int
    parts: tuple[Part, ...] = ()
    """Which tiers have them, from the beginning on; empty where it was not asked."""
    trial: int | None = None
    """The tier that this load tries, though it was judged too slow."""


class WaitsSince(NamedTuple):
    """When a request began to wait. Kept with it, so that it waits once; None: it does not."""

    at_s: float | None


def _waits_since_s(req_context: ReqContext, now_s: float) -> float:
    waits = req_context.get_state(WaitsSince)
    if waits is None or waits.at_s is None:
        return now_s
    return waits.at_s


class LookupStatistics(NamedTuple):
    """What a request asked about and found. Kept with the request, and counted once it is scheduled."""

    first_token: int
    asked_tokens: int
    """Whole chunks behind what the GPU's cache has; 0: counted."""
    found_tokens: int


class LoadDecider:
    """Weighs loading against computing, by how long either took so far."""

    def __init__(
        self, catalog: Catalog, token_bytes: Mapping[int, float], *, tiers: int, ranks: int, skips_slow: bool
    ) -> None:
        """``token_bytes``: by KV cache group, on each rank. ``skips_slow``: false, whatever is found is loaded."""
        self._catalog = catalog
        self._token_bytes = token_bytes
        self._skips_slow = skips_slow
        self._speeds = LoadOrRecompute(tiers, ranks=ranks)

    def tokens_to_load(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        first_token: int,
        tokens: int,
        chunk_tokens: int,
        windows: Mapping[int, int],
        allowed: frozenset[int] | None,
        now_s: float,
        server: ServerLoad,
    ) -> int | None:
        """As the manager's. ``allowed``: the tiers that the request may load from; None: all."""
        asked = req_context.get_state(LoadDecision)
        if asked is not None and asked[:2] == (first_token, tokens):
            return asked.loaded_tokens
        parts = self._parts(keys, first_token, tokens, chunk_tokens, windows, allowed)
        if not parts:
            return tokens
        loaded, trial = tokens, None
        if self._skips_slow:
            since_s = _waits_since_s(req_context, now_s)
            if self._speeds.must_wait(parts, first_token, now_s, since_s):
                req_context.set_state(WaitsSince(since_s))
                return None
            waiting, running = server
            choice = self._speeds.choose(parts, first_token, now_s, waiting=waiting, running=running)
            loaded, trial = choice.tokens, choice.trial
        req_context.set_state(LoadDecision(first_token, tokens, loaded, tuple(parts), trial))
        return loaded

    def wait_left_s(
        self, req_context: ReqContext, first_token: int, tokens: int, tier: int | None, now_s: float
    ) -> float:
        """As the manager's. ``tier``: that of the load that it waits for."""
        since_s = _waits_since_s(req_context, now_s)
        req_context.set_state(WaitsSince(since_s))
        return self._speeds.wait_left_s(tier, tokens, first_token, now_s, since_s)

    def observe_prefill(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """Take note of a step that has computed ``tokens`` behind ``context_tokens`` others."""
        self._speeds.prefill.observe(tokens, seconds, context_tokens)

    def begin_load(self, ticket: LoadTicket, req_context: ReqContext, now_s: float) -> None:
        """Record that a load goes out, for a request that was asked about before or not."""
        asked = req_context.get_state(LoadDecision)
        trial = None if asked is None else asked.trial
        if asked is not None and trial is not None:
            req_context.set_state(LoadDecision(*asked[:4]))  # no second trial, if it is loaded again after a preemption
        sizes: Counter[int] = Counter()
        for location in ticket.locations:
            if location.tier >= 0:
                sizes[location.tier] += location.slot_bytes
        expected_s: dict[int, float] = {}
        for tier, size in sizes.items():
            speed = self._speeds.tiers[tier]
            seconds = speed.seconds(size, now_s) if speed.is_known else None
            expected_s[tier] = math.inf if seconds is None else seconds
        slowest_s = max(expected_s.values(), default=0.0)
        for tier, size in sizes.items():
            is_slowest = expected_s[tier] >= slowest_s
            speed = self._speeds.tiers[tier]
            speed.begin(ticket.ticket, size, now_s, is_slowest=is_slowest, on_trial=tier == trial)

    def end_load(self, ticket: int) -> None:
        """Record that a load has ended on all ranks."""
        for speed in self._speeds.tiers:
            speed.end(ticket)

    def observe_loads(self, samples: Iterable[LoadSample], now_s: float) -> None:
        """Learn how long loads took; before ``end_load`` of their tickets."""
        for sample in samples:
            if sample.tier < len(self._speeds.tiers):  # else of a rank with another config
                speed = self._speeds.tiers[sample.tier]
                speed.observe(sample.size_bytes, sample.seconds, now_s, sample.ticket, failed=sample.failed)

    def counts(self) -> Mapping[tuple[int, Decision], int]:
        """Return how often each was decided, by tier."""
        return self._speeds.counts()

    def _parts(
        self,
        keys: Sequence[OffloadKey],
        first_token: int,
        tokens: int,
        chunk_tokens: int,
        windows: Mapping[int, int],
        allowed: frozenset[int] | None,
    ) -> list[Part]:
        """Return which tier would serve what, from the beginning on; empty when some chunk is gone, or nothing asked.

        A chunk that is gone will be seen when it is loaded.
        """
        end = first_token + tokens
        chunk_bytes = round(chunk_tokens * sum(size for at, size in self._token_bytes.items() if at not in windows))
        parts: list[Part] = []
        at = first_token
        for key in keys:
            until = min(end, at - at % chunk_tokens + chunk_tokens)
            tier = self._catalog.where(Key(key), allowed)
            if tier is None:
                return []
            if parts and parts[-1].tier == tier:
                last = parts.pop()
                parts.append(Part(tier, last.tokens + until - at, last.size_bytes + chunk_bytes))
            else:
                parts.append(Part(tier, until - at, chunk_bytes))
            at = until
        if parts:
            last = parts.pop()
            window_bytes = round(sum(self._token_bytes[at] * min(tokens, most) for at, most in windows.items()))
            parts.append(Part(last.tier, last.tokens + end - at, last.size_bytes + window_bytes))
        return parts
