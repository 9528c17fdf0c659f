"""Opens the scheduler's half of the tiers, and has each serve once all ranks have opened theirs.

Threading: the scheduler's thread. Nothing waits for storage but a start, and nothing raises for reasons of storage but
where a tier with ``required: true`` cannot be opened.
Ownership: the tiers, until ``close``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.config import OffloadingConfig

from nixl_offload.config import Config
from nixl_offload.errors import ConfigError, NixlOffloadError, TierError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.tiers.base import Tier
from nixl_offload.tiers.kinds import AnyPlace, AnyTier
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.types import Key
from nixl_offload.vllm.closed_tier import ClosedTier
from nixl_offload.vllm.messages import RankGeometry, RankStatus
from nixl_offload.vllm.opening import TierOpening, name_of
from nixl_offload.vllm.rank_opening import RankOpening

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

TIERS_WAIT_S = 30.0
"""A start waits so long at most for the scheduler's half of the tiers to be open: only storage that hangs takes
longer."""
REQUIRED_WAIT_S = 120.0
"""How long ranks may take to open a tier with ``required: true``: registering much memory takes its time."""
BEGIN_WAIT_S = 5.0
"""Tiers that are opened while the engine steps keep it stepping so long at most, if it has nothing else to do. What
takes longer hangs, or reads the weights of a large model."""


class ServingTiers:
    """The tiers by position in the config: what serves, or a ``ClosedTier``."""

    def __init__(
        self,
        offloading: OffloadingConfig,
        config: Config,
        vllm_config: VllmConfig,
        *,
        begin: Callable[[Namespace], None],
        join: Callable[[int, Tier], None],
    ) -> None:
        """``begin`` is told the namespace, once, before ``join`` is told of any tier that serves from now on."""
        self._offloading = offloading
        self._config = config
        self._vllm_config = vllm_config
        self._begin = begin
        self._join = join
        self.tiers: list[Tier] = [ClosedTier() for _ in config.tiers]
        self._geometries: Sequence[RankGeometry] = ()
        self._opening: TierOpening | None = None
        self.is_off = False
        """Nothing will ever be stored or loaded."""
        self._is_known = False
        """The namespace was told."""
        self.is_whole = False
        """All tiers serve, and nothing is left to do for ``update`` and ``take_places``."""
        self._begins = False
        """The tiers are being opened while the engine steps, and some were not tried yet."""
        self._begins_until_s = 0.0
        """An idle engine steps so long for these at most."""
        self._opened: dict[int, AnyTier] = {}
        """What is open here, by position."""
        self._to_clear: set[int] = set()
        """The cache was reset before these were open."""
        self._ranks = RankOpening(offloading.parallel.world_size)
        self._required = {position for position, tier in enumerate(config.tiers) if tier.required}
        """The tiers without which no engine shall run, as long as they do not serve."""

    @property
    def number(self) -> int:
        """Which opening of the tiers this is: ranks say of which they tell."""
        return self._ranks.number

    @property
    def is_begun(self) -> bool:
        """Whether ``open`` or ``open_while_stepping`` was called."""
        return self._opening is not None

    @property
    def is_opening(self) -> bool:
        """Whether an idle engine should step on, so that tiers are taken over and ranks hear where they are."""
        now_s = time.monotonic()
        begins = self._begins and not self.is_off and now_s < self._begins_until_s
        return begins or self._ranks.is_under_way(now_s)

    @property
    def is_about_to_serve(self) -> bool:
        """Whether no tier serves yet, and some will in a moment."""
        return not self.is_whole and self.is_opening and all(isinstance(tier, ClosedTier) for tier in self.tiers)

    @property
    def awaits_required(self) -> bool:
        """Whether some rank has still to open a tier without which no engine shall run."""
        return bool(self._required) and not self._required.isdisjoint(self._ranks.awaited(time.monotonic()))

    def open(self, ranks: Sequence[RankGeometry], weights_s: float, small_weights_s: float) -> None:
        """Open the tiers, and wait for them as ``NixlOffloadManager.open`` says. Raises as it does."""
        opening = self._begin_opening(ranks)
        is_ready = opening.wait(weights_s, small_weights_s, TIERS_WAIT_S)
        errors = opening.errors()
        for error in errors.values():
            if isinstance(error, ConfigError):
                raise error
        self.update(is_start=True)
        if self.is_off or is_ready:
            return
        if not self._is_known:
            logger.info("Offloading begins as soon as the model's files have been read, to know which weights they are")
            return
        for position, tier in enumerate(self._config.tiers):
            if position not in self._opened and position not in errors:
                if tier.required:
                    raise TierError(self._refusal(position, f"it is not open within {TIERS_WAIT_S:.0f} s"), cause="io")
                logger.warning(
                    "%s: not open within %.0f s. Requests go on without it; it is used once it is open",
                    name_of(tier),
                    TIERS_WAIT_S,
                )

    def open_while_stepping(self, ranks: Sequence[RankGeometry]) -> None:
        """Open the tiers, and wait for nothing. One whose options do not fit the model is left out with a warning."""
        self._begin_opening(ranks)
        self._open_while_idle()

    def reopen(self, namespace: Namespace) -> None:
        """Close what is open, and open it for another namespace, as ``open_while_stepping`` does. Nothing is under way.

        ``begin`` and ``join`` are told anew.
        """
        assert self._opening is not None
        self._opening.close()
        before, self._opened = list(self._opened.values()), {}
        self.tiers[:] = [ClosedTier() for _ in self.tiers]
        self._to_clear.clear()
        self._required.clear()  # of the start
        self._ranks = RankOpening(self._offloading.parallel.world_size, self.number + 1)
        self._is_known = self.is_whole = False
        self._begin_opening(self._geometries, namespace, before)
        self._open_while_idle()

    def _begin_opening(
        self, ranks: Sequence[RankGeometry], namespace: Namespace | None = None, before: Sequence[AnyTier] = ()
    ) -> TierOpening:
        self._geometries = ranks
        self._opening = TierOpening(
            self._config, self._vllm_config, self._offloading, ranks, namespace=namespace, before=before
        )
        return self._opening

    def _open_while_idle(self) -> None:
        self._begins = True
        self._begins_until_s = time.monotonic() + BEGIN_WAIT_S

    def update(self, *, is_start: bool = False) -> None:
        """Take over what was opened since the last call, and have those serve that all ranks have opened, too.

        Called in every step: costs nothing where nothing has changed. Requests wait for ranks at a start only, not amid
        traffic. Raises TierError where a tier with ``required: true`` could not be opened.
        """
        for position in self._ranks.failed:
            tier = self._opened[position]
            if isinstance(tier, SlabTier):
                tier.heal(time.monotonic())  # ranks open nothing in a directory that has lost its lock
        if self.is_whole or self._opening is None or self.is_off:
            return
        if self._required:
            self._check_required(self._opening.errors())
        if not self._is_known and not self._take_namespace(self._opening):
            return
        now_s = time.monotonic()
        is_start = is_start or self._begins
        self._begins = self._begins and not self._opening.wait(0.0, 0.0, 0.0)
        for position, tier in self._opening.take().items():
            if position in self._to_clear:
                tier.clear()
            self._opened[position] = tier
            if is_start:
                self._put(position, ClosedTier(tier))
            self._ranks.add(position, tier.place, now_s)
        for position in self._ranks.take_open():
            self._put(position, self._opened[position])
            self._required.discard(position)
        self.is_whole = not any(isinstance(tier, ClosedTier) for tier in self.tiers)
        self._begins = self._begins and not self.is_whole

    def take_places(self) -> dict[int, AnyPlace]:
        """Return where the ranks are to open tiers that were opened here since the last call."""
        return self._ranks.take_places()

    def take_ranks(self, ranks: Mapping[int, RankStatus]) -> None:
        """Take the word of ranks whose status has changed. Raises as ``update``."""
        self._ranks.update(ranks)
        for position in self._ranks.failed:
            tier = self.tiers[position]
            if isinstance(tier, ClosedTier):
                tier.give_up()
        self.update()

    def clear_closed(self) -> None:
        """Have nothing found in tiers that do not serve yet of what they hold now."""
        for position, tier in enumerate(self.tiers):
            if position not in self._opened:
                self._to_clear.add(position)
            elif tier is not self._opened[position]:
                self._opened[position].clear()

    def close(self, pending: Iterable[tuple[int, Key]]) -> None:
        """Close what is open, and give up what is not. ``pending``: by position, what was being written."""
        if self._opening is not None:
            self._opening.close()
        written = list(pending)
        for position, tier in self._opened.items():
            tier.close([key for at, key in written if at == position])

    def _take_namespace(self, opening: TierOpening) -> bool:
        """Tell of the namespace, if it is known by now."""
        try:
            namespace = opening.namespace
        except Exception as error:
            self.is_off = True
            if self._required:
                raise TierError(self._refusal(min(self._required), str(error)), cause="io") from error
            trace = None if isinstance(error, NixlOffloadError) else error
            logger.error("Offloading is off until the engine restarts: %s", error, exc_info=trace)
            return False
        if namespace is not None:
            self._is_known = True
            said = namespace.fields
            logger.info(
                "%d tokens take %.2f MiB in each tier, in a chunk for each of %d KV groups",
                said.tokens_per_block * said.blocks_per_chunk,
                sum(namespace.chunk_bytes(group.group_id) for group in said.groups) / 2**20,
                len(said.groups),
            )
            self._begin(namespace)
        return self._is_known

    def _check_required(self, errors: Mapping[int, Exception]) -> None:
        """Raise TierError where a tier must be open and is not, here or on a rank."""
        for position in sorted(self._required & errors.keys()):
            error = errors[position]
            cause = getattr(error, "cause", "io")
            raise TierError(self._refusal(position, str(error)), cause=cause) from error
        for position in sorted(self._required & self._ranks.failed):
            raise TierError(self._refusal(position, "some rank cannot open it, and its log says why"), cause="io")
        for position in sorted(self._required & self._ranks.awaited(time.monotonic(), REQUIRED_WAIT_S)):
            why = f"some rank has not opened it within {REQUIRED_WAIT_S:.0f} s; does storage answer where it runs?"
            raise TierError(self._refusal(position, why), cause="io")

    def _refusal(self, position: int, why: str) -> str:
        tier = self._config.tiers[position]
        return f"{name_of(tier)}: required: true allows no server without it, and {why}"

    def _put(self, position: int, tier: Tier) -> None:
        """Replace the closed tier at ``position`` by ``tier``."""
        self.tiers[position] = tier
        self._join(position, tier)
