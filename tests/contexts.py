"""What tests open a tier for: a context whose slot sizes they choose."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nixl_offload.config import SlabConfig
from nixl_offload.identity.namespace import Namespace
from nixl_offload.tiers.base import TierContext
from nixl_offload.tiers.slab.directory import TierDirectory
from nixl_offload.tiers.slab.file import SlabFile, rank_file_name


@dataclass(frozen=True, slots=True)
class _Context(TierContext):
    sizes: tuple[int, ...] = ()

    @property
    def slot_classes(self) -> list[int]:
        """See TierContext."""
        return sorted(set(self.sizes))


def context_of(
    namespace: Namespace,
    slot_classes: Sequence[int],
    *,
    position: int = 0,
    world_size: int = 1,
    dp_index: int = 0,
    dp_engines: range = range(1),
) -> TierContext:
    """Return a context with slots of these sizes, not those that the namespace's groups need."""
    return _Context(position, namespace, world_size, dp_index, dp_engines, tuple(slot_classes))


def slab_config(path: Path, capacity_bytes: int, *, keep_free_percent: int = 0) -> SlabConfig:
    """Return the config of a slab."""
    config = SlabConfig.model_validate({"kind": "slab", "path": str(path), "capacity": capacity_bytes})
    return config.model_copy(update={"keep_free_percent": keep_free_percent})


def slab_of(directory: TierDirectory, rank: int = 0) -> Path:
    """Return the path of a rank's slab."""
    return directory.namespace_path / rank_file_name(rank)


def back(slab: SlabFile, offset: int, length_bytes: int) -> None:
    """Put space under a range of a slab, as ``SlabFile.ensure``, without a pause."""
    deque(slab.ensure(offset, length_bytes), maxlen=0)


@contextmanager
def opened(path: Path, rank_bytes: int, extent_bytes: int, **options: Any) -> Iterator[SlabFile]:
    """Give an open slab; it is closed at the end."""
    slab = SlabFile(path, rank_bytes, extent_bytes, **options)
    slab.open()
    try:
        yield slab
    finally:
        slab.close()
