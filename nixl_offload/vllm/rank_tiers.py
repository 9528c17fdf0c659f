"""A rank's half of the tiers: opens a link, a mover and an engine for each tier, as the config asks and this machine
allows. Closes them for sleep and opens them again.

Threading: the worker's main thread. Each tier opens and closes on a thread of its own. So does the first write to each
directory at start. Storage that hangs may keep these threads for ever.
Ownership: a tier's engine belongs to its ``BackgroundOpening`` until the ``RankEngine`` takes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nixl_offload.calls import CallThreads
from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.layout import KVLayout
from nixl_offload.chunk.shards import Shard
from nixl_offload.config import Config, TierConfig
from nixl_offload.engine import LinkPaths, MemoryPaths, RankEngine, TierEngine, TierSetup
from nixl_offload.engine.autotune import open_planned, plan_tier, staging_for
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.jobs import JobTable
from nixl_offload.engine.link_memory import share_staging
from nixl_offload.engine.packer import pages_of
from nixl_offload.engine.paths import RankMemory
from nixl_offload.engine.streams import Device, device_of, model_on_default_stream
from nixl_offload.errors import TierError
from nixl_offload.hardware.machine import unbound
from nixl_offload.identity.namespace import shard_digest
from nixl_offload.movers.base import MemoryKind, Mover
from nixl_offload.movers.select import open_object_mover
from nixl_offload.stores.filesystem import tier_error
from nixl_offload.tiers.base import Place
from nixl_offload.tiers.kinds import open_link
from nixl_offload.tiers.ownership import make_private_directory, require_lock
from nixl_offload.tiers.slab.file import SlabPlace
from nixl_offload.tiers.slot_tier import rank_memory_bytes
from nixl_offload.types import PAGE_BYTES
from nixl_offload.vllm.background import CLOSE_S, BackgroundOpening, in_background, join_all, name_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingParallelConfig

logger = logging.getLogger(__name__)

WAKE_UP_S = 10.0
"""How long waking up waits for tiers to be open again."""
TOUCH_LIMIT_S = 5.0
"""How long a start waits for the first writes to all directories. A directory that takes longer may hang, and is not
measured."""
RELAY_SLOTS = 16
RELAY_SHARE = 4
"""Slots for moves between farther tiers: at most this many, and at most a quarter of the staging size."""


class RankTiers:
    """Opens tiers, by position in the config, and gives them to the engine."""

    def __init__(
        self, engine: RankEngine, config: Config, memory: RankMemory, rank: int, planned: Sequence[str | None]
    ) -> None:
        """``planned``: the mover of each tier, from ``plan_tiers``."""
        self._engine = engine
        self._config = config
        self._memory = memory
        self._rank = rank
        self.planned = planned
        self.number = 0
        """As ``ServingTiers.number``."""
        self._places: dict[int, Place] = {}
        """The tiers that are open, or being opened, or were before the rank slept."""
        self._openings: dict[int, BackgroundOpening[TierEngine]] = {}
        """Tiers that are being opened, until the engine has them."""
        self._ending: defaultdict[int, list[threading.Thread]] = defaultdict(list)
        """By tier: threads that still open or close it after it was given up. They may touch KV memory."""
        self._sleeps = False
        """KV memory has gone away, and nothing is open."""

    @property
    def is_opening(self) -> bool:
        """Whether some tier is being opened."""
        return bool(self._openings)

    @property
    def failed(self) -> frozenset[int]:
        """Tiers that could not be opened so far."""
        return frozenset(position for position, opening in self._openings.items() if opening.error is not None)

    def open(self, places: Mapping[int, Place], number: int) -> None:
        """Begin to open tiers not opened yet. A new ``number`` first closes all that are, which must have no jobs."""
        if number != self.number:
            self._give_up()
            for position, engine in self._engine.detach_all().items():
                self._ending[position] += in_background(partial(engine.close, 0.0))
            self._places, self.number = {}, number
        for position, place in places.items():
            if position not in self._places:
                self._places[position] = place
                if not self._sleeps:
                    self._begin(position)

    def take_opened(self) -> None:
        """Give the engine the tiers opened since the last call. Costs nothing if no tier is being opened."""
        for position, opening in list(self._openings.items()) if self._openings else ():
            engine = opening.take()
            if engine is not None:
                self._engine.join(position, engine)
                del self._openings[position]
                self._warn_of_default_stream(position, engine)

    def sleep(self, drain_timeout_s: float) -> None:
        """Drain for at most ``drain_timeout_s``, then release every registration. Idempotent.

        Raises TierError if a transfer or an opening may still touch KV memory. The closed tiers are opened again then.
        """
        if self._sleeps:
            return
        if not self.close() or not self._engine.release(drain_timeout_s):
            self._reopen()
            raise TierError(
                "the engine cannot sleep: a transfer, or the opening of a tier, has not ended, and may still touch the "
                "KV cache. Wake it up; after a restart with storage that answers it can sleep again",
                cause="timeout",
            )
        self._sleeps = True

    def wake_up(self) -> None:
        """Open again the tiers that ``sleep`` has closed, at the same places. Waits ``WAKE_UP_S`` at most."""
        if not self._sleeps:
            return
        self._sleeps = False
        self._reopen()
        until_s = time.monotonic() + WAKE_UP_S
        for opening in self._openings.values():
            opening.wait(max(0.0, until_s - time.monotonic()))
        self.take_opened()

    def close(self) -> bool:
        """Stop opening tiers. Returns False if an opening or a closing did not end within ``CLOSE_S``."""
        self._give_up()
        return not join_all(list(chain.from_iterable(self._ending.values())), CLOSE_S)

    def _give_up(self) -> None:
        for position, opening in self._openings.items():
            self._ending[position] += opening.close()
        self._openings = {}

    def _reopen(self) -> None:
        for position in self._places.keys() - self._engine.open_tiers:
            self._begin(position)

    def _begin(self, position: int) -> None:
        self._ending[position] = [thread for thread in self._ending[position] if thread.is_alive()]
        place, planned = self._places[position], self.planned[position]
        self._openings[position] = BackgroundOpening(
            lambda: open_tier_engine(self._config, position, place, self._memory, self._rank, planned, self._engine),
            lambda engine: engine.close(0.0),
            what=f"{name_of(self._config.tiers[position])} on rank {self._rank}",
            thread_name=f"nixl-offload-open-rank-{position}",
            after=self._ending[position].copy(),
        )

    def _warn_of_default_stream(self, position: int, engine: TierEngine) -> None:
        """Called when a tier is open: vLLM chooses the model's stream after it has registered the KV caches."""
        access = engine.status().access
        if access is not None and access.mover == "kvikio" and model_on_default_stream(self._memory.tensors[0]):
            logger.warning(
                "%s: KvikIO's copies wait for CUDA's default stream, where this model runs (--enforce-eager on one "
                "GPU does that): a load may take as long as a step, and hold up the next. Drop --enforce-eager, or set "
                "mover: gds_mt or posix",
                name_of(self._config.tiers[position]),
            )


@unbound()
def plan_tiers(config: Config, tensors: Sequence[torch.Tensor], layout: KVLayout) -> list[str | None]:
    """Compare transfer paths between device memory and files, and compile kernels. Called at start: it may take
    seconds. Returns the mover of each tier. None: nothing was compared, and the tier takes the first that works.
    Errors are logged when the tier is opened.
    """
    device = device_of(tensors[0])
    plans: list[str | None] = [None] * len(config.tiers)
    if not device.is_accelerator:
        return plans
    try:
        # Compiles the Triton kernels, which takes seconds, before there is a job to wait for them.
        slow = DevicePacker(tensors, pages_of(layout), device).sums_slowly
    except Exception:
        logger.exception("Kernels cannot be used on %s", device.torch_device)
        return plans
    touched = _touch([tier.path for tier in config.tiers if tier.kind in ("slab", "shared_dir")])
    for position, tier in enumerate(config.tiers):
        if tier.kind in ("slab", "shared_dir") and tier.path in touched:
            try:
                # Without quick kernels the host sums; it also makes MACs.
                through_host = slow or (config.authenticate is not None and tier.is_shared)
                plans[position] = plan_tier(tier, device, layout, through_host=through_host)
            except Exception as error:  # noqa: BLE001 - the tier is opened without a plan, or says what is wrong
                logger.debug("Nothing was compared in %s: %s", tier.path, error)
    return plans


def _touch(directories: Sequence[str]) -> set[str]:
    """Make directories and write a page in each. Returns the directories that were done within ``TOUCH_LIMIT_S``."""

    def touch(directory: str) -> None:
        make_private_directory(Path(directory))
        with tempfile.TemporaryFile(buffering=0, prefix=".mover-probe-", dir=directory) as file:
            file.write(bytes(PAGE_BYTES))
            os.fsync(file.fileno())

    done = set[str]()
    with contextlib.closing(CallThreads("nixl-offload-touch", max(1, len(directories)))) as threads:
        calls = {directory: threads.start(partial(touch, directory)) for directory in directories}
        wait(calls.values(), TOUCH_LIMIT_S)
        for directory, call in calls.items():
            if not call.done():
                logger.warning(
                    "%s: nothing was written within %.0f s, so transfer paths are not compared there until the next "
                    "start",
                    *(directory, TOUCH_LIMIT_S),
                )
            elif error := call.exception():
                logger.debug("Nothing is compared in %s: %s", directory, error)
            else:
                done.add(directory)
    return done


def open_host(
    config: Config,
    parallel: OffloadingParallelConfig,
    layout: KVLayout,
    tensors: Sequence[torch.Tensor],
    engines: int = 1,
    keys: ChunkKeys | None = None,
) -> HostSlab | None:
    """Allocate this rank's share of the memory tier, and slots for moves between farther tiers; None: not needed.

    ``engines``: data-parallel engines that divide the memory tier. ``keys``: as for ``HostSlab``. Raises TierError.
    """
    device = device_of(tensors[0])
    farther, memory_bytes = len(config.stored), 0
    if config.memory is not None:
        memory_bytes = rank_memory_bytes(config.memory.capacity_bytes, parallel.world_size, engines)
    if not memory_bytes and farther < 2:
        return None
    largest = max(layout.slot_bytes(group) for group in range(len(layout.groups)))
    relay_slots = 0 if farther < 2 else max(2, min(RELAY_SLOTS, config.staging_bytes // RELAY_SHARE // largest))
    return HostSlab(
        memory_bytes=memory_bytes,
        relay_slots=relay_slots,
        slot_bytes=largest,
        pinned=device.page_locks,
        device=device.number,
        sharers=parallel.world_size * engines,
        keys=keys,
    )


@unbound()
def open_tier_engine(
    config: Config, position: int, place: Place, memory: RankMemory, rank: int, planned: str | None, table: JobTable
) -> TierEngine:
    """Open this rank's link to a tier, its mover, and the engine that owns both, for jobs in ``table``.

    ``memory`` must outlive it. Raises what prevents the opening. May take as long as storage hangs.
    """
    tier = config.tiers[position]
    device = memory.device
    shards = [Shard(number, shard_digest(place.namespace, number)) for number in memory.shards]
    if device.torch_device.type == "cuda":
        torch.cuda.set_device(device.torch_device)  # a new thread begins on the first GPU
    keys = memory.keys if tier.is_shared else None
    setup = TierSetup(table, memory, shards, position, config.verify, keys)
    # As vLLM's own calls: KV caches were made in inference mode, and tensors made here are written to in it.
    with torch.inference_mode(), contextlib.ExitStack() as undo:
        if tier.kind == "memory":
            return TierEngine(MemoryPaths(setup))
        mover = _open_mover(tier, place, device, planned, authenticated=keys is not None)
        undo.callback(mover.close)
        link = open_link(tier, place, rank, mover)
        undo.callback(link.close)
        side, staging_bytes = share_staging(
            "host" if keys is not None else staging_for(mover, device),
            config.staging_bytes,
            device,
            memory.claimed_share,
            packers=len(config.tiers),
            sharers=len(config.stored),
            layout=memory.layout,
        )
        engine = TierEngine(LinkPaths(setup, link, staging_bytes=staging_bytes, staging=side))
        undo.pop_all()
    return engine


def _open_mover(tier: TierConfig, place: Place, device: Device, planned: str | None, *, authenticated: bool) -> Mover:
    """Return the open mover: one of host memory if chunks of objects are authenticated."""
    if tier.kind in ("slab", "shared_dir"):
        directory = place.directory if isinstance(place, SlabPlace) else tier.path
        if isinstance(place, SlabPlace) and place.is_locked_here():
            require_lock(Path(directory), place.owner)
        try:
            make_private_directory(Path(directory))
        except OSError as error:
            raise tier_error(error, f"cannot use {directory}") from error
        return open_planned(tier, directory, device, planned)
    assert tier.kind == "s3", "memory has no mover"
    return open_object_mover(tier, MemoryKind.DRAM if authenticated else device.kind).mover
