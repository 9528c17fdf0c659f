"""The fingerprint of everything that makes stored bytes interchangeable. Two engines that differ in any field never see
each other's chunks.

Threading: immutable values and pure functions, safe anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError

from nixl_offload.chunk.shards import ONE_RANGE, ShardPlan
from nixl_offload.errors import NamespaceError

FORMAT_VERSION: Final = 1
"""Version of the bytes of a stored chunk. A new one makes a new namespace, so that old chunks are never read."""

_DOMAIN: Final = b"nixl-offload namespace 2\0"
_RANK_DOMAIN: Final = b"nixl-offload rank 1\0"
_SHORT_NAME_CHARS: Final = 32

SHARD_ORDER: Final = "block layer head token content 1"
"""Order of the bytes in a shard of a range of heads, outermost first, and its version: see docs/format.md."""

Setting = bool | int | float | str | None
"""A leaf of a configuration. Types count: true, 1 and "1" are three values."""

_AnyText = InstanceOf[str]
"""Also names of files that are not UTF-8, which pydantic refuses for a plain ``str``."""
_Text = Annotated[_AnyText, Field(min_length=1)]
_Number = Annotated[int, Field(ge=1)]
_AS_IT_IS: Final = ConfigDict(strict=True, revalidate_instances="always")
"""``make_namespace`` checks types and ranges by the annotations: dataclasses check neither."""


@dataclass(frozen=True, slots=True)
class GroupFields:
    """One KV-cache group of the model."""

    __pydantic_config__: ClassVar[ConfigDict] = _AS_IT_IS
    group_id: Annotated[int, Field(ge=0)]
    tokens_per_block: _Number
    slot_bytes: tuple[Annotated[int, Field(ge=0)], ...]
    """By rank: bytes of its shard of a chunk, header page and padding included; 0: it has no layer of the group. In
    ``ShardedFields`` by shard number; 0: the group's chunks have no such shard.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFields:
    """The fields of every fingerprint. The rank of a shard is not among them: see ``Namespace.rank_digest``."""

    __pydantic_config__: ClassVar[ConfigDict] = _AS_IT_IS
    tenant: _Text
    engine: _Text
    """Serving engine and its version, such as ``vllm 0.33.0``: it decides the layout inside a block."""
    platform: _Text
    """Kind of device, such as ``cuda:9.0``: kernels may lay values out differently on each."""
    attention_backend: _Text | None
    """Names of the backends in use, chosen by the operator or not, joined by "+"; None when the ranks named none."""
    model: _Text
    """Name as served; for a local model, the last part of its path."""
    revision: _Text | None
    """The commit of a model from the Hub, if it is known; else the revision that was asked for."""
    weights: _Text | None
    """Digest of a local model's files (``identity.weights``); None if name and revision identify the model."""
    dtype: _Text
    """Type of the KV cache, such as ``fp8_e4m3``."""
    tokens_per_block: _Number
    """For the group with the largest blocks."""
    blocks_per_chunk: _Number
    tokens_per_hash: _Number
    hash_algorithm: _Text
    """The algorithm of vLLM's block hashes."""
    hash_seed: _Text | None
    """PYTHONHASHSEED, which seeds block hashes if it is set."""
    groups: Annotated[tuple[GroupFields, ...], Field(min_length=1)]
    """In any order; group ids are unique."""
    settings: Mapping[_Text, bool | int | Annotated[float, Field(allow_inf_nan=False)] | _AnyText | None]
    """All other settings of the engine that are not known to be harmless, by path."""
    format_version: _Number = FORMAT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFields(CommonFields):
    """The fingerprint of chunks that are not cut: each rank has one shard, in its own order of bytes."""

    kv_layout: _Text
    """Order of layers, blocks, heads, tokens and channels in memory, such as ``LBHNC``."""
    ranks: Annotated[tuple[_Text, ...], Field(min_length=1)]
    """By rank: a digest of what it has allocated, layer by layer."""
    tp: _Number
    pp: _Number
    pcp: _Number
    dcp: _Number
    world_size: _Number

    @property
    def holders(self) -> int:
        """How many shards a chunk has, at most."""
        return self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedFields(CommonFields):
    """The fingerprint of chunks that are cut into shards (``chunk.shards``), which are the same for all parallel
    sizes. Methods of ``Namespace`` that take a rank then take a shard's number.
    """

    ranks: Annotated[tuple[_Text, ...], Field(min_length=1)]
    """Digests of the layers of the whole model, as each rank knows them; a single one if they agree."""
    shards: _Number
    """How many shard numbers there are."""
    layers: Annotated[tuple[int, ...], Field(min_length=1)] = ONE_RANGE.begins
    """The first layer of each range of layers; left out of the plain data if there is one range."""
    shard_order: _Text = SHARD_ORDER

    @property
    def holders(self) -> int:
        """How many shards a chunk has, at most."""
        return self.shards


@dataclass(frozen=True, slots=True)
class Namespace:
    """A fingerprint and what went into it. Make one with ``make_namespace``."""

    fields: NamespaceFields | ShardedFields
    digest: bytes
    """SHA-256 of the canonical fields, 32 bytes. The same on every rank."""
    plan: ShardPlan | None = field(default=None, compare=False)
    """How the ranks of this engine hold shards, if chunks are cut; None: not needed. Not part of the fingerprint.
    """
    slot_replicas: Mapping[int, int] = field(default_factory=dict, compare=False)
    """By slot size: how many consecutive ranks of this engine share one copy of a chunk in a slab. Empty: each has its
    own. Not part of the fingerprint.
    """
    _slot_bytes: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _slots: dict[int, int] = field(init=False, repr=False, compare=False)
    _holders: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        slot_bytes = {group.group_id: group.slot_bytes for group in self.fields.groups}
        holders = {number: tuple(rank for rank, size in enumerate(of) if size) for number, of in slot_bytes.items()}
        slots = {number: max(of) for number, of in slot_bytes.items()}
        if (plan := self.plan) is not None:
            for at, (number, of) in enumerate(slot_bytes.items()):
                held = [sum(of[shard] for shard in plan.held(rank, at)) for rank in range(plan.ranks)]
                slots[number] = max(held)
        object.__setattr__(self, "_slot_bytes", slot_bytes)
        object.__setattr__(self, "_slots", slots)
        object.__setattr__(self, "_holders", holders)

    @property
    def name(self) -> str:
        """Short name for directories and object prefixes: the first 128 bits in hex, nothing a user typed."""
        return self.digest.hex()[:_SHORT_NAME_CHARS]

    def rank_digest(self, rank: int) -> bytes:
        """Return the 32 bytes that the shard headers of ``rank`` carry. Raises NamespaceError (impossible rank)."""
        if not 0 <= rank < self.fields.holders:
            raise NamespaceError(f"rank {rank} is outside the world of {self.fields.holders} ranks")
        return rank_digest(self.digest, rank)

    @property
    def rank_digests(self) -> tuple[bytes, ...]:
        """``rank_digest`` of all ranks."""
        return tuple(self.rank_digest(rank) for rank in range(self.fields.holders))

    def shard_bytes(self, group_id: int, rank: int) -> int:
        """Return the bytes of the shard of ``rank`` in each chunk of a group; 0: it has none.

        Raises LookupError (no such group or rank).
        """
        return self._slot_bytes[group_id][rank]

    def slot_bytes(self, group_id: int) -> int:
        """Return the bytes of a chunk's slot in a slab or in memory, which are equal on all ranks: the largest shard,
        or the most that a rank holds. Raises LookupError (no such group).
        """
        return self._slots[group_id]

    def chunk_bytes(self, group_id: int) -> int:
        """Return the bytes of a chunk of the group, each shard stored once. Raises LookupError (no such group)."""
        return sum(self._slot_bytes[group_id])

    def holders(self, group_id: int) -> tuple[int, ...]:
        """Return the ranks that hold a shard of the group's chunks, in order. Raises LookupError (no such group)."""
        return self._holders[group_id]

    @property
    def stages(self) -> list[int]:
        """How many ranges of layers each pipeline stage of this engine holds; empty if chunks are not cut, or if there
        is one stage.
        """
        held = [] if self.plan is None else [len(ranges) for ranges in self.plan.layers.stages]
        return held if len(held) > 1 else []

    def manifest(self) -> dict[str, Any]:
        """Return digest and fields as plain data for a human to read next to the chunks; never read back as truth."""
        return {"namespace": self.digest.hex(), "fields": _plain(self.fields)}


def make_namespace(namespace_fields: NamespaceFields | ShardedFields, plan: ShardPlan | None = None) -> Namespace:
    """Fingerprint ``namespace_fields``. ``plan``: as ``Namespace.plan``, its groups in the order of the fields'.

    Raises NamespaceError for a value of the wrong type or out of range, and for duplicate group ids: a wrong field
    would let foreign bytes in.
    """
    _check(namespace_fields)
    return Namespace(namespace_fields, _fingerprint(_plain(namespace_fields)), plan)


def manifest_fits(manifest: object, name: str) -> bool:
    """Whether plain data, which anybody may have written, is the manifest of the namespace ``name``.

    The fingerprint is made from its fields, so nobody can pass a namespace off as another tenant's.
    """
    digest = manifest_digest(manifest)
    return digest is not None and digest.hex()[:_SHORT_NAME_CHARS] == name


def manifest_digest(manifest: object) -> bytes | None:
    """Return the fingerprint of the fields in ``manifest``; None: it is no manifest."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("fields"), dict):
        return None
    try:
        return _fingerprint(manifest["fields"])
    except (TypeError, ValueError, RecursionError):
        return None


def rank_digest(digest: bytes, rank: int) -> bytes:
    """Return the 32 bytes that the headers of ``rank`` carry in the namespace with this ``digest``."""
    return hashlib.sha256(_RANK_DOMAIN + digest + rank.to_bytes(4, "big")).digest()


def _fingerprint(plain: dict[str, Any]) -> bytes:
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(_DOMAIN + canonical.encode()).digest()


def _plain(value: NamespaceFields | ShardedFields) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(value)))
    plain["groups"].sort(key=itemgetter("group_id"))
    if plain.get("layers") == list(ONE_RANGE.begins):
        del plain["layers"]
    return plain


_FIELDS: Final[TypeAdapter[Any]] = TypeAdapter(NamespaceFields | ShardedFields)


def _check(value: NamespaceFields | ShardedFields) -> None:
    try:
        _FIELDS.validate_python(value)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"][1:])
        raise NamespaceError(f"namespace.{where}: {found['msg']}, not {found['input']!r}") from error
    for position, group in enumerate(value.groups):
        where = f"namespace.groups[{position}].slot_bytes"
        if len(group.slot_bytes) != value.holders:
            raise NamespaceError(f"{where} has {len(group.slot_bytes)} sizes for {value.holders} ranks")
        if not any(group.slot_bytes):
            raise NamespaceError(f"{where} is 0 on every rank: nobody has a layer of this group")
    ids = [group.group_id for group in value.groups]
    if len(set(ids)) != len(ids):
        raise NamespaceError(f"namespace.groups repeats a group id: {ids}")
    if isinstance(value, ShardedFields):
        if value.layers != tuple(sorted({0, *value.layers})):
            raise NamespaceError(f"namespace.layers must be first layers of ranges, from 0 on, not {value.layers!r}")
        if value.shards % len(value.layers):
            raise NamespaceError(f"namespace.shards is {value.shards}, no multiple of {len(value.layers)} ranges")
    elif len(value.ranks) != value.world_size:
        raise NamespaceError(f"namespace.ranks has {len(value.ranks)} digests for {value.world_size} ranks")
