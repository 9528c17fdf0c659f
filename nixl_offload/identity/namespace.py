"""The fingerprint of all that makes stored bytes interchangeable. Engines that differ in any field share no chunks.

Threading: immutable values and pure functions, safe anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError

from nixl_offload.chunk.shards import ONE_RANGE, ShardPlan, uncut_plan
from nixl_offload.errors import NamespaceError

FORMAT_VERSION: Final = 1
"""Version of the bytes of a stored chunk. A new one makes a new namespace, so that old chunks are never read."""

_DOMAIN: Final = b"nixl-offload namespace 2\0"
_SHARD_DOMAIN: Final = b"nixl-offload shard 1\0"

SHARD_ORDER: Final = "block layer head token content 1"
"""Order of the bytes in a shard of a chunk that is cut, outermost first, and its version: see docs/format.md."""

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
    """By shard number: bytes of the shard, header page and padding included; 0: the group's chunks have no such shard.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFields:
    """The fields of a fingerprint. The number of a shard is not among them: see ``shard_digest``."""

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
    ranks: Annotated[tuple[_Text, ...], Field(min_length=1)]
    """If chunks are cut: digests of the layers of the whole model, as each rank knows them; a single one if they agree.
    Else by rank: a digest of what it has allocated, layer by layer.
    """
    shards: _Number
    """How many shard numbers there are."""
    layers: Annotated[tuple[int, ...], Field(min_length=1)] = ONE_RANGE.begins
    """The first layer of each range of layers; left out of the plain data if there is one range."""
    shard_order: _Text = SHARD_ORDER
    """Order of the bytes in a shard. If chunks are not cut: that of a rank's memory, such as ``LBHNC``."""
    settings: Mapping[_Text, bool | int | Annotated[float, Field(allow_inf_nan=False)] | _AnyText | None]
    """All other settings not known to be harmless, by path; among them parallel sizes, if chunks are not cut."""
    format_version: _Number = FORMAT_VERSION


@dataclass(frozen=True)
class Namespace:
    """A fingerprint and what went into it. Make one with ``make_namespace``."""

    fields: NamespaceFields
    digest: bytes
    """SHA-256 of the canonical fields, 32 bytes. The same on every rank."""
    plan: ShardPlan = field(compare=False)
    """How the ranks of this engine hold shards. Not part of the fingerprint."""
    slot_replicas: Mapping[int, int] = field(default_factory=dict, compare=False)
    """As ``SlotPlaces.replicas``: by slot size, how many consecutive ranks of this engine share one copy of a chunk in
    a slab. Empty: each has its own. Not part of the fingerprint.
    """

    @cached_property
    def _slot_bytes(self) -> dict[int, tuple[int, ...]]:
        return {group.group_id: group.slot_bytes for group in self.fields.groups}

    @cached_property
    def _numbers(self) -> dict[int, tuple[int, ...]]:
        return {group: tuple(n for n, size in enumerate(of) if size) for group, of in self._slot_bytes.items()}

    @cached_property
    def _slots(self) -> dict[int, int]:
        of_groups = zip(self._slot_bytes.items(), self.held(), strict=True)
        return {group: max(sum(of[n] for n in numbers) for numbers in held) for (group, of), held in of_groups}

    @property
    def name(self) -> str:
        """See ``namespace_name``."""
        return namespace_name(self.digest)

    def shard_bytes(self, group_id: int, shard: int) -> int:
        """Return the bytes of a shard in each chunk of a group; 0: such chunks have none of that number.

        Raises LookupError (no such group or number).
        """
        return self._slot_bytes[group_id][shard]

    def slot_bytes(self, group_id: int) -> int:
        """Return the bytes of a chunk's slot in a slab or in memory, which are equal on all ranks: the most that a rank
        holds. Raises LookupError (no such group).
        """
        return self._slots[group_id]

    def chunk_bytes(self, group_id: int) -> int:
        """Return the bytes of a chunk of the group, each shard stored once. Raises LookupError (no such group)."""
        return sum(self._slot_bytes[group_id])

    def shards(self, group_id: int) -> tuple[int, ...]:
        """Return the numbers of the shards of a group's chunks, in order. Raises LookupError (no such group)."""
        return self._numbers[group_id]

    def held(self) -> list[list[list[int]]]:
        """Return by group, in the order of the fields, and by rank: the numbers of the shards that the rank holds."""
        return [
            [
                [shard for shard in self.plan.held(rank, at) if group.slot_bytes[shard]]
                for rank in range(self.plan.ranks)
            ]
            for at, group in enumerate(self.fields.groups)
        ]

    def manifest(self) -> dict[str, Any]:
        """Return digest and fields as plain data for a human to read next to the chunks; never read back as truth."""
        return {"namespace": self.digest.hex(), "fields": _plain(self.fields)}


def make_namespace(namespace_fields: NamespaceFields, plan: ShardPlan | None = None) -> Namespace:
    """Fingerprint ``namespace_fields``. ``plan``: as ``Namespace.plan``, its groups in the order of the fields'; None:
    each rank holds the shard of its number.

    Raises NamespaceError for wrong types, ranges and duplicate group ids: a wrong field would let foreign bytes in.
    """
    _check(namespace_fields)
    plan = plan or uncut_plan(namespace_fields.shards, len(namespace_fields.groups))
    return Namespace(namespace_fields, _fingerprint(_plain(namespace_fields)), plan)


def manifest_fits(manifest: object, name: str) -> bool:
    """Whether plain data, which anybody may have written, is the manifest of the namespace ``name``.

    The fingerprint is made from its fields, so nobody can pass a namespace off as another tenant's.
    """
    digest = manifest_digest(manifest)
    return digest is not None and namespace_name(digest) == name


def manifest_digest(manifest: object) -> bytes | None:
    """Return the fingerprint of the fields in ``manifest``; None: it is no manifest."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("fields"), dict):
        return None
    try:
        return _fingerprint(manifest["fields"])
    except (TypeError, ValueError, RecursionError):
        return None


def namespace_name(digest: bytes) -> str:
    """Return the short name for directories and object prefixes: the first 128 bits in hex, nothing a user typed."""
    return digest[:16].hex()


def shard_digest(digest: bytes, shard: int) -> bytes:
    """Return the 32 bytes that headers of a shard carry in the namespace with this ``digest``."""
    return hashlib.sha256(_SHARD_DOMAIN + digest + shard.to_bytes(4, "big")).digest()


def _fingerprint(plain: dict[str, Any]) -> bytes:
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(_DOMAIN + canonical.encode()).digest()


def _plain(value: NamespaceFields) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(asdict(value)))
    plain["groups"].sort(key=itemgetter("group_id"))
    if plain.get("layers") == list(ONE_RANGE.begins):
        del plain["layers"]
    return plain


_FIELDS: Final[TypeAdapter[Any]] = TypeAdapter(NamespaceFields)


def _check(value: NamespaceFields) -> None:
    try:
        _FIELDS.validate_python(value)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"])
        raise NamespaceError(f"namespace.{where}: {found['msg']}, not {found['input']!r}") from error
    for position, group in enumerate(value.groups):
        where = f"namespace.groups[{position}].slot_bytes"
        if len(group.slot_bytes) != value.shards:
            raise NamespaceError(f"{where} has {len(group.slot_bytes)} sizes for {value.shards} shards")
        if not any(group.slot_bytes):
            raise NamespaceError(f"{where} is 0 for every shard: no rank has a layer of this group")
    ids = [group.group_id for group in value.groups]
    if len(set(ids)) != len(ids):
        raise NamespaceError(f"namespace.groups repeats a group id: {ids}")
    if value.layers != tuple(sorted({0, *value.layers})):
        raise NamespaceError(f"namespace.layers must be first layers of ranges, from 0 on, not {value.layers!r}")
    if value.shards % len(value.layers):
        raise NamespaceError(f"namespace.shards is {value.shards}, no multiple of {len(value.layers)} ranges")
