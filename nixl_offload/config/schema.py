"""The schema of the config file: every field, its default, its cost; and the table of what this release builds.

Threading: frozen models, safe anywhere. Nothing here reads a file: see ``load``.
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from nixl_offload.units import format_duration, format_size, parse_duration, parse_size

TIER_ORDER: Final = ("memory", "file", "s3")
"""Nearest the GPU first. A config has any non-empty subset in this order, each kind at most once."""

AVAILABLE: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "file": {"layout": ("slab",), "mover": ("auto", "gds_mt", "gds", "posix")},
}
"""Tier kinds that this release builds, and per kind the values built of fields that know more. The only such table."""

OWNED_EXTRA_KEYS: Final = ("config", "spec_name", "spec_module_path", "block_size", "blocks_per_chunk")
"""Keys of vLLM's extra config that this connector sets itself; refused under ``vllm:``."""

SizeBytes = Annotated[int, BeforeValidator(parse_size)]
DurationSeconds = Annotated[float, BeforeValidator(parse_duration)]
PolicyName = Literal["lru", "s3fifo"]

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class _Model(BaseModel):
    """Strict (no coercion), closed (unknown fields are errors), frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class LookupOptions(_Model):
    """How a tier that other servers write to as well is asked what it holds."""

    timeout_s: DurationSeconds = Field(default=1.0, alias="timeout", gt=0)
    """The longest that a request is held back while somebody looks; then what is not known counts as absent."""
    present_for_s: DurationSeconds = Field(default=600.0, alias="present_for", gt=0)
    """A chunk that was seen counts as present for so long; one that was deleted meanwhile costs a failed load."""
    absent_for_s: DurationSeconds = Field(default=10.0, alias="absent_for", gt=0)
    """A chunk that was not there is not looked for again for so long."""
    max_keys: int = Field(default=1_000_000, ge=1000)
    """Chunks remembered as present; some 400 bytes of host memory each."""

    def to_dict(self) -> dict[str, Any]:
        """Return the options as the YAML would say them."""
        return {
            "timeout": format_duration(self.timeout_s),
            "present_for": format_duration(self.present_for_s),
            "absent_for": format_duration(self.absent_for_s),
            "max_keys": self.max_keys,
        }


class MemoryTier(_Model):
    """Chunks in host memory."""

    kind: Literal["memory"]
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    """Host memory for payload, over all ranks of this machine."""
    policy: PolicyName = "lru"

    def to_dict(self) -> dict[str, Any]:
        """Return the tier as the YAML would say it."""
        return {"kind": self.kind, "capacity": format_size(self.capacity_bytes), "policy": self.policy}


class FileTier(_Model):
    """Chunks in files under one directory."""

    kind: Literal["file"]
    path: str
    """Absolute directory. Created with mode 0700 when missing."""
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    """Bytes that the directory may hold, over all ranks; never exceeded. Slabs grow up to it and do not shrink."""
    layout: Literal["slab", "tree"] = "slab"
    """slab: one preallocated file per rank, exclusive to one engine. tree: a file per chunk, for shared filesystems."""
    mover: Literal["auto", "gds_mt", "gds", "posix", "kvikio"] = "auto"
    """auto takes the best that this machine can really run and says which at start."""
    posix_api: Literal["auto", "io_uring", "aio"] = "auto"
    """Kernel interface of the posix mover."""
    direct_io: bool = True
    """Bypass the page cache. Off costs host memory and copies. A filesystem without O_DIRECT turns it off."""
    policy: PolicyName = "lru"
    """lru, or s3fifo, which a scan of one-time prompts cannot flush. Slab only: ``nixl-offload gc`` cleans trees."""
    lookup: LookupOptions = LookupOptions()
    """Tree only."""
    warm_start: bool = False
    """Tree only: list the directory at start, in the background, so that first requests need not look."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not posixpath.isabs(path):
            raise ValueError("is not an absolute path; allowed: a directory such as /mnt/nvme/kv")
        if "\0" in path:
            raise ValueError("contains a NUL byte")
        return posixpath.normpath(path)

    def to_dict(self) -> dict[str, Any]:
        """Return the tier as the YAML would say it."""
        return {
            "kind": self.kind,
            "path": self.path,
            "capacity": format_size(self.capacity_bytes),
            "layout": self.layout,
            "mover": self.mover,
            "posix_api": self.posix_api,
            "direct_io": self.direct_io,
            "policy": self.policy,
            "lookup": self.lookup.to_dict(),
            "warm_start": self.warm_start,
        }


class S3Tier(_Model):
    """Chunks as objects in a bucket. Credentials come from the AWS chain, never from this file."""

    kind: Literal["s3"]
    bucket: str
    prefix: str = ""
    """Comes before every object name."""
    endpoint: str | None = None
    """URL of an S3-compatible server; None means AWS."""
    region: str | None = None
    """None leaves it to the AWS chain."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """auto: path style where an endpoint is given, else virtual."""
    mover: Literal["auto", "obj", "obstore", "boto3"] = "auto"
    """obj: NIXL's object backend. obstore, boto3: our own threads over that client. auto takes the first of obj,
    obstore, boto3 that can really write and read here, and says which at start."""
    ttl_s: DurationSeconds | None = Field(default=None, alias="ttl", gt=0)
    """Objects older than this count as absent; None keeps them. ``nixl-offload bucket init`` makes it a lifecycle rule;
    chunks in use are refreshed before they expire."""
    capacity_bytes: SizeBytes | None = Field(default=None, alias="capacity", ge=8192)
    """What ``nixl-offload gc`` brings the prefix down to. Servers do not enforce it."""
    ca_bundle: str | None = None
    """File with the certificates to trust; None leaves it to the system."""
    checksums: Literal["when_required", "when_supported"] = "when_required"
    """The AWS SDK's request and response checksums. when_supported sends trailers that some servers store as data."""
    connections: int = Field(default=16, ge=1, le=1024)
    """Requests in flight, per rank."""
    request_timeout_s: DurationSeconds = Field(default=10.0, alias="request_timeout", gt=0)
    """One attempt of one request; there are up to three."""
    crt_min_size_bytes: SizeBytes | None = Field(default=None, alias="crt_min_size", ge=1)
    """Mover obj: objects from this size on go through AWS's CRT client, in parallel parts. None: never."""
    lookup: LookupOptions = LookupOptions()
    warm_start: bool = False
    """List the namespace at start, in the background, so that first requests need not look."""

    @field_validator("bucket")
    @classmethod
    def _bucket_name(cls, bucket: str) -> str:
        if not _BUCKET.fullmatch(bucket):
            raise ValueError("is not a bucket name; allowed: 3 to 63 of a-z, 0-9, '.', '-', without s3:// and slashes")
        return bucket

    @field_validator("endpoint")
    @classmethod
    def _http_url(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint)
        if "@" in endpoint:
            raise ValueError("must not carry credentials; allowed: http(s)://host[:port]")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("is not an endpoint; allowed: http(s)://host[:port]")
        return endpoint

    def to_dict(self) -> dict[str, Any]:
        """Return the tier as the YAML would say it."""
        return {
            "kind": self.kind,
            "bucket": self.bucket,
            "prefix": self.prefix,
            "endpoint": self.endpoint,
            "region": self.region,
            "addressing": self.addressing,
            "mover": self.mover,
            "ttl": None if self.ttl_s is None else format_duration(self.ttl_s),
            "capacity": None if self.capacity_bytes is None else format_size(self.capacity_bytes),
            "ca_bundle": self.ca_bundle,
            "checksums": self.checksums,
            "connections": self.connections,
            "request_timeout": format_duration(self.request_timeout_s),
            "crt_min_size": None if self.crt_min_size_bytes is None else format_size(self.crt_min_size_bytes),
            "lookup": self.lookup.to_dict(),
            "warm_start": self.warm_start,
        }


Tier = Annotated[MemoryTier | FileTier | S3Tier, Field(discriminator="kind")]


class Config(_Model):
    """The checked config. Make one with ``load_config``, ``parse_config`` or ``from_extra_config``."""

    tenant: str = "default"
    """Part of the namespace: tenants never see each other's chunks."""
    chunk_tokens: int = Field(default=256, ge=1)
    """Tokens per chunk; a multiple of vLLM's block size. Larger: fewer, faster transfers; a prompt's last, short chunk
    is never stored."""
    verify: Literal["checksum", "header"] = "checksum"
    """checksum: every byte loaded is verified. header: identity and length only; a flipped bit goes unnoticed."""
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    """What vLLM does with a request whose load failed."""
    staging_bytes: SizeBytes = Field(default=256 << 20, alias="staging", ge=1 << 20)
    """Host or device memory for packed transfers, per worker rank; a hard bound."""
    load_timeout_s: DurationSeconds = Field(default=30.0, alias="load_timeout", gt=0)
    """The longest that a request waits for its load; what has not arrived by then is computed."""
    tiers: tuple[Tier, ...] = Field(min_length=1, strict=False)
    """Nearest the GPU first."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Passed through to vLLM's ``kv_connector_extra_config``."""

    @field_validator("tenant")
    @classmethod
    def _tenant_name(cls, tenant: str) -> str:
        if not _TENANT.fullmatch(tenant):
            raise ValueError("is not a tenant name; allowed: 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-'")
        return tenant

    def to_dict(self) -> dict[str, Any]:
        """Return the config as the YAML would say it, defaults filled in; ``parse_config`` of it gives an equal one."""
        return {
            "tenant": self.tenant,
            "chunk_tokens": self.chunk_tokens,
            "verify": self.verify,
            "on_load_failure": self.on_load_failure,
            "staging": format_size(self.staging_bytes),
            "load_timeout": format_duration(self.load_timeout_s),
            "tiers": [tier.to_dict() for tier in self.tiers],
            "vllm": dict(self.vllm),
        }


TIER_MODELS: Final[dict[str, type[_Model]]] = {"memory": MemoryTier, "file": FileTier, "s3": S3Tier}
