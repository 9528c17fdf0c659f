"""What the tiers of a config hold: the same questions for slabs, trees and buckets, asked from outside of any server.

Threading: one thread lists; ``read_into`` and ``look_again`` may be called by several at once. Nothing is locked,
created or changed by looking. Memory does not grow with the number of chunks: everything is yielded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from nixl_offload.cli.gc.collect import model_words, shown
from nixl_offload.identity.namespace import manifest_digest, rank_digest
from nixl_offload.types import Key, key_group

BENCH_SCRATCH: Final = b"nxobench".hex()
"""Begins the names of namespaces that ``nixl-offload bench`` works in. An hour after it was killed, the next removes
them."""
_MOST_RANKS: Final = 1 << 16
"""A manifest that says more is not believed: whoever counts up to it would never end."""
_GROUPS: Final = range(1 << 32)
"""What a key has room for."""
_MOST_BYTES: Final = 1 << 62


class Shard(NamedTuple):
    """What one rank holds of a chunk."""

    rank: int
    place: str
    """Where it lies, for people and for ``nixl-offload stat``."""
    size_bytes: int
    offset: int
    """Of its first byte at that place: 0 but in a slab."""
    modified_s: float | None
    """By the store's clock; None in a slab, where only the header knows."""


class Chunk(NamedTuple):
    """What one key names, as an index or a listing has it."""

    key: Key
    shards: tuple[Shard, ...]
    cursor: str
    """Where a listing goes on behind this chunk."""

    @property
    def size_bytes(self) -> int:
        """Of all its shards."""
        return sum(shard.size_bytes for shard in self.shards)


class Measure(NamedTuple):
    """How much a namespace holds."""

    chunks: int
    shards: int
    size_bytes: int
    oldest_s: float | None
    newest_s: float | None


@dataclass(slots=True)
class Held:
    """One namespace that a tier holds."""

    name: str
    """32 hex digits."""
    manifest: Mapping[str, Any] | None
    """Only one that fits the namespace; what its fields hold may still be of any type."""
    part: str = ""
    """``dp-0`` and so on where data-parallel engines share a directory."""
    used_s: float | None = None
    """When an engine last opened it, where that is known."""
    in_use: str | None = None
    """Which engine has it open now, in words; None: none, or nobody can tell (``Inventory.locks``)."""
    trouble: str | None = None
    """Why its chunks cannot be listed, if so."""
    digest: bytes | None = field(init=False)
    _sizes: dict[int, int | tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """By KV group: bytes of a shard by rank, or one number where older versions had one for all ranks."""

    def __post_init__(self) -> None:
        self.digest = manifest_digest(self.manifest)
        self._sizes = _sizes_of(self._fields.get("groups"), self.ranks)

    @property
    def path(self) -> str:
        """The name, behind the part."""
        return f"{self.part}/{self.name}" if self.part else self.name

    @property
    def tenant(self) -> str | None:
        """From the manifest, safe to print."""
        return shown(self._fields.get("tenant"))

    @property
    def model(self) -> str | None:
        """From the manifest, safe to print."""
        return model_words(self._fields)

    @property
    def ranks(self) -> int | None:
        """How many ranks the namespace has: the most shards that a chunk can consist of."""
        ranks = self._number("world_size")
        return None if ranks is None or ranks > _MOST_RANKS else ranks

    @property
    def blocks_per_chunk(self) -> int | None:
        """Blocks of a chunk, of every group."""
        return self._number("blocks_per_chunk")

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a chunk."""
        block, blocks = self._number("tokens_per_block"), self.blocks_per_chunk
        return block * blocks if block and blocks else None

    @property
    def groups(self) -> Sequence[int]:
        """The KV groups of which the manifest says how large their shards are."""
        return tuple(self._sizes)

    def shard_bytes(self, key: Key, rank: int) -> int | None:
        """Bytes of the shard of ``rank``, header page and padding included; None where the manifest does not say."""
        sizes = self._sizes.get(key_group(key))
        if not isinstance(sizes, tuple):
            return sizes
        return sizes[rank] if 0 <= rank < len(sizes) else None

    def holders(self, group: int) -> Sequence[int]:
        """Return the ranks that hold a shard of the group's chunks: all of them, unless the manifest says otherwise."""
        sizes = self._sizes.get(group)
        if not isinstance(sizes, tuple):
            return range(self.ranks or 0)
        return tuple(rank for rank, size in enumerate(sizes) if size)

    def why_no_shard(self, key: Key, rank: int) -> str | None:
        """Say why a chunk can have no shard of ``rank``; None where it has one, or nobody can tell."""
        if self.ranks is None or rank in self.holders(key_group(key)):
            return None
        if rank >= self.ranks:
            return f"there is no rank {rank} in a namespace of {self.ranks}"
        return f"rank {rank} has no layer of KV group {key_group(key)}"

    def rank_digest(self, rank: int) -> bytes | None:
        """Return what the headers of ``rank`` must carry."""
        return rank_digest(self.digest, rank) if self.digest and 0 <= rank < 1 << 32 else None

    def details(self) -> dict[str, str | int]:
        """What tells this namespace from others of the same model, safe to print."""
        found: dict[str, str | int] = {}
        for name in ("engine", "platform", "revision", "dtype", "kv_layout", "attention_backend"):
            text = shown(self._fields.get(name))
            if text:
                found[name] = text
        for name in ("tp", "pp", "pcp", "dcp", "world_size", "blocks_per_chunk", "tokens_per_block"):
            number = self._number(name)
            if number is not None:
                found[name] = number
        return found

    @property
    def _fields(self) -> Mapping[str, Any]:
        return self.manifest["fields"] if self.manifest else {}

    def _number(self, name: str) -> int | None:
        value = self._fields.get(name)
        return value if type(value) is int and 0 < value < 1 << 31 else None


def _sizes_of(groups: object, ranks: int | None) -> dict[int, int | tuple[int, ...]]:
    """What a manifest says of shards' sizes, as far as it can be true: anybody may have written it."""
    sizes: dict[int, int | tuple[int, ...]] = {}
    for group in groups if isinstance(groups, list) and ranks else ():
        number, size = (group.get("group_id"), group.get("slot_bytes")) if isinstance(group, dict) else (None, None)
        of_ranks = tuple(size) if isinstance(size, list) and len(size) == ranks else (size,)
        possible = all(type(each) is int and 0 <= each < _MOST_BYTES for each in of_ranks) and any(of_ranks)
        if type(number) is int and number in _GROUPS and possible:
            sizes[number] = of_ranks if isinstance(size, list) else of_ranks[0]
    return sizes


class Inventory(ABC):
    """What one tier holds. Errors: StoreError and TierError."""

    kind: str
    """As the config says it: ``slab``, ``shared_dir`` or ``s3``."""
    where: str
    """The directory, or the bucket and prefix, for people."""
    capacity_bytes: int | None
    locks: ClassVar[bool] = False
    """Whether an engine that runs has its directory locked."""
    foreign: int = 0
    """Things that are not ours, counted as ``namespaces`` was gone through. Never touched."""

    @abstractmethod
    def namespaces(self) -> Iterator[Held]:
        """Yield what is there, in the order of ``Held.path``."""

    @abstractmethod
    def measure(self, held: Held) -> Measure:
        """Count chunks and bytes."""

    @abstractmethod
    def chunks(self, held: Held, after: str = "") -> Iterator[Chunk]:
        """Yield chunks, from behind the cursor ``after`` on."""

    @abstractmethod
    def find(self, held: Held, digits: str, limit: int) -> Sequence[Chunk]:
        """Return up to ``limit`` chunks whose keys begin with these hex digits (two at least)."""

    @abstractmethod
    def look_again(self, held: Held, chunk: Chunk) -> Chunk | None:
        """Return the chunk as it is now, None where it is gone."""

    @abstractmethod
    def read_into(self, shard: Shard, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from ``offset`` of the shard on. ``memory``: page-aligned, whole pages where possible.

        Raises StoreError: ``missing``, ``short`` (the shard ends earlier), others where the storage fails.
        """

    @abstractmethod
    def created_s(self, chunk: Chunk) -> float | None:
        """Return when the chunk was written, None where nobody can tell."""

    @abstractmethod
    def used_bytes(self) -> int | None:
        """Return what counts against the capacity beyond the chunks counted; None: nothing but them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what was opened. Idempotent."""
