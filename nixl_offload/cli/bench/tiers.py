"""Opens a tier for ``nixl-offload bench``: the engine, link and mover of a server, over scratch space of their own.

Threading: one thread; the engines have their pumps. Ownership: ``open_tier`` is a context that removes all that it
made, also when it is interrupted. What a process that was killed left in a shared tier the next run removes; a scratch
slab has no name while it is used, so that nothing of it is ever left, and no engine that starts counts it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from nixl_offload.cli.bench.memory import KVCache
from nixl_offload.cli.terminal import plural
from nixl_offload.config import Config, MemoryConfig, SharedConfig, SlabConfig, StoredConfig, TierConfig
from nixl_offload.engine import ChunkIO, Completion, Engine
from nixl_offload.engine.autotune.scratch import new_scratch_path, remove_leftovers
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.memory_tier import MemoryEngine
from nixl_offload.engine.opened_mover import OpenedMover, engine_options, open_planned, plan_tier
from nixl_offload.errors import StoreError, TierError
from nixl_offload.movers.select_object import open_object_mover
from nixl_offload.stores.base import Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.stores.select import open_store
from nixl_offload.tiers.base import Link
from nixl_offload.tiers.inspect import BENCH_SCRATCH
from nixl_offload.tiers.kinds import open_link
from nixl_offload.tiers.shared.naming import parse_shard_name
from nixl_offload.tiers.shared.tier import SharedPlace
from nixl_offload.tiers.slab.file import SlabFile
from nixl_offload.tiers.slab.link import SlabLink

SCRATCH: Final = BENCH_SCRATCH
"""How the names of scratch namespaces begin: half of 32 hex digits, which no digest has but by a chance of 2**-64."""
_STALE_S: Final = 3600.0
_BATCH_NAMES: Final = 1000
_IN_FLIGHT: Final = 16
_SPACE_SHARE: Final = 2
"""Of what is free on the filesystem, or in the capacity, at most half is taken."""
_LEAST_CHUNKS: Final = 4
_CLOSE_S: Final = 10.0


class Driven(Protocol):
    """What is asked of an engine."""

    def submit_store(self, job_id: int, chunks: list[ChunkIO]) -> None: ...
    def submit_load(self, job_id: int, chunks: list[ChunkIO]) -> None: ...
    def finished(self) -> list[Completion]: ...


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier ready to be driven."""

    engine: Driven
    position: int
    where: str
    mover: str
    path: str
    """The transfer path: ``direct``, ``device`` or ``host``."""
    in_flight: int
    chunks: int
    """Places, each as large as the largest chunk."""
    overwrites: bool
    """A server mostly writes over what it wrote before, so that is what is measured."""


@contextlib.contextmanager
def open_tier(config: Config, tier: TierConfig, cache: KVCache, size_bytes: int) -> Iterator[OpenTier]:
    """Open ``tier`` with room for ``size_bytes``, less where that is not to be had.

    Raises TierError, StoreError, MoverError: why it cannot be measured.
    """
    position = config.tiers.index(tier)
    if tier.kind == "memory":
        yield from _memory(config, position, tier, cache, size_bytes)
    elif tier.kind == "slab":
        yield from _slab(config, position, tier, cache, size_bytes)
    else:
        yield from _shared(config, position, tier, cache, size_bytes)


def in_flight_of(config: Config, slot_bytes: int) -> int:
    """Return how many chunks a server's staging memory holds, per tier; at most sixteen."""
    return max(1, min(_IN_FLIGHT, _staging_bytes(config) // slot_bytes))


def _memory(config: Config, position: int, tier: MemoryConfig, cache: KVCache, size_bytes: int) -> Iterator[OpenTier]:
    chunks = _chunks(min(size_bytes, tier.capacity_bytes), cache, "the memory tier")
    host = HostSlab(
        memory_bytes=chunks * cache.slot_bytes,
        relay_slots=0,
        slot_bytes=cache.slot_bytes,
        pinned=cache.device.page_locks,
        device=cache.device.number,
        progress=lambda done, total: None,
    )
    try:
        engine = MemoryEngine(
            tensors=cache.tensors,
            layout=cache.layout,
            host=host,
            rank_namespace=secrets.token_bytes(32),
            tier=position,
            verify=config.verify,
        )
        try:
            yield OpenTier(engine, position, "host memory", "copy", "host", cache.chunks, chunks, overwrites=True)
        finally:
            engine.close(_CLOSE_S)
    finally:
        host.close()


def _slab(config: Config, position: int, tier: SlabConfig, cache: KVCache, size_bytes: int) -> Iterator[OpenTier]:
    """A scratch slab beside the real ones: an engine may have those open, and what they hold is served."""
    chunks = _chunks(_affordable_bytes(tier, size_bytes), cache, tier.path)
    remove_leftovers(tier.path)
    # As movers are compared: no engine that starts counts a file of this name, and one that was left is removed.
    path = Path(new_scratch_path(tier.path))
    slab = SlabFile(path, chunks * cache.slot_bytes, cache.slot_bytes, direct_io=tier.direct_io)
    with contextlib.ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        slab.open()
        undo.callback(slab.close)
        slab.ensure(0, slab.rank_bytes)
        opened = _open_mover(tier, cache)
        undo.callback(opened.close)
        assert opened.mover is not None
        link = SlabLink(_Nameless(slab), opened.mover, time.monotonic)
        engine = _engine(config, position, link, cache, opened)
        undo.callback(engine.close, _CLOSE_S)
        path.unlink(missing_ok=True)
        yield _opened(engine, position, tier.path, config, cache, opened, chunks, overwrites=True)


def _shared(config: Config, position: int, tier: SharedConfig, cache: KVCache, size_bytes: int) -> Iterator[OpenTier]:
    """A scratch namespace, which no server asks for."""
    size_bytes = _affordable_bytes(tier, size_bytes)
    place = SharedPlace(SCRATCH + secrets.token_hex(8), ())
    with contextlib.ExitStack() as undo:
        store = open_store(tier)
        undo.callback(store.close)
        chunks = _chunks(size_bytes, cache, store.where)
        _remove_stale(store)
        opened = _open_mover(tier, cache)
        undo.callback(_remove, store, place.namespace)
        undo.callback(opened.close)
        assert opened.mover is not None
        engine = _engine(config, position, open_link(tier, place, 0, opened.mover), cache, opened)
        undo.callback(engine.close, _CLOSE_S)
        yield _opened(engine, position, store.where, config, cache, opened, chunks, overwrites=False)


def _opened(
    engine: Engine,
    position: int,
    where: str,
    config: Config,
    cache: KVCache,
    opened: OpenedMover,
    chunks: int,
    *,
    overwrites: bool,
) -> OpenTier:
    assert opened.mover is not None
    path = "host" if opened.plan is None else opened.plan.path
    in_flight = min(in_flight_of(config, cache.slot_bytes), cache.chunks, chunks)
    return OpenTier(engine, position, where, opened.mover.name, path, in_flight, chunks, overwrites)


def _engine(config: Config, position: int, link: Link, cache: KVCache, opened: OpenedMover) -> Engine:
    """As ``vllm.rank_engine`` makes it."""
    options = engine_options(opened, link.mover, cache.device, cache.layout)
    return Engine(
        tensors=cache.tensors,
        layout=cache.layout,
        link=link,
        tier=position,
        rank_namespace=secrets.token_bytes(32),
        staging_bytes=_staging_bytes(config),
        verify=config.verify,
        load_timeout_s=config.load_timeout_s,
        direct_min_extent_bytes=options.direct_min_extent_bytes,
        device=cache.device,
        staging=options.staging,
    )


def _open_mover(tier: StoredConfig, cache: KVCache) -> OpenedMover:
    """As a rank does it. Raises MoverUnavailableError."""
    if tier.kind == "s3":
        return OpenedMover(open_object_mover(tier, cache.device.kind, functools.partial(open_store, tier)).mover)
    return open_planned(tier, tier.path, cache.device, plan_tier(tier, cache.device, cache.layout))


def _staging_bytes(config: Config) -> int:
    return config.staging_bytes // max(1, len(config.stored))


def _affordable_bytes(tier: StoredConfig, size_bytes: int) -> int:
    """Return at most half of the capacity and of what is free. Raises TierError: the directory is not there."""
    if tier.capacity_bytes is not None:
        size_bytes = min(size_bytes, tier.capacity_bytes // _SPACE_SHARE)
    if tier.has_files:
        if not os.path.isdir(tier.where):
            words = f"{tier.where}: there is no such directory; make it, or mount its filesystem"
            raise TierError(words, cause="missing")
        space = os.statvfs(tier.where)
        if space.f_blocks:
            size_bytes = min(size_bytes, space.f_bavail * space.f_frsize // _SPACE_SHARE)
    return size_bytes


def _chunks(size_bytes: int, cache: KVCache, where: str) -> int:
    chunks = size_bytes // cache.slot_bytes
    if chunks < _LEAST_CHUNKS:
        raise TierError(
            f"{where}: room for {plural(chunks, 'chunk')} of {cache.slot_bytes} bytes; at least {_LEAST_CHUNKS} are "
            "needed: free some space, raise --size or the capacity, or take a smaller --model",
            cause="full",
        )
    return chunks


def _remove(store: Store, namespace: str) -> None:
    """Remove a scratch namespace, drafts included. Raises StoreError: something is left, for the next run to remove."""
    while names := [info.name for info, _ in zip(store.list(f"{namespace}/"), range(_BATCH_NAMES), strict=False)]:
        store.delete(names)
    if isinstance(store, TreeStore):
        store.remove_stale_drafts(0.0, lambda name: name.startswith(f"{namespace}/"))
        directory = Path(store.where, namespace)
        for path in sorted(directory.glob("*"), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()
        with contextlib.suppress(OSError):
            directory.rmdir()


def _remove_stale(store: Store) -> None:
    """Remove scratch namespaces of runs that were killed."""
    newest_s: dict[str, float] = {}
    for info in store.list(SCRATCH):
        named = parse_shard_name(info.name)
        if named is not None:
            newest_s[named.namespace] = max(info.modified_s, newest_s.get(named.namespace, 0.0))
    for namespace, modified_s in newest_s.items():
        if modified_s < time.time() - _STALE_S:
            with contextlib.suppress(StoreError):
                _remove(store, namespace)


class _Nameless:
    """A slab that is open and has lost its name: ``tiers.slab.link.Slab`` without the looks at the path."""

    def __init__(self, slab: SlabFile) -> None:
        self.path = slab.path
        self.rank_bytes = slab.rank_bytes
        self.direct_io = slab.direct_io
        self.close = slab.close

    def ensure(self, offset: int, length_bytes: int) -> None:
        """All of it has space since it was made."""

    def check(self) -> str | None:
        """Nothing stands against it."""
        return None

    def reopen(self) -> bool:
        """It is open."""
        return False
