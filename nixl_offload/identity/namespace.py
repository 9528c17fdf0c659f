"""The fingerprint of everything that makes stored bytes interchangeable. Two engines that differ in any field never see
each other's chunks.

Threading: immutable values and pure functions, safe anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from typing import Any, Final

from nixl_offload.chunk.shards import ONE_RANGE, ShardPlan
from nixl_offload.errors import NamespaceError

FORMAT_VERSION: Final = 1
"""Version of the bytes of a stored chunk. A new one makes a new namespace, so that old chunks are never read."""

_DOMAIN: Final = b"nixl-offload namespace 2\0"
_RANK_DOMAIN: Final = b"nixl-offload rank 1\0"
_SHORT_NAME_CHARS: Final = 32


SHARD_ORDER: Final = "block layer head token content 1"
"""Of the bytes of a shard that is a range of heads, outermost first, and its version: see docs/format.md."""

Setting = bool | int | float | str | None
"""A leaf of a configuration. Types count: true, 1 and "1" are three values."""


@dataclass(frozen=True, slots=True)
class GroupFields:
    """One KV-cache group of the model."""

    group_id: int
    tokens_per_block: int
    slot_bytes: tuple[int, ...]
    """By rank: bytes of its shard of a chunk, header page and padding included; 0: it has no layer of the group. Of
    ``ShardedFields`` by shard; 0: the chunks of the group have none of that number.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFields:
    """What every fingerprint covers. Which rank a shard belongs to is not part of it: see ``Namespace.rank_digest``."""

    tenant: str
    engine: str
    """Serving engine and its version, such as ``vllm 0.33.0``: it decides what lies where inside a block."""
    platform: str
    """Kind of device, as far as kernels lay values out differently, such as ``cuda:9.0``."""
    attention_backend: str | None
    """Names of the backends in use, chosen by the operator or not, joined by "+"; None when the ranks named none."""
    model: str
    """Name as served; of a local model the last part of its path."""
    revision: str | None
    """The commit of a model from the Hub, where it is known, else what was asked for."""
    weights: str | None
    """Digest of a local model's files; None where the name and the revision tell (``identity.weights``)."""
    dtype: str
    """Of the KV cache, ``fp8_e4m3`` and the like included."""
    tokens_per_block: int
    """Of the group with the largest blocks."""
    blocks_per_chunk: int
    tokens_per_hash: int
    hash_algorithm: str
    """Of vLLM's block hashes."""
    hash_seed: str | None
    """PYTHONHASHSEED, which seeds block hashes where it is set."""
    groups: tuple[GroupFields, ...]
    """In any order; group ids are unique."""
    settings: Mapping[str, Setting]
    """Everything else in the engine's configuration that is not known to be harmless, by its path."""
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFields(CommonFields):
    """The fingerprint of chunks of which each rank has one shard, in its own order of bytes."""

    kv_layout: str
    """Order of layers, blocks, heads, tokens and channels in memory, such as ``LBHNC``."""
    ranks: tuple[str, ...]
    """By rank: a digest of what it has allocated, layer by layer."""
    tp: int
    pp: int
    pcp: int
    dcp: int
    world_size: int

    @property
    def holders(self) -> int:
        """How many shards a chunk has, at most."""
        return self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedFields(CommonFields):
    """The fingerprint of chunks that are cut into shards (``chunk.shards``), which look alike whatever the parallel
    sizes. Where something is said of a rank, read: of the shard with that number.
    """

    ranks: tuple[str, ...]
    """Digests of the layers of the whole model, as each rank knows them; one for all where they agree."""
    shards: int
    """How many numbers of shards there are."""
    layers: tuple[int, ...] = ONE_RANGE.begins
    """The first layer of each range of layers; left out of the plain data where there is one range."""
    shard_order: str = SHARD_ORDER

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
    """How the ranks of this engine hold shards, where chunks are cut; None: nobody asks. Not part of the fingerprint.
    """
    slot_replicas: Mapping[int, int] = field(default_factory=dict, compare=False)
    """By slot size: how many ranks in a row of this engine have one copy of a chunk in a slab; none: each has its own.
    Not part of the fingerprint.
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
        """Return how large the shard of ``rank`` is in each chunk of a group; 0: it has none.

        Raises LookupError for a group or rank that there is not.
        """
        return self._slot_bytes[group_id][rank]

    def slot_bytes(self, group_id: int) -> int:
        """Return the slot that a chunk of the group takes in a slab or in memory, where slots are equal on all ranks:
        the largest shard, or all that a rank holds. Raises LookupError (no such group).
        """
        return self._slots[group_id]

    def chunk_bytes(self, group_id: int) -> int:
        """Return what a chunk of the group takes, each shard stored once. Raises LookupError (no such group)."""
        return sum(self._slot_bytes[group_id])

    def holders(self, group_id: int) -> tuple[int, ...]:
        """Return the ranks that hold a shard of the group's chunks, in order. Raises LookupError (no such group)."""
        return self._holders[group_id]

    @property
    def stages(self) -> list[int]:
        """How many ranges of layers each pipeline stage of this engine holds; empty where chunks are not cut, or where
        there is one stage.
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


_TYPES: Final[dict[str, type]] = {
    "str": str,
    "int": int,
    "tuple[GroupFields, ...]": tuple,
    "tuple[int, ...]": tuple,
    "tuple[str, ...]": tuple,
    "Mapping[str, Setting]": dict,
}


def _check(value: NamespaceFields | ShardedFields) -> None:
    _check_types(value, "namespace")
    if not value.groups:
        raise NamespaceError("namespace.groups is empty; a model has at least one KV-cache group")
    for position, group in enumerate(value.groups):
        where = f"namespace.groups[{position}]"
        if type(group) is not GroupFields:
            raise NamespaceError(f"{where} must be GroupFields, not {type(group).__name__}")
        _check_types(group, where)
        sizes = group.slot_bytes
        if len(sizes) != value.holders:
            raise NamespaceError(f"{where}.slot_bytes has {len(sizes)} sizes for {value.holders} ranks")
        if any(type(size) is not int or size < 0 for size in sizes):
            raise NamespaceError(f"{where}.slot_bytes must be numbers of bytes, not {sizes!r}")
        if not any(sizes):
            raise NamespaceError(f"{where}.slot_bytes is 0 on every rank: nobody has a layer of this group")
    ids = [group.group_id for group in value.groups]
    if len(set(ids)) != len(ids):
        raise NamespaceError(f"namespace.groups repeats a group id: {ids}")
    if isinstance(value, ShardedFields):
        if not value.ranks:
            raise NamespaceError("namespace.ranks has no digest of the model's layers")
        begins = value.layers
        if any(type(begin) is not int for begin in begins) or begins != tuple(sorted({0, *begins})):
            raise NamespaceError(f"namespace.layers must be the first layers of ranges, from 0 on, not {begins!r}")
        if value.shards % len(begins):
            raise NamespaceError(f"namespace.shards is {value.shards}, no multiple of {len(begins)} ranges of layers")
    elif len(value.ranks) != value.world_size:
        raise NamespaceError(f"namespace.ranks has {len(value.ranks)} digests for {value.world_size} ranks")
    for position, rank in enumerate(value.ranks):
        if type(rank) is not str or not rank:
            raise NamespaceError(f"namespace.ranks[{position}] must be a digest, not {rank!r}")
    for path, setting in value.settings.items():
        if type(path) is not str or not path:
            raise NamespaceError(f"namespace.settings: {path!r} is not the path of a setting")
        if setting is not None and type(setting) not in (bool, int, float, str):
            raise NamespaceError(f"namespace.settings.{path} must be a plain value, not {type(setting).__name__}")
        if isinstance(setting, float) and not math.isfinite(setting):
            raise NamespaceError(f"namespace.settings.{path} is {setting}, which JSON has no number for")


def _check_types(value: NamespaceFields | ShardedFields | GroupFields, where: str) -> None:
    """Check types and ranges by the annotations: dataclasses check neither, and True, 1 and "1" must not mix."""
    for item in fields(value):
        found = getattr(value, item.name)
        annotation = str(item.type)
        if found is None and annotation.endswith(" | None"):
            continue
        if type(found) is not _TYPES[annotation.removesuffix(" | None")]:
            raise NamespaceError(f"{where}.{item.name} must be {annotation}, not {type(found).__name__}")
        if found == "":
            raise NamespaceError(f"{where}.{item.name} is empty")
        least = 0 if item.name == "group_id" else 1
        if isinstance(found, int) and found < least:
            raise NamespaceError(f"{where}.{item.name} is {found}; allowed: {least} or more")
