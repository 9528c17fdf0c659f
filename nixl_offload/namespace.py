"""The fingerprint of everything that makes stored bytes interchangeable. Two engines that differ in any of it never
see each other's chunks.

Threading: immutable values and pure functions, safe anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from nixl_offload.errors import NamespaceError

FORMAT_VERSION: Final = 1
LOCAL_WEIGHTS: Final = "(weights in a local directory)"
"""Stands for the model's name where it would be a path: ``model_digest`` tells such models apart."""
"""Version of the bytes of a stored chunk. A new one makes a new namespace, so that old chunks are never read."""

_DOMAIN: Final = b"nixl-offload namespace 1\0"
_RANK_DOMAIN: Final = b"nixl-offload rank 1\0"
_SHORT_NAME_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class GroupFields:
    """One KV-cache group of the model."""

    group_id: int
    layer_count: int
    layers_digest: str
    """From ``digest_names`` over the group's layer names, in order."""
    tokens_per_block: int
    slot_bytes: int
    """Bytes of a stored chunk of the group on one rank, header page and padding included."""
    spec: str
    """vLLM's description of the group's cache: kind of attention, heads, head size, page bytes, window, dtype."""


@dataclass(frozen=True, slots=True)
class NamespaceFields:
    """What the fingerprint covers. The rank is not part of it: see ``Namespace.rank_digest``."""

    tenant: str
    engine: str
    """Serving engine and its minor version, such as ``vllm 0.33``: it decides what lies where inside a block."""
    platform: str
    """Kind of device, as far as kernels lay values out differently, such as ``cuda:9.0``."""
    attention_backend: str | None
    """Names of the backends in use, chosen by the operator or not, joined by "+"; None when the ranks named none."""
    model: str
    """Name or path as served."""
    revision: str | None
    model_digest: str
    """Identity of the model's config and weights, as far as it can be known without reading them all."""
    dtype: str
    """Of the KV cache, ``fp8_e4m3`` and the like included."""
    kv_layout: str
    """Order of layers, blocks, heads, tokens and channels in memory, such as ``LBHNC``."""
    tokens_per_block: int
    """Of the group with the largest blocks."""
    blocks_per_chunk: int
    tokens_per_hash: int
    hash_algorithm: str
    """Of vLLM's block hashes."""
    hash_seed: str | None
    """PYTHONHASHSEED where the algorithm depends on it."""
    groups: tuple[GroupFields, ...]
    """In any order; group ids are unique."""
    tp: int
    pp: int
    pcp: int
    dcp: int
    world_size: int
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Namespace:
    """A fingerprint and what went into it. Make one with ``make_namespace``."""

    fields: NamespaceFields
    digest: bytes
    """SHA-256 of the canonical fields, 32 bytes. The same on every rank."""

    @property
    def name(self) -> str:
        """Short name for directories and object prefixes: the first 128 bits in hex, nothing a user typed."""
        return self.digest.hex()[:_SHORT_NAME_CHARS]

    def rank_digest(self, rank: int) -> bytes:
        """Return the 32 bytes that the shard headers of ``rank`` carry. Raises NamespaceError (impossible rank)."""
        if not 0 <= rank < self.fields.world_size:
            raise NamespaceError(f"rank {rank} is outside the world of {self.fields.world_size} ranks")
        return rank_digest(self.digest, rank)

    def manifest(self) -> dict[str, Any]:
        """Return digest and fields as plain data for a human to read next to the chunks; never read back as truth."""
        return {"namespace": self.digest.hex(), "fields": _plain(self.fields)}


def make_namespace(namespace_fields: NamespaceFields) -> Namespace:
    """Fingerprint ``namespace_fields``.

    Raises NamespaceError for a value of the wrong type or out of range, and for duplicate group ids: a field that is
    quietly wrong would let foreign bytes in.
    """
    _check(namespace_fields, "namespace")
    if not namespace_fields.groups:
        raise NamespaceError("namespace.groups is empty; a model has at least one KV-cache group")
    for position, group in enumerate(namespace_fields.groups):
        if type(group) is not GroupFields:
            raise NamespaceError(f"namespace.groups[{position}] must be GroupFields, not {type(group).__name__}")
        _check(group, f"namespace.groups[{position}]")
    ids = [group.group_id for group in namespace_fields.groups]
    if len(set(ids)) != len(ids):
        raise NamespaceError(f"namespace.groups repeats a group id: {ids}")
    return Namespace(namespace_fields, _fingerprint(_plain(namespace_fields)))


def manifest_fits(manifest: object, name: str) -> bool:
    """Whether plain data, read from where anybody may have written it, is the manifest of the namespace ``name``.

    Its fields make the fingerprint, so that nobody can pass a namespace off as another tenant's.
    """
    digest = manifest_digest(manifest)
    return digest is not None and digest.hex()[:_SHORT_NAME_CHARS] == name


def manifest_digest(manifest: object) -> bytes | None:
    """Return the fingerprint that the fields of plain data make, which may be anything; None where they make none."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("fields"), dict):
        return None
    try:
        return _fingerprint(manifest["fields"])
    except (TypeError, ValueError, RecursionError):
        return None


def rank_digest(digest: bytes, rank: int) -> bytes:
    """Return the 32 bytes that the headers of ``rank`` carry in the namespace with this ``digest``."""
    return hashlib.sha256(_RANK_DOMAIN + digest + rank.to_bytes(4, "big")).digest()


def digest_names(names: Sequence[str]) -> str:
    """Return a hex digest of ``names`` in their order, unambiguous whatever characters they hold."""
    return hashlib.sha256(json.dumps(list(names), separators=(",", ":")).encode("ascii")).hexdigest()


def _fingerprint(plain: dict[str, Any]) -> bytes:
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(_DOMAIN + canonical.encode("ascii")).digest()


def _plain(value: NamespaceFields) -> dict[str, Any]:
    plain: dict[str, Any] = {field.name: getattr(value, field.name) for field in fields(value)}
    groups = sorted(value.groups, key=lambda group: group.group_id)
    plain["groups"] = [{field.name: getattr(group, field.name) for field in fields(group)} for group in groups]
    return plain


_TYPES: Final[dict[str, type]] = {"str": str, "int": int, "tuple[GroupFields, ...]": tuple}


def _check(value: NamespaceFields | GroupFields, where: str) -> None:
    """Types and ranges by the annotations: dataclasses check neither, and True, 1 and "1" must not mix."""
    for field in fields(value):
        item = getattr(value, field.name)
        annotation = str(field.type)
        if item is None and annotation.endswith(" | None"):
            continue
        if type(item) is not _TYPES[annotation.removesuffix(" | None")]:
            raise NamespaceError(f"{where}.{field.name} must be {annotation}, not {type(item).__name__}")
        if item == "":
            raise NamespaceError(f"{where}.{field.name} is empty")
        least = 0 if field.name == "group_id" else 1
        if isinstance(item, int) and item < least:
            raise NamespaceError(f"{where}.{field.name} is {item}; allowed: {least} or more")
