"""The schema of the config file: every field, its default, its cost; and the table of what this release builds.

Threading: frozen models, safe anywhere. Nothing here reads a file: see ``load``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from nixl_offload.config.fields import (
    AbsoluteFile,
    AbsolutePath,
    BucketName,
    DurationSeconds,
    EndpointUrl,
    ObjectPrefix,
    RegionName,
    SizeBytes,
    TenantName,
)

TIER_ORDER: Final = (("memory",), ("slab", "shared_dir"), ("s3",))
"""Nearest the GPU first. A config has any non-empty subset in this order, at most one of each group."""

TIER_KINDS: Final = tuple(kind for group in TIER_ORDER for kind in group)

AVAILABLE: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "memory": {},
    "slab": {"mover": ("auto", "gds_mt", "posix", "kvikio")},
    "shared_dir": {"mover": ("auto", "gds_mt", "posix", "kvikio")},
    "s3": {"mover": ("auto", "obj", "obstore")},
}
"""Per kind of tier, the values that this release builds of fields that know more. The only such table."""

FIELDS_IN_FRONT: Final = ("promote", "unsaved", "unsaved_limit")
"""What a memory tier says of its dealings with a tier behind it; without meaning, and refused, where there is none."""

MOVERS_WITH: Final[dict[str, tuple[str, ...]]] = {
    "threads": ("auto", "gds_mt", "kvikio"),
    "bounce": ("auto", "kvikio"),
}
"""Fields of a tier in files that only these movers look at; refused with another."""

OWNED_EXTRA_KEYS: Final = ("config", "spec_name", "spec_module_path", "block_size", "blocks_per_chunk")
"""Keys of vLLM's extra config that this connector sets itself; refused under ``vllm:``."""

PolicyName = Literal["lru", "s3fifo"]


class _Model(BaseModel):
    """Strict (no coercion), closed (unknown fields are errors), frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)

    def to_dict(self) -> dict[str, Any]:
        """Return it as the YAML would say it, defaults filled in."""
        return self.model_dump(mode="json", by_alias=True)


class LookupOptions(_Model):
    """How a tier that other servers write to as well is asked what it holds."""

    timeout_s: DurationSeconds = Field(default=1.0, alias="timeout")
    """The longest that a request is held back while somebody looks; then what is not known counts as absent."""
    present_for_s: DurationSeconds = Field(default=600.0, alias="present_for")
    """A chunk that was seen counts as present for so long; one that was deleted meanwhile costs a failed load."""
    absent_for_s: DurationSeconds = Field(default=10.0, alias="absent_for")
    """A chunk that was not there is not looked for again for so long."""
    max_keys: int = Field(default=1_000_000, ge=1000)
    """Chunks remembered as present; some 400 bytes of host memory each."""


class MemoryConfig(_Model):
    """Chunks in host memory."""

    kind: Literal["memory"]
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    """Host memory for chunks, over all ranks and data-parallel engines of this machine. Taken at start, whole."""
    policy: PolicyName = "lru"
    """Who makes room: ``lru``, what was used longest ago; ``s3fifo`` besides resists scans of one-time prompts."""
    promote: bool = True
    """Keep in memory what a farther tier has served."""
    unsaved: Literal["pin", "drop"] = "pin"
    """What has not reached the next tier yet when room is needed: ``pin`` keeps it until it has, up to
    ``unsaved_limit``; ``drop`` lets it go."""
    unsaved_limit_bytes: SizeBytes | None = Field(default=None, alias="unsaved_limit", ge=8192)
    """The most that waits, pinned, for the next tier; what comes on top may be dropped. Left out: a quarter of
    ``capacity``."""


class DirectoryConfig(_Model):
    """What ``SlabConfig`` and ``SharedDirConfig`` have in common: a directory, and movers of its files."""

    kind: Literal["slab", "shared_dir"]
    path: AbsolutePath
    """Absolute directory. Created with mode 0700 when missing."""
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    mover: Literal["auto", "gds_mt", "posix", "kvikio"] = "auto"
    """``auto`` compares those that really run here, takes the fastest, and says which and why at start. ``gds_mt``:
    GPUDirect Storage by NIXL. ``kvikio``: by KvikIO. ``posix``: through host memory."""
    posix_api: Literal["auto", "io_uring", "aio"] = "auto"
    """Kernel interface of mover ``posix``."""
    threads: int = Field(default=8, ge=1, le=256)
    """Movers ``gds_mt`` and ``kvikio``: reads and writes under way at once, per rank. More help many small pieces and
    network filesystems; each is a thread."""
    bounce_bytes: SizeBytes = Field(default=16 << 20, alias="bounce", ge=1 << 16)
    """Mover ``kvikio``: what one of its threads moves at a time. Where it cannot use cuFile, each thread holds as much
    page-locked host memory, which no other limit counts."""
    direct_io: bool = True
    """Bypass the page cache. Off costs host memory and copies. A filesystem without O_DIRECT turns it off."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as the YAML would say it, without the options that its mover does not look at."""
        said = super().to_dict()
        for field, movers in MOVERS_WITH.items():
            if self.mover not in movers:
                del said[field]
        return said


class SlabConfig(DirectoryConfig):
    """Chunks in one preallocated file per rank, for a local drive; exclusive to one engine."""

    kind: Literal["slab"]
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    """Bytes that the directory may hold, over all ranks; never exceeded. Slabs grow up to it and do not shrink."""
    policy: PolicyName = "lru"
    """Who makes room, as in memory."""


class SharedDirConfig(DirectoryConfig):
    """Chunks in a file per shard, for a filesystem that many servers share."""

    kind: Literal["shared_dir"]
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    """What ``nixl-offload gc`` brings the directory down to; servers do not enforce it, so run gc by a timer. It
    deletes the oldest first."""
    lookup: LookupOptions = LookupOptions()
    """How the directory is asked what it holds."""
    warm_start: bool = False
    """List the directory at start, in the background, so that first requests need not look."""


class S3Config(_Model):
    """Chunks as objects in a bucket. Credentials come from the AWS chain, never from this file."""

    kind: Literal["s3"]
    bucket: BucketName
    """``nixl-offload bucket init`` makes it, and its rule for the ttl."""
    prefix: ObjectPrefix = ""
    """Comes before every object name, with a slash behind it; slashes at its ends are dropped. Empty: the whole bucket
    is this tier's."""
    endpoint: EndpointUrl | None = None
    """``http(s)://host[:port]`` of an S3-compatible server. Left out: AWS."""
    region: RegionName | None = None
    """Left out: as the AWS chain says."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """``auto``: path style where an endpoint is given, else virtual."""
    mover: Literal["auto", "obj", "obstore"] = "auto"
    """``obj``: NIXL's object backend. ``obstore``: our own threads over that client. ``auto`` takes the first of these
    that can really write and read here, and says which at start."""
    ttl_s: DurationSeconds | None = Field(default=None, alias="ttl")
    """Objects older than this count as absent. Left out: none do. ``nixl-offload bucket init`` makes it a lifecycle
    rule, which knows whole days only, so that the bucket keeps objects up to a day longer; chunks in use are refreshed
    before they expire."""
    capacity_bytes: SizeBytes | None = Field(default=None, alias="capacity", ge=8192)
    """What ``nixl-offload gc`` brings the prefix down to; servers do not enforce it, so run gc by a timer. Left out:
    gc must be told."""
    ca_bundle: AbsoluteFile | None = None
    """File with the certificates to trust, for https. Left out: those of the system."""
    checksums: Literal["when_required", "when_supported"] = "when_required"
    """The AWS SDK's request and response checksums. ``when_supported`` sends trailers that some servers store as
    data."""
    connections: int = Field(default=16, ge=1, le=1024)
    """Requests in flight, per rank."""
    request_timeout_s: DurationSeconds = Field(default=10.0, alias="request_timeout")
    """One attempt of one request; there are up to three."""
    crt_min_size_bytes: SizeBytes | None = Field(default=None, alias="crt_min_size", ge=1)
    """Mover ``obj``: objects from this size on go through AWS's CRT client, in parallel parts. Left out: none do."""
    crt_throughput_gbps: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What the CRT client aims at, in gigabits per second; it opens connections accordingly. Left out: its own
    default.     Only with ``crt_min_size``."""
    lookup: LookupOptions = LookupOptions()
    """How the bucket is asked what it holds."""
    warm_start: bool = False
    """List the namespace at start, in the background, so that first requests need not look."""


TierConfig = Annotated[MemoryConfig | SlabConfig | SharedDirConfig | S3Config, Field(discriminator="kind")]


class Config(_Model):
    """The checked config. Make one with ``load_config``, ``parse_config`` or ``from_extra_config``."""

    tenant: TenantName = "default"
    """Part of the namespace: tenants never see each other's chunks."""
    chunk_tokens: int = Field(default=256, ge=1)
    """Tokens per stored chunk; a multiple of vLLM's block size. Larger: fewer, faster transfers; a prompt's last, short
    chunk is never stored."""
    verify: Literal["checksum", "header"] = "checksum"
    """``checksum``: every byte loaded is verified. ``header``: identity and length only: faster, and blind to a flipped
    bit and to a store torn by a crash."""
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    """What vLLM does with a request whose load failed: compute what is missing, or fail the request."""
    staging_bytes: SizeBytes = Field(default=256 << 20, alias="staging", ge=1 << 20)
    """Host or device memory for packed transfers, per worker rank; a hard bound."""
    load_timeout_s: DurationSeconds = Field(default=30.0, alias="load_timeout")
    """The longest that a request waits for its load; what has not arrived by then is computed."""
    drain_timeout_s: DurationSeconds = Field(default=3.0, alias="drain_timeout")
    """How long an engine that shuts down goes on writing what is on its way to a tier. Needs ``vllm serve
    --shutdown-timeout``, some seconds more than this: vLLM's default, 0, kills the engine as soon as it is to stop."""
    store_after: int = Field(default=1, ge=1, le=255)
    """Store a chunk when it is computed for the N-th time. 1: at once. 2 or more keeps one-time prompts out."""
    block_outermost: bool = True
    """Ask vLLM for a KV cache in which all layers of a block lie side by side (BLHNC): a block is one piece then, and
    can go to a drive without a copy. On CUDA, where the attention backend takes it. ``false``: never ask."""
    slow_hits: Literal["skip", "take"] = "skip"
    """A hit that would take longer to load than to compute, by what this server has measured: ``skip`` computes it,
    ``take`` loads it all the same."""
    serve_without_prefix_caching: bool = False
    """Store and load although prefix caching is off in vLLM. Set it only if you turned prefix caching off yourself.
    vLLM does so where cached KV must not be reused (MLA on a CPU, non-causal attention): answers would be wrong."""
    tiers: tuple[TierConfig, ...] = Field(min_length=1, strict=False)
    """One or more, nearest the GPU first: ``memory``, then ``slab`` or ``shared_dir``, then ``s3``, each at most
    once."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Passed through to vLLM's ``kv_connector_extra_config``, such as ``offload_prompt_only: false``."""

    def to_dict(self) -> dict[str, Any]:
        """Return the config as the YAML would say it, defaults filled in; ``parse_config`` of it gives an equal one."""
        tiers = [tier.to_dict() for tier in self.tiers]
        if len(tiers) == 1:
            for field in FIELDS_IN_FRONT:
                tiers[0].pop(field, None)
        return {**super().to_dict(), "tiers": tiers, "vllm": dict(self.vllm)}


TIER_MODELS: Final[dict[str, type[_Model]]] = {
    "memory": MemoryConfig,
    "slab": SlabConfig,
    "shared_dir": SharedDirConfig,
    "s3": S3Config,
}


def literals(model: type[BaseModel], name: str) -> tuple[str, ...]:
    """Return the words that a field may say; empty for a field of another kind."""
    field = model.model_fields.get(name)
    return tuple(str(choice) for choice in getattr(field.annotation, "__args__", ())) if field else ()


def nested_model(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the model of a field that is a mapping of its own, such as ``lookup``; None for another field."""
    field = model.model_fields.get(name)
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
