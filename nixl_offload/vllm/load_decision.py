"""Decides how much of a request's hit is loaded, by what loading and computing cost the server.

Threading: the scheduler's thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from nixl_offload.catalog.estimate import Decision, LoadOrRecompute, Part
from nixl_offload.catalog.tickets import LoadTicket
from nixl_offload.vllm.messages import LoadSample
from nixl_offload.vllm.notes import LoadDecision, notes_of


class Hit(NamedTuple):
    """What was found of a request: ``tokens`` from ``first_token`` on."""

    keys: Sequence[OffloadKey]
    """The chunks of ``chunk_tokens`` that cover them, in order. The first may begin before that token; what lies behind
    the last is taken with it, or not at all."""
    first_token: int
    tokens: int
    chunk_tokens: int
    windows: Mapping[int, int]
    """By KV cache group that looks no farther back: how many tokens are loaded at most."""


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

    def tokens_to_load(self, hit: Hit, req_context: ReqContext, *, waiting: int = 0, running: int = 0) -> int | None:
        """Return how many of a hit's tokens are better loaded than computed. None: ask again in a later step, for loads
        that are out will tell how fast a tier is. The same question gets the same answer.

        ``waiting``, ``running``: other requests, which a prefill would delay: those that wait for the GPU, not for a
        load, and those that decode.
        """
        notes, now_s = notes_of(req_context), self._clock()
        if notes.decision is not None and notes.decision[:2] == (hit.first_token, hit.tokens):
            return notes.decision.loaded_tokens
        parts = self._parts(hit, req_context)
        if not parts:
            return hit.tokens
        loaded_tokens, trial = hit.tokens, None
        if self._skips_slow:
            since_s = now_s if notes.waits_since_s is None else notes.waits_since_s
            if self._speeds.must_wait(parts, hit.first_token, now_s, since_s):
                notes.waits_since_s = since_s
                return None
            choice = self._speeds.choose(parts, hit.first_token, now_s, waiting=waiting, running=running)
            loaded_tokens, trial = choice.tokens, choice.trial
        notes.decision = LoadDecision(hit.first_token, hit.tokens, loaded_tokens, parts, trial)
        return loaded_tokens

    def wait_left_s(self, req_context: ReqContext, first_token: int, tokens: int, awaited: OffloadKey | None) -> float:
        """Return how long a request may still wait rather than be computed: altogether as long as computing ``tokens``
        behind ``first_token`` takes. ``awaited``: the chunk that another load brings, if it waits for that.
        """
        notes, now_s = notes_of(req_context), self._clock()
        if notes.waits_since_s is None:
            notes.waits_since_s = now_s
        tier = None if awaited is None else self._where(awaited, None)
        return self._speeds.wait_left_s(tier, tokens, first_token, now_s, notes.waits_since_s)

    def observe_prefill(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """Learn from a step that has computed ``tokens`` behind ``context_tokens`` others."""
        self._speeds.prefill.observe(tokens, seconds, context_tokens)

    def begin_load(self, ticket: LoadTicket, req_context: ReqContext) -> None:
        """Record that a load goes out, for a request that was asked about before or not."""
        notes, now_s, trial = notes_of(req_context), self._clock(), None
        if notes.decision is not None:
            trial = notes.decision.trial
            notes.decision = notes.decision._replace(trial=None)  # no second trial, if a preempted request loads again
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

    def _parts(self, hit: Hit, req_context: ReqContext) -> tuple[Part, ...]:
        """Return which tier would serve what, from the beginning on. Empty when some chunk is gone: loading finds out.

        The last part has what lies behind the last chunk, and the windows.
        """
        sizes, end, at = self._token_bytes, hit.first_token + hit.tokens, hit.first_token
        chunk_bytes = round(hit.chunk_tokens * sum(size for group, size in sizes.items() if group not in hit.windows))
        window_bytes = round(sum(sizes[group] * min(hit.tokens, most) for group, most in hit.windows.items()))
        chunks = hit.first_token // hit.chunk_tokens
        last_chunk = chunks + len(hit.keys)
        parts: list[Part] = []
        for tier, run in groupby(self._where(key, req_context) for key in hit.keys):
            if tier is None:
                return ()
            count = sum(1 for _ in run)
            chunks += count
            is_last = chunks == last_chunk
            until = end if is_last else min(end, chunks * hit.chunk_tokens)
            parts.append(Part(tier, until - at, count * chunk_bytes + (window_bytes if is_last else 0)))
            at = until
        return tuple(parts)
