"""The scheduler's half of the tiers: each is opened in the background, then by every rank, and serves after that.

Threading: the scheduler's thread. One other makes the namespace, and each tier has one that opens it. Only a start
waits for them, and storage raises nothing here, except for a tier with ``required: true`` that cannot be opened.
Ownership: the tiers, until ``close``.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import vllm.envs
from vllm.v1.kv_offload.config import OffloadingConfig

from nixl_offload.config import Config, TierConfig
from nixl_offload.errors import ConfigError, NixlOffloadError, TierError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.identity.weights import WeightsDigest, cache_directory_of
from nixl_offload.tiers import kinds
from nixl_offload.tiers.base import Tier, TierContext
from nixl_offload.tiers.kinds import AnyPlace, AnyTier
from nixl_offload.types import Key, Lookup, LookupContext
from nixl_offload.vllm.background import CLOSE_S, BackgroundOpening, in_background, join_all, name_of
from nixl_offload.vllm.identity import build_namespace, loaded_weights, models_of, sources_of_ranks
from nixl_offload.vllm.messages import RankGeometry, RankStatus

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

logger = logging.getLogger(__name__)

_NOTHING: Mapping[int, Iterable[threading.Thread]] = MappingProxyType({})

NAMING_WAIT_S = 5.0
"""How long a start waits to learn which weights a local model has. Reading those of a large model goes on behind it."""
START_WAIT_S = 30.0
"""How long a start then waits for the scheduler's half of the tiers."""
OPENING_WAIT_S = 5.0
"""How long an engine without requests steps for tiers that are being opened, and a request waits for ranks to open what
it would hit. What takes longer hangs, or reads the weights of a large model."""
REQUIRED_WAIT_S = 120.0
"""How long ranks may take to open a tier with ``required: true``: registering much memory takes its time."""


class ClosedTier(Tier):
    """Has nothing and takes nothing: holds a tier's position in the catalog until it serves.

    ``opened``: the tier that will serve here once the ranks have opened it. For what it has, lookups say RETRY, for
    ``OPENING_WAIT_S`` at most; what it lacks is a MISS at once. None: nobody waits.
    """

    def __init__(self, opened: Tier | None = None) -> None:
        self._opened = opened
        self._held_since_s: float | None = None
        self.is_local = opened is not None and opened.is_local

    def give_up(self) -> None:
        """Have nobody wait any more."""
        self._opened = None

    @property
    def is_looking(self) -> bool:
        return self._opened is not None and self._opened.is_looking

    def lookup(self, key: Key, context: LookupContext, now_s: float) -> Lookup:
        if self._opened is None:
            return Lookup.MISS
        answer = self._opened.lookup(key, context, now_s)
        if answer is not Lookup.HIT:
            return answer
        if self._held_since_s is None:
            self._held_since_s = now_s
        return Lookup.RETRY if now_s - self._held_since_s < OPENING_WAIT_S else Lookup.MISS

    def flush(self, now_s: float) -> None:
        if self._opened is not None:
            self._opened.flush(now_s)

    def forget_request(self, request_id: str) -> None:
        if self._opened is not None:
            self._opened.forget_request(request_id)


class ServingTiers:
    """The tiers by position in the config: what serves, or a ``ClosedTier``. On its way to serving a tier is first in
    ``_openings``, then in ``_opened`` and ``_awaited``, then in ``_opened`` alone.
    """

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
        self.tiers: list[Tier] = [ClosedTier() for _ in config.tiers]
        self.number = 0
        """Counts how often the tiers were opened anew for another namespace: places and the ranks' words carry it."""
        self.is_off = False
        """Nothing will ever be stored or loaded."""
        self.is_whole = False
        """All tiers serve, and ``update`` and ``take_places`` have nothing left to do."""
        self._required = {position for position, tier in enumerate(config.tiers) if tier.required}
        """The tiers without which no engine shall run, until they serve for the first time."""
        self._patient_until_s = 0.0
        """Until then an engine without requests steps for what was not tried yet, and requests wait for ranks."""
        self._naming: BackgroundOpening[Namespace | Exception] | None = None
        """Makes the namespace. None: ``open`` was not called."""
        self._is_named = False
        self._openings: dict[int, BackgroundOpening[AnyTier]] = {}
        self._opened: dict[int, AnyTier] = {}
        self._awaited: dict[int, float] = {}
        """The tiers that not all ranks have open: since when they are open here."""
        self._untold: dict[int, AnyPlace] = {}
        self._ranks: dict[int, RankStatus] = {}
        self._failed: frozenset[int] = frozenset()
        """The tiers that some rank cannot open at the moment; also some that serve, after the rank has slept."""
        self._to_clear: set[int] = set()
        """The cache was reset before these were open."""
        self._lock = threading.Lock()
        """Guards what follows, which the thread that makes the namespace uses, too."""
        self._digests: dict[tuple[str, bool], WeightsDigest] = {}
        """By path, and whether it counts alone: of weights, and of directories and large files that settings name."""
        self._is_closed = False

    @property
    def is_begun(self) -> bool:
        """Whether ``open`` was called."""
        return self._naming is not None

    @property
    def is_opening(self) -> bool:
        """Whether an engine without requests should step on, so that tiers are taken over and ranks hear of them. It
        does not for a tier that hangs.
        """
        now_s = time.monotonic()
        if now_s < self._patient_until_s and not self.is_off:
            has_failed = [opening.error is not None for opening in self._openings.values()]
            if not self._is_named or not all(has_failed):
                return True
        return any(at not in self._failed and now_s - since < OPENING_WAIT_S for at, since in self._awaited.items())

    @property
    def is_about_to_serve(self) -> bool:
        """Whether no tier serves yet, and some will in a moment."""
        return not self.is_whole and self.is_opening and all(isinstance(tier, ClosedTier) for tier in self.tiers)

    @property
    def awaits_required(self) -> bool:
        """Whether some rank has still to open a tier without which no engine shall run."""
        return not self._required.isdisjoint(self._awaited)

    def open(self, ranks: Sequence[RankGeometry], *, waits: bool) -> None:
        """Open the tiers for what ``ranks`` have, in order, and, at a start that ``waits``, wait for them.

        Then raises ConfigError for a tier whose options do not fit the model, and TierError for one with ``required:
        true`` that is not open. What else fails or takes longer joins in a later ``update``.
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
        for opening in self._openings.values():
            opening.wait(max(0.0, until_s - time.monotonic()))
            if isinstance(opening.error, ConfigError):
                raise opening.error
        self.update()
        self._patient_until_s = 0.0
        if not self._is_named and not self.is_off and naming.error is None:
            logger.info("Offloading begins as soon as the model's files have been read, to know which weights they are")
        for position, opening in self._openings.items():
            if opening.error is None:
                if position in self._required:
                    raise self._refusal(position, f"it is not open within {START_WAIT_S:.0f} s")
                logger.warning(
                    "%s: not open within %.0f s. Requests go on without it; it is used once it is open",
                    name_of(self._config.tiers[position]),
                    START_WAIT_S,
                )

    def reopen(self, namespace: Namespace) -> None:
        """Close what is open, and open it for another namespace, in the background. Nothing is under way."""
        ending: dict[int, list[threading.Thread]] = {}
        for position, opening in self._openings.items():
            if (opened := opening.take()) is not None:
                self._opened[position] = opened
            ending[position] = opening.close()
        for position, tier in self._opened.items():
            ending[position] = [*ending.get(position, ()), *in_background(tier.close)]
        self.tiers[:] = [ClosedTier() for _ in self.tiers]
        self.number += 1
        self.is_whole, self._failed = False, frozenset()
        for of_these_tiers in (self._openings, self._opened, self._awaited, self._untold, self._ranks):
            of_these_tiers.clear()
        self._to_clear.clear()
        self._required.clear()  # of the start
        self._patient_until_s = time.monotonic() + OPENING_WAIT_S
        self._open_tiers(namespace, ending)

    def update(self) -> None:
        """Take over what was opened since the last call, and have those serve that all ranks have opened, too.

        Called in every step: costs nothing where nothing has changed. Raises TierError where a tier with ``required:
        true`` could not be opened.
        """
        now_s = time.monotonic()
        if self.is_whole or self._naming is None or self.is_off:
            return
        named = self._naming.take()
        if named is not None:
            self._take_namespace(named)
        for position, opening in list(self._openings.items()):
            error, opened = opening.error, opening.take()
            if error is not None and position in self._required:
                raise self._refusal(position, str(error), error)
            if opened is not None:
                del self._openings[position]
                self._take_tier(position, opened, now_s)
        for position in sorted(self._required):
            if position in self._failed:
                raise self._refusal(position, "some rank cannot open it, and its log says why")
            if now_s - self._awaited.get(position, now_s) >= REQUIRED_WAIT_S:
                why = f"some rank has not opened it within {REQUIRED_WAIT_S:.0f} s; does storage answer where it runs?"
                raise self._refusal(position, why)
        if len(self._ranks) < self._offloading.parallel.world_size:
            return
        for position in [at for at in self._awaited if all(at in said.open for said in self._ranks.values())]:
            del self._awaited[position]
            self._required.discard(position)
            self._put(position, self._opened[position])
        self.is_whole = not any(isinstance(tier, ClosedTier) for tier in self.tiers)

    def take_places(self) -> dict[int, AnyPlace]:
        """Return where the ranks are to open tiers that were opened here since the last call."""
        places, self._untold = self._untold, {}
        return places

    def take_ranks(self, ranks: Mapping[int, RankStatus]) -> None:
        """Take the word of ranks whose status has changed, of this ``number``. Raises as ``update``."""
        self._ranks.update(ranks)
        self._failed = frozenset(at for status in self._ranks.values() for at in status.failed)
        for position in self._failed:
            tier = self.tiers[position]
            if isinstance(tier, ClosedTier):
                tier.give_up()
        self.update()

    def clear_closed(self) -> None:
        """Have nothing found in tiers that do not serve yet of what they hold now."""
        self._to_clear.update(set(range(len(self.tiers))) - self._opened.keys())
        for position in self._awaited:
            self._opened[position].clear()

    def close(self, pending: Iterable[tuple[int, Key]]) -> None:
        """Close what is open, and give up what is not, which is waited for shortly. ``pending``: by position, what was
        being written.
        """
        with self._lock:
            self._is_closed = True
            digests = list(self._digests.values())
        for digest in digests:
            digest.close()
        ending = [] if self._naming is None else self._naming.close()
        for opening in self._openings.values():
            ending += opening.close()
        join_all(ending, CLOSE_S)
        written = list(pending)
        for position, tier in self._opened.items():
            tier.close([key for at, key in written if at == position])

    # Inside

    def _name(self, ranks: Sequence[RankGeometry]) -> Namespace | Exception:
        """Return the namespace, or why there is none; on a thread of its own, for it may read a model's files."""
        try:
            models = models_of(self._vllm_config, sources_of_ranks(ranks))
            weights = {
                files: self._digest(files) for files in {model.files for model in models.values()} if files is not None
            }
            results = {files: digest.wait_for_result() for files, digest in weights.items()}
            return build_namespace(
                self._vllm_config,
                self._offloading,
                self._config,
                ranks,
                {path: results[model.files] for path, model in models.items() if model.files is not None},
                lambda path: self._digest(path, alone=os.path.isfile(path)).wait_for_result(),
                loaded_weights(self._vllm_config, models, weights, ranks),
            )
        except BaseException as error:  # noqa: BLE001 - also a panic in a library
            return error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _digest(self, path: str, *, alone: bool = False) -> WeightsDigest:
        """Begin to read, as ``WeightsDigest`` does, once, until ``close``."""
        cache = cache_directory_of(self._config)  # may ask who the user is, over a network
        with self._lock:
            digest = self._digests.get((path, alone)) or WeightsDigest(path, cache, alone=alone)
            self._digests[path, alone] = digest
            if self._is_closed:
                digest.close()
        return digest

    def _take_namespace(self, namespace: Namespace | Exception) -> None:
        if isinstance(namespace, Exception):
            self.is_off = True
            if self._required:
                raise self._refusal(min(self._required), str(namespace), namespace)
            trace = None if isinstance(namespace, NixlOffloadError) else namespace
            logger.error("Offloading is off until the engine restarts: %s", namespace, exc_info=trace)
            return
        self._is_named = True
        self._open_tiers(namespace)

    def _open_tiers(self, namespace: Namespace, after: Mapping[int, Iterable[threading.Thread]] = _NOTHING) -> None:
        """Begin to open the tiers. ``after``: what must have ended before, by position."""
        said = namespace.fields
        logger.info(
            "%d tokens take %.2f MiB in each tier, in a chunk for each of %d KV groups",
            said.tokens_per_block * said.blocks_per_chunk,
            sum(namespace.chunk_bytes(group.group_id) for group in said.groups) / 2**20,
            len(said.groups),
        )
        self._begin(namespace)
        parallel = self._vllm_config.parallel_config
        for position, tier in enumerate(self._config.tiers):
            context = TierContext(
                position,
                namespace,
                world_size=parallel.world_size,
                dp_index=parallel.data_parallel_index,
                dp_engines=sharing_engines(parallel),
            )
            self._openings[position] = BackgroundOpening(
                partial(open_tier, tier, context, self._config.tiers[:position]),
                lambda opened: opened.close(),
                what=name_of(tier),
                thread_name=f"nixl-offload-open-{position}",
                after=after.get(position, ()),
            )

    def _take_tier(self, position: int, tier: AnyTier, now_s: float) -> None:
        if position in self._to_clear:
            tier.clear()
        self._opened[position], self._untold[position] = tier, tier.place
        self._awaited[position] = now_s
        if now_s < self._patient_until_s:  # not amid traffic
            self._put(position, ClosedTier(tier))

    def _refusal(self, position: int, why: str, error: Exception | None = None) -> TierError:
        sentence = f"{name_of(self._config.tiers[position])}: required: true allows no server without it, and {why}"
        refusal = TierError(sentence, cause=getattr(error, "cause", "io"))
        refusal.__cause__ = error
        return refusal

    def _put(self, position: int, tier: Tier) -> None:
        self.tiers[position] = tier
        self._join(position, tier)


def open_tier(tier: TierConfig, context: TierContext, nearer: Sequence[TierConfig]) -> AnyTier:
    """Open what ``tier`` describes. May take as long as storage hangs.

    Raises as ``tiers.kinds.open_tier``, and as ``require_apart`` for the tiers that are ``nearer``.
    """
    kinds.require_apart(tier, nearer)
    return kinds.open_tier(tier, context)


def sharing_engines(parallel: ParallelConfig) -> range:
    """Return the engines, by index, that divide this machine's memory and drives: this one is among them.

    Where vLLM does not tell which of them are here these are all of them: then each takes less than it might, and
    together they never take more than a capacity.
    """
    engines = range(parallel.data_parallel_size)
    if parallel.enable_elastic_ep:
        return engines  # they come and go
    if len(engines) == 1:
        # vLLM tells the engines of a dense model that each is alone. This field it leaves as it was for all of them. It
        # is for something else: where it is gone or unset they are taken for alone, as vLLM says.
        return range(getattr(parallel, "elastic_ep_max_dp_size", None) or 1)
    if parallel.data_parallel_backend != "mp" or parallel.data_parallel_external_lb or vllm.envs.VLLM_DP_SIZE > 1:
        return engines  # each was started by itself, and takes itself for the only one here
    first = parallel.data_parallel_index - (parallel.data_parallel_rank_local or 0)
    return range(first, first + parallel.data_parallel_size_local)
