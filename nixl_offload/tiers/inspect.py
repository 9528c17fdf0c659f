"""The inspection contract: commands list and read a tier's contents from outside any server.

Threading: one thread lists; ``read_into`` and ``look_again`` may be called by several threads at once.
Inspection locks, creates and changes nothing. Memory does not grow with the number of chunks: listings are generators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from nixl_offload.errors import NamespaceError
from nixl_offload.identity.namespace import (
    GroupFields,
    Namespace,
    NamespaceFields,
    make_namespace,
    manifest_digest,
    shard_digest,
)
from nixl_offload.types import Key

_MAX_BYTES: Final = 1 << 52
"""A manifest with shards this large is invalid: no file is that large, and sums of sizes must stay valid offsets."""
_PRINTABLE_CHARS: Final = 60


class ShardInfo(NamedTuple):
    """One shard of a chunk, according to an index or a listing."""

    number: int
    place: str
    """The object's name, or ``PATH.slab@OFFSET``; an argument for ``nixl-offload stat``."""
    size_bytes: int
    offset: int
    """Byte offset of the shard in its file: 0 except in a slab."""
    modified_s: float | None
    """By the store's clock; None in a slab, where only the header has a time."""


class ChunkInfo(NamedTuple):
    """A chunk, according to an index or a listing."""

    key: Key
    shards: tuple[ShardInfo, ...]
    version: int = 0
    """In a slab, changes whenever the chunk is put again."""

    @property
    def size_bytes(self) -> int:
        """The total size of its shards."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def modified_s(self) -> float:
        """When its youngest shard was written; 0 in a slab."""
        return max((shard.modified_s or 0.0 for shard in self.shards), default=0.0)


class NamespaceSize(NamedTuple):
    """How much a namespace holds."""

    chunks: int
    shards: int
    size_bytes: int
    oldest_s: float | None
    """When the oldest chunk was written; None if unknown."""
    newest_s: float | None


class NamespaceInfo:
    """A namespace that a tier holds. Fields from its manifest are None if that is missing or invalid."""

    def __init__(
        self, name: str, manifest: Mapping[str, Any] | None, *, part: str = "", used_s: float | None = None
    ) -> None:
        """``manifest``: one that matches ``name``. Anyone may have written it, so its fields may have any type."""
        self.name = name
        """32 hex digits."""
        self.part = part
        """``dp-0`` and so on if data-parallel engines share a directory, else empty."""
        self.path = f"{part}/{name}" if part else name
        self.used_s = used_s
        """When an engine last opened it; None if unknown."""
        self.trouble: str | None = None
        """Why its chunks cannot be listed; None if they can."""
        self.manifest = manifest
        said = manifest["fields"] if manifest else {}
        self.tenant = printable(said.get("tenant"))
        model, weights = printable(said.get("model")), printable(said.get("weights"), 8)
        self.model = f"{model} (local weights {weights})" if model and weights else model
        self.owner = f"tenant {self.tenant or '?'}, model {self.model or '?'}"
        """Tenant and model, for display."""
        self._known = known = _namespace_of(manifest)
        fields = known.fields if known else None
        self._sizes = {group.group_id: group.slot_bytes for group in fields.groups} if fields else {}
        """By KV group: the bytes of each shard."""
        self.groups: Sequence[int] = sorted(self._sizes)
        """The KV groups, in the order of their numbers."""
        self.shards = fields.shards if fields else None
        """How many shard numbers there are."""
        self.blocks_per_chunk = fields.blocks_per_chunk if fields else None
        """The same in every group."""
        self.chunk_tokens = fields.tokens_per_block * fields.blocks_per_chunk if fields else None
        self.is_authenticated = "authenticate" in fields.settings if fields else None
        """Whether its chunks must have a MAC."""

    def shard_bytes(self, group: int, shard: int) -> int | None:
        """Return the size of a shard, header and padding included; None if unknown."""
        sizes = self._sizes.get(group, ())
        return sizes[shard] if 0 <= shard < len(sizes) else None

    def shards_of(self, group: int) -> Sequence[int]:
        """Return the numbers of the shards of the group's chunks; empty if unknown."""
        return [number for number, size in enumerate(self._sizes.get(group, ())) if size]

    def shard_digest(self, shard: int) -> bytes | None:
        """Return the namespace digest that headers of a shard must contain; None without a valid manifest."""
        return shard_digest(self._known.digest, shard) if self._known and 0 <= shard < 1 << 32 else None

    def details(self) -> dict[str, str | int]:
        """Return the manifest fields in which namespaces of one model can differ, safe to print."""
        fields = self._known.fields if self._known else None
        names = ("engine", "platform", "revision", "dtype", "attention_backend", "shards", "shard_order",
                 "blocks_per_chunk", "tokens_per_block")  # fmt: skip
        found = {name: getattr(fields, name, None) for name in names}
        settings = fields.settings if fields else {}
        found |= {name: settings.get(name) for name in ("tp", "pp", "pcp", "dcp")}
        layers = getattr(fields, "layers", ())
        found["layers"] = " ".join(map(str, layers)) if len(layers) > 1 else None
        return {name: printable(value) or value for name, value in found.items() if value}


def _namespace_of(manifest: Mapping[str, Any] | None) -> Namespace | None:
    """Return the namespace that a manifest describes; None if that is missing or invalid."""
    try:
        plain = dict(manifest["fields"]) if manifest else {}
        for group in plain["groups"]:
            if any(size >= _MAX_BYTES for size in group["slot_bytes"]):
                return None
        plain["groups"] = tuple(
            GroupFields(**{**each, "slot_bytes": tuple(each["slot_bytes"])}) for each in plain["groups"]
        )
        plain |= {name: tuple(plain[name]) for name in ("ranks", "layers") if name in plain}
        known = make_namespace(NamespaceFields(**plain))
        return known if known.digest == manifest_digest(manifest) else None
    except (NamespaceError, KeyError, TypeError, ValueError, RecursionError):
        return None


class Inspector(ABC):
    """Looks into one tier: lists namespaces and chunks, reads shards. Errors: StoreError and TierError."""

    kind: str
    """The tier's kind, as the config spells it."""
    where: str
    """The directory, or the bucket and prefix, for display."""
    capacity_bytes: int | None
    exclusive: ClassVar[bool] = False
    """True if only one engine at a time uses a tier: it locks the directory, reuses slots and enforces the capacity."""
    other_objects: int = 0
    """How many foreign objects ``namespaces`` and ``chunks`` have met. No command touches these."""

    @abstractmethod
    def namespaces(self) -> Iterator[NamespaceInfo]:
        """Yield the namespaces, in the order of ``NamespaceInfo.path``."""

    @abstractmethod
    def chunks(self, namespace: NamespaceInfo) -> Iterator[ChunkInfo]:
        """Yield the chunks of a namespace. In a slab, the oldest come first."""

    @abstractmethod
    def find(self, namespace: NamespaceInfo, digits: str, limit: int) -> Sequence[ChunkInfo]:
        """Return up to ``limit`` chunks, in key order, whose keys begin with the hex ``digits`` (at least two)."""

    @abstractmethod
    def read_into(self, shard: ShardInfo, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` from ``offset`` of the shard. ``memory``: page-aligned, whole pages if possible.

        Raises StoreError: ``missing``, ``short`` (the shard ends earlier), or another cause if the storage fails.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the tier. Idempotent."""

    def created_s(self, chunk: ChunkInfo) -> float | None:
        """Return when the chunk was written; None if unknown."""
        return chunk.modified_s

    def in_use(self, namespace: NamespaceInfo) -> str | None:
        """Return which engine has the namespace open now, as text; None if none has, or if unknown."""
        return None

    def used_bytes(self) -> int | None:
        """Return the bytes that the tier takes on disk; None if that is the total of its chunks."""
        return None

    def look_again(self, namespace: NamespaceInfo, chunk: ChunkInfo) -> ChunkInfo | None:
        """Return the chunk as it is now; None if it is gone."""
        return next((now for now in self.find(namespace, chunk.key.hex(), 1) if now.key == chunk.key), None)

    def measure(self, namespace: NamespaceInfo) -> NamespaceSize:
        """List a namespace and return its totals."""
        chunks = shards = size_bytes = 0
        oldest: ChunkInfo | None = None
        newest: ChunkInfo | None = None
        for chunk in self.chunks(namespace):
            chunks, shards, size_bytes = chunks + 1, shards + len(chunk.shards), size_bytes + chunk.size_bytes
            oldest = chunk if oldest is None or chunk.modified_s < oldest.modified_s else oldest
            newest = chunk if newest is None or chunk.modified_s >= newest.modified_s else newest
        ages = [None if chunk is None else self.created_s(chunk) for chunk in (oldest, newest)]
        return NamespaceSize(chunks, shards, size_bytes, *ages)


def printable(value: object, limit: int = _PRINTABLE_CHARS) -> str | None:
    """Return a string made safe for a terminal, cut to ``limit`` characters; None if ``value`` is not a string."""
    if not isinstance(value, str):
        return None
    return "".join(char if char.isprintable() else "?" for char in value[:limit])
