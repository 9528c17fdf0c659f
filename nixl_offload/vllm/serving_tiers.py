"""The scheduler's half of the tiers: each tier opens in the background, then on every rank, and serves after that.

Threading: the scheduler's thread. Another thread makes the namespace, and each tier has one that opens it. Only a start
waits for these threads, and only a config that does not fit the model raises.
Ownership: the tiers, until ``close``.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import vllm.envs
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.kv_offload.config import OffloadingConfig

from nixl_offload.config import Config, TierConfig
from nixl_offload.errors import ConfigError, NixlOffloadError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.identity.weights import digest_files
from nixl_offload.index import State
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import Place, Tier, TierContext
from nixl_offload.tiers.kinds import AnyTier
from nixl_offload.tiers.ownership import require_apart
from nixl_offload.tiers.slot_tier import SlotTier
from nixl_offload.types import Key
from nixl_offload.vllm.background import CLOSE_S, BackgroundOpening, in_background, join_all, name_of
from nixl_offload.vllm.identity import build_namespace
from nixl_offload.vllm.messages import RankGeometry, RankStatus

logger = logging.getLogger(__name__)

NAMING_WAIT_S = 5.0
"""How long a start waits to learn which weights a local model has. Reading a large model's files goes on after it."""
START_WAIT_S = 30.0
"""How long a start then waits for the scheduler's half of the tiers."""
OPENING_WAIT_S = 5.0
"""How long an engine without requests steps for tiers that are being opened, and how long requests wait for ranks to
open them. An opening that takes longer hangs, or reads the weights of a large model."""


@dataclass(slots=True)
class _Entry:
    """A tier: ``opening`` until it is open here, then ``tier``. It ``serves`` once all ranks have opened it."""

    opening: BackgroundOpening[AnyTier]
    tier: AnyTier | None = None
    sent_s: float | None = None
    """When its place was sent to the ranks."""
    is_awaited: bool = False
    """It was opened at a start: requests wait shortly for the ranks."""
    serves: bool = False


class ServingTiers:
    """The tiers by position in the config."""

    def __init__(
        self,
        offloading: OffloadingConfig,
        config: Config,
        vllm_config: VllmConfig,
        *,
        begin: Callable[[Namespace], None],
        join: Callable[[int, Tier], None],
    ) -> None:
        """``begin`` is called with each namespace, before ``join`` is called with the tiers that serve for it."""
        self._offloading = offloading
        self._config = config
        self._vllm_config = vllm_config
        self._begin = begin
        self._join = join
        self.number = 0
        """Counts how often the tiers were reopened for another namespace. Places and the ranks' status carry it."""
        self.is_off = False
        """Nothing will ever be stored or loaded."""
        self.is_whole = False
        """All tiers serve, and ``update`` and ``take_places`` have nothing left to do."""
        self.ranks: dict[int, RankStatus] = {}
        """The latest status of each rank, for this ``number``."""
        self._patient_until_s = 0.0
        """Until then an engine without requests steps for tiers not tried yet, and requests wait for ranks."""
        self._naming: BackgroundOpening[Namespace | Exception] | None = None
        """Makes the namespace. None: ``open`` was not called."""
        self._entries: list[_Entry] = []
        """By position, once the namespace is known."""
        self._is_reset = False
        """The cache was reset: tiers that open later are cleared."""
        self._stops_reading = threading.Event()
        """Set by ``close``: ends the reading of a model's files."""

    @property
    def is_begun(self) -> bool:
        """Whether ``open`` was called."""
        return self._naming is not None

    @property
    def is_opening(self) -> bool:
        """Whether an idle engine should step on to take over tiers and send their places. False if one hangs."""
        now_s = time.monotonic()
        untried = not self._entries or any(e.tier is None and e.opening.error is None for e in self._entries)
        return (now_s < self._patient_until_s and not self.is_off and untried) or any(self._soon(now_s))

    def awaits_ranks(self, keys: Iterable[Key]) -> bool:
        """Whether a request should wait, shortly, until the ranks have opened the tiers that were opened at a start.

        Once some tier serves, it waits only for tiers that have a chunk of ``keys``, or that other servers write to.
        """
        awaited = [entry.tier for entry in self._soon(time.monotonic()) if entry.is_awaited]
        if not awaited or not any(entry.serves for entry in self._entries):
            return bool(awaited)
        if not all(isinstance(tier, SlotTier) for tier in awaited):
            return True
        return any(tier is not None and tier.state(key) is State.READY for key in keys for tier in awaited)

    @property
    def is_about_to_serve(self) -> bool:
        """Whether no tier serves yet, but one soon will."""
        return not self.is_whole and self.is_opening and not any(entry.serves for entry in self._entries)

    def open(self, ranks: Sequence[RankGeometry], *, waits: bool) -> None:
        """Open the tiers. ``ranks``: the geometry of each, in order. ``waits``: at a start, which waits for the tiers.

        A start raises ConfigError if options do not fit the model. Tiers that fail otherwise, or late, join later.
        """
        naming = self._naming = BackgroundOpening(
            partial(self._name, ranks), id, what="Offloading", thread_name="nixl-offload-open"
        )
        self._patient_until_s = math.inf if waits else time.monotonic() + OPENING_WAIT_S
        if not waits:
            return
        naming.wait(NAMING_WAIT_S)
        self.update()
        until_s = time.monotonic() + START_WAIT_S
        for entry in self._entries:
            entry.opening.wait(max(0.0, until_s - time.monotonic()))
            if isinstance(entry.opening.error, ConfigError):
                raise entry.opening.error
        self.update()
        self._patient_until_s = 0.0
        if not self._entries and not self.is_off and naming.error is None:
            logger.info("Offloading begins as soon as the model's files have been read, to know which weights they are")
        for tier, entry in zip(self._config.tiers, self._entries, strict=False):
            if entry.tier is None and entry.opening.error is None:
                logger.warning(
                    "%s: not open within %.0f s. Requests go on without it; it is used once it is open",
                    name_of(tier),
                    START_WAIT_S,
                )

    def reopen(self, namespace: Namespace) -> None:
        """Close the tiers and open them for another namespace, in the background. No ticket may be open."""
        for entry in self._entries:
            if entry.tier is None:
                entry.tier = entry.opening.take()
        ending = [
            entry.opening.close() + ([] if entry.tier is None else in_background(entry.tier.close))
            for entry in self._entries
        ]
        self.number += 1
        self.is_whole, self._is_reset = False, False
        self.ranks = {}
        self._patient_until_s = time.monotonic() + OPENING_WAIT_S
        self._open_tiers(namespace, ending)

    def update(self) -> None:
        """Take over the tiers opened since the last call. A tier serves once all ranks have opened it, too. Called in
        every step; costs nothing if nothing has changed.
        """
        now_s = time.monotonic()
        if self.is_whole or self._naming is None or self.is_off:
            return
        if (named := self._naming.take()) is not None:
            self._take_namespace(named)
        is_heard = len(self.ranks) == self._offloading.parallel.world_size
        for position, entry in enumerate(self._entries):
            if entry.tier is None and (tier := entry.opening.take()) is not None:
                if self._is_reset:
                    tier.clear()
                entry.tier, entry.is_awaited = tier, now_s < self._patient_until_s
            if entry.tier is None or entry.serves:
                continue
            if is_heard and all(position in status.open for status in self.ranks.values()):
                entry.serves = True
                self._join(position, entry.tier)
        self.is_whole = bool(self._entries) and all(entry.serves for entry in self._entries)

    def take_places(self) -> dict[int, Place]:
        """Return the places of the tiers opened since the last call, for the ranks to open."""
        places: dict[int, Place] = {}
        for position, entry in enumerate(self._entries):
            if entry.tier is not None and entry.sent_s is None:
                places[position], entry.sent_s = entry.tier.place, time.monotonic()
        return places

    def take_ranks(self, ranks: Mapping[int, RankStatus]) -> None:
        """Take the status of ranks for which it has changed."""
        self.ranks.update({rank: status for rank, status in ranks.items() if status.opening == self.number})
        self.update()

    def clear_closed(self) -> None:
        """Forget the chunks of tiers that do not serve yet."""
        self._is_reset = True
        for entry in self._entries:
            if entry.tier is not None and not entry.serves:
                entry.tier.clear()

    def close(self, pending: Iterable[tuple[int, Key]]) -> None:
        """Close open tiers; end openings, with a short wait. ``pending``: position and key of chunks being written."""
        self._stops_reading.set()
        ending = [] if self._naming is None else self._naming.close()
        for entry in self._entries:
            ending += entry.opening.close()
        join_all(ending, CLOSE_S)
        written = list(pending)
        for position, entry in enumerate(self._entries):
            if entry.tier is not None:
                entry.tier.close([key for at, key in written if at == position])

    # Inside

    def _soon(self, now_s: float) -> Iterable[_Entry]:
        """Return the tiers that ranks are opening, if none of the ranks has failed to or takes too long."""
        failed = {position for status in self.ranks.values() for position in status.failed}
        return [
            entry
            for position, entry in enumerate(self._entries)
            if entry.tier is not None
            and not entry.serves
            and position not in failed
            and (entry.sent_s is None or now_s - entry.sent_s < OPENING_WAIT_S)
        ]

    def _name(self, ranks: Sequence[RankGeometry]) -> Namespace | Exception:
        """Return the namespace, or why there is none. Runs on a thread of its own: it may read a model's files."""
        read = cache(partial(digest_files, stop=self._stops_reading))
        try:
            return build_namespace(self._vllm_config, self._offloading, self._config, ranks, read)
        except BaseException as error:  # noqa: BLE001 - also a panic in a library
            return error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _take_namespace(self, namespace: Namespace | Exception) -> None:
        if isinstance(namespace, Exception):
            self.is_off = True
            trace = None if isinstance(namespace, NixlOffloadError) else namespace
            logger.error("Offloading is off until the engine restarts: %s", namespace, exc_info=trace)
        else:
            self._open_tiers(namespace, [[] for _ in self._config.tiers])

    def _open_tiers(self, namespace: Namespace, after: Sequence[Iterable[threading.Thread]]) -> None:
        """Begin to open the tiers. ``after``: threads that must end before, by position."""
        fields = namespace.fields
        logger.info(
            "%d tokens take %.2f MiB in each tier, in a chunk for each of %d KV groups",
            fields.tokens_per_block * fields.blocks_per_chunk,
            sum(namespace.chunk_bytes(group.group_id) for group in fields.groups) / 2**20,
            len(fields.groups),
        )
        self._begin(namespace)
        parallel = self._vllm_config.parallel_config
        self._entries = []
        for position, tier in enumerate(self._config.tiers):
            context = TierContext(
                position,
                namespace,
                world_size=parallel.world_size,
                dp_index=parallel.data_parallel_index,
                dp_engines=sharing_engines(parallel),
            )
            opening = BackgroundOpening(
                partial(open_tier, tier, context, self._config.tiers[:position]),
                lambda opened: opened.close(),
                what=name_of(tier),
                thread_name=f"nixl-offload-open-{position}",
                after=after[position],
            )
            self._entries.append(_Entry(opening))


def open_tier(tier: TierConfig, context: TierContext, nearer: Sequence[TierConfig]) -> AnyTier:
    """Open a tier. May take as long as storage hangs.

    Raises as ``tiers.kinds.open_tier``, and as ``require_apart`` for the tiers that are ``nearer``.
    """
    require_apart(tier, nearer)
    return kinds.open_tier(tier, context)


def sharing_engines(parallel: ParallelConfig) -> range:
    """Return the indexes of the engines that divide this machine's memory and drives, this engine included.

    If vLLM does not say which engines are here, all are returned: each may take too little, together never too much.
    """
    engines = range(parallel.data_parallel_size)
    if parallel.enable_elastic_ep:
        return engines  # they come and go
    if len(engines) == 1:
        # vLLM tells each engine of a dense model that it is alone. This field, meant for something else, keeps the
        # number of all engines. If it is gone or unset, the engine is taken to be alone.
        return range(getattr(parallel, "elastic_ep_max_dp_size", None) or 1)
    if parallel.data_parallel_backend != "mp" or parallel.data_parallel_external_lb or vllm.envs.VLLM_DP_SIZE > 1:
        return engines  # each was started by itself, and believes that it is alone here
    first = parallel.data_parallel_index - (parallel.data_parallel_rank_local or 0)
    return range(first, first + parallel.data_parallel_size_local)
