"""Decides how much of a request's hit is loaded, by what loading and computing cost the server.

Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from nixl_offload.catalog.estimate import Decision, LoadOrRecompute, Part
from nixl_offload.catalog.tickets import LoadTicket
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
    """Which tiers have them, from the beginning on."""
    trial: int | None = None
    """The tier that this load tries, though it was judged too slow."""


class WaitsSince(NamedTuple):
    """When a request began to wait. Kept with it, so that it waits once; None: it does not."""

    at_s: float | None


class LookupStatistics(NamedTuple):
    """What a request asked about and found. Kept with the request, and counted once it is scheduled."""

    first_token: int
    asked_tokens: int
    """Whole chunks behind what the GPU's cache has; 0: counted."""
    found_tokens: int


class LoadDecider:
    """Weighs loading against computing, by how long either took so far."""

    def __init__(
        self,
        where: Callable[[OffloadKey, ReqContext | None], int | None],
        token_bytes: Mapping[int, float],
        *,
        tiers: int,
        ranks: int,
        skips_slow: bool,
        clock: Callable[[], float],
    ) -> None:
        """``where``: the tier that would serve a chunk to a request. ``token_bytes``: by KV cache group, on each rank.
        ``skips_slow``: false: all that is found is loaded.
        """
        self._where = where
        self._token_bytes = token_bytes
        self._skips_slow = skips_slow
        self._clock = clock
        self._speeds = LoadOrRecompute(tiers, ranks=ranks)

    def tokens_to_load(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        first_token: int,
        tokens: int,
        chunk_tokens: int,
        windows: Mapping[int, int],
        server: ServerLoad,
    ) -> int | None:
        """Return how many of ``tokens`` from ``first_token`` on are better loaded than computed. None: ask again in a
        later step, for loads that are out will tell how fast a tier is. The same question gets the same answer.

        ``keys``: the chunks of ``chunk_tokens`` that cover them, in order; the first may begin before that token, and
        what lies behind the last is taken with it, or not at all. ``windows``: by KV cache group that looks no farther
        back, how many tokens are loaded at most. ``server``: the requests beside this one.
        """
        asked, now_s = req_context.get_state(LoadDecision), self._clock()
        if asked is not None and asked[:2] == (first_token, tokens):
            return asked.loaded_tokens
        parts = self._parts(keys, req_context, first_token, tokens, chunk_tokens, windows)
        if not parts:
            return tokens
        loaded, trial = tokens, None
        if self._skips_slow:
            since_s = _waits_since_s(req_context, now_s)
            if self._speeds.must_wait(parts, first_token, now_s, since_s):
                req_context.set_state(WaitsSince(since_s))
                return None
            choice = self._speeds.choose(parts, first_token, now_s, waiting=server.waiting, running=server.running)
            loaded, trial = choice.tokens, choice.trial
        req_context.set_state(LoadDecision(first_token, tokens, loaded, tuple(parts), trial))
        return loaded

    def wait_left_s(self, req_context: ReqContext, first_token: int, tokens: int, awaited: OffloadKey | None) -> float:
        """Return how long a request may still wait rather than be computed: altogether as long as computing ``tokens``
        behind ``first_token`` takes. ``awaited``: the chunk that another load brings, if it waits for that.
        """
        now_s = self._clock()
        since_s = _waits_since_s(req_context, now_s)
        req_context.set_state(WaitsSince(since_s))
        tier = None if awaited is None else self._where(awaited, None)
        return self._speeds.wait_left_s(tier, tokens, first_token, now_s, since_s)

    def observe_prefill(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """Learn from a step that has computed ``tokens`` behind ``context_tokens`` others."""
        self._speeds.prefill.observe(tokens, seconds, context_tokens)

    def begin_load(self, ticket: LoadTicket, req_context: ReqContext) -> None:
        """Record that a load goes out, for a request that was asked about before or not."""
        asked, now_s, trial = req_context.get_state(LoadDecision), self._clock(), None
        if asked is not None and asked.trial is not None:
            trial = asked.trial
            req_context.set_state(LoadDecision(*asked[:4]))  # no second trial, if it is loaded after a preemption
        size_bytes: Counter[int] = Counter()
        for location in ticket.locations:
            if location.tier >= 0:
                size_bytes[location.tier] += location.slot_bytes
        for tier, size in size_bytes.items():
            # A load ends with its last part: how long it is out says something of its farthest tier alone.
            is_slowest = tier == max(size_bytes)
            self._speeds.tiers[tier].begin(ticket.ticket, size, now_s, is_slowest=is_slowest, on_trial=tier == trial)

    def end_load(self, ticket: int) -> None:
        """Record that a load has ended on all ranks."""
        for speed in self._speeds.tiers:
            speed.end(ticket)

    def observe_loads(self, samples: Iterable[LoadSample]) -> None:
        """Learn how long loads took; before ``end_load`` of their tickets."""
        now_s = self._clock()
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
        req_context: ReqContext,
        first_token: int,
        tokens: int,
        chunk_tokens: int,
        windows: Mapping[int, int],
    ) -> list[Part]:
        """Return which tier would serve what, from the beginning on. Empty when some chunk is gone: loading finds out.

        The last part has what lies behind the last chunk, and the windows.
        """
        end, at = first_token + tokens, first_token
        chunk_bytes = round(
            chunk_tokens * sum(size for group, size in self._token_bytes.items() if group not in windows)
        )
        parts: list[Part] = []
        for number, key in enumerate(keys, 1):
            is_last = number == len(keys)
            until = end if is_last else min(end, at - at % chunk_tokens + chunk_tokens)
            size_bytes = chunk_bytes
            if is_last:
                size_bytes += round(
                    sum(self._token_bytes[group] * min(tokens, most) for group, most in windows.items())
                )
            tier = self._where(key, req_context)
            if tier is None:
                return []
            if parts and parts[-1].tier == tier:
                before = parts.pop()
                parts.append(Part(tier, before.tokens + until - at, before.size_bytes + size_bytes))
            else:
                parts.append(Part(tier, until - at, size_bytes))
            at = until
        return parts


def _waits_since_s(req_context: ReqContext, now_s: float) -> float:
    waits = req_context.get_state(WaitsSince)
    return now_s if waits is None or waits.at_s is None else waits.at_s
