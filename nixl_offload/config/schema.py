"""The schema of the config file: the kinds of values, how each is read and normalised; then every field, its default,
its cost.

Threading: frozen models and pure functions, safe anywhere. A check of a value raises ValueError whose text follows the
value: "is not a size; ...". Nothing here reads a file.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from nixl_offload.types import Verify
from nixl_offload.units import DURATION_PATTERN, SIZE_PATTERN, format_duration, format_size, parse_duration, parse_size

_LONGEST_S: Final = 36_500 * 86_400.0
"""A hundred years: more is a slip, and overflows clocks."""

_PERCENT: Final = "^[1-9][0-9]?%$"
_PART: Final = r"\.*[A-Za-z0-9_=-][A-Za-z0-9._=-]*"
"""Of a prefix: no "." and no ".."."""
_HOST: Final = r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]"
_MOST_SHARDS: Final = 256


def _written(text: str) -> Any:
    """Return a default as the YAML writes it; the model's validation reads it."""
    return text


def _percent(value: object) -> int:
    """Return the whole percents that text such as "25%" means."""
    if not isinstance(value, str) or not re.fullmatch(_PERCENT, value):
        raise ValueError("is not a share; allowed: whole percents from 1% to 99%")
    return int(value[:-1])


def _head_ranges(count: object) -> object:
    if count == "distinct" or (type(count) is int and 1 <= count <= _MOST_SHARDS):
        return count
    raise ValueError(f"is no number of shards; allowed: distinct, or a number from 1 to {_MOST_SHARDS}")


def _shard_cut(shards: object) -> object:
    """Return how chunks are cut, in full; None: not at all."""
    if shards == "per_rank":
        return None
    if isinstance(shards, dict | BaseModel):
        return shards
    try:
        return {"heads": _head_ranges(shards)}
    except ValueError as error:
        raise ValueError(f"{error}; or per_rank, or a mapping of heads and layers") from None


SizeBytes = Annotated[
    int,
    BeforeValidator(parse_size, json_schema_input_type=int | Annotated[str, Field(pattern=SIZE_PATTERN)]),
    PlainSerializer(format_size, when_used="json"),
]
DurationSeconds = Annotated[
    float,
    BeforeValidator(parse_duration, json_schema_input_type=Annotated[str, Field(pattern=DURATION_PATTERN)]),
    PlainSerializer(format_duration, when_used="json"),
    Field(gt=0, le=_LONGEST_S),
]
Percent = Annotated[
    int,
    BeforeValidator(_percent, json_schema_input_type=Annotated[str, Field(pattern=_PERCENT)]),
    PlainSerializer(lambda percent: f"{percent}%", when_used="json"),
]
LayerRanges = Annotated[int, Field(ge=1, le=_MOST_SHARDS)]
HeadRanges = Annotated[
    Literal["distinct"] | int, BeforeValidator(_head_ranges, json_schema_input_type=Literal["distinct"] | LayerRanges)
]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$"), AfterValidator(posixpath.normpath)]
AbsoluteFile = Annotated[
    str, Field(pattern=r"^/([^\x00-\x1f\x7f]*[^/\x00-\x1f\x7f])$"), AfterValidator(posixpath.normpath)
]
BucketName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$")]
ObjectPrefix = Annotated[  # a store adds up to 200 characters, and S3 ends at 1024
    str, Field(pattern=f"^/*({_PART}(/{_PART})*)?/*$", max_length=512), AfterValidator(lambda text: text.strip("/"))
]
EndpointUrl = Annotated[
    str,
    Field(pattern=f"^[Hh][Tt][Tt][Pp][Ss]?://({_HOST})(:[1-9][0-9]{{0,4}})?/?$"),
    AfterValidator(lambda text: text.lower().removesuffix("/")),
]
RegionName = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
TenantName = RegionName

ALLOWED: Final = {
    "tenant": "1 to 64 of A-Z, a-z, 0-9, '.', '_', '-'",
    "path": "an absolute path, such as /mnt/nvme/kv",
    "ca_bundle": "the absolute path of a file, such as /etc/ssl/certs/our-ca.pem",
    "key_file": "the absolute path of a file, such as /etc/nixl-offload/keys",
    "bucket": "3 to 63 of a-z, 0-9, '.', '-', without s3:// and slashes",
    "prefix": "names of A-Z, a-z, 0-9, '.', '_', '-', '=' with single slashes between them, no '.' or '..'",
    "endpoint": "http(s)://host[:port], without credentials",
    "region": "such as eu-central-1",
}
"""What fields with a pattern allow, in words."""


def _refusal(message: str, *field: str | int) -> PydanticCustomError:
    """Return an error of the value at ``field``, below the value that is being checked."""
    return PydanticCustomError("rule", "{message}", {"message": message, "field": field})


class _Model(BaseModel):
    """Strict (no coercion), closed (unknown fields are errors), frozen."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )

    def to_dict(self) -> dict[str, Any]:
        """Return it as the YAML would say it, defaults filled in."""
        return self.model_dump(mode="json", by_alias=True)


class ShardCut(_Model):
    """A range of KV heads in a range of layers is one shard."""

    heads: HeadRanges
    """The number of ranges of KV heads. ``distinct``: one for each head, if no rank has several."""
    layers: LayerRanges | None = None
    """Split the layers as a server with this many pipeline stages would. If omitted, use the server's own stages. A
    server with a stage that begins inside one of these ranges falls back to ``per_rank``."""


def _plain_cut(cut: ShardCut | None) -> str | int | dict[str, Any]:
    """Return what the YAML says of a cut."""
    if cut is None:
        return "per_rank"
    return cut.heads if cut.layers is None else cut.to_dict()


class LookupOptions(_Model):
    """How this server asks what a tier holds that other servers write to as well."""

    timeout_s: DurationSeconds = Field(default=_written("1s"), alias="timeout")
    """How long a request waits for the answer at most. What is not known by then counts as absent."""
    present_for_s: DurationSeconds = Field(default=_written("10m"), alias="present_for")
    """How long a chunk that was found counts as present. If it is deleted meanwhile, a load fails."""
    absent_for_s: DurationSeconds = Field(default=_written("10s"), alias="absent_for")
    """How long a chunk that was not found counts as absent."""


class _Tier(_Model):
    """The fields and questions that tiers of all kinds share."""

    is_shared: ClassVar[bool] = False
    """Whether other servers store there, too."""

    @property
    def where(self) -> str:
        """For people: the directory, or the bucket and prefix."""
        return "host memory"


class MemoryConfig(_Tier):
    """Chunks in host memory. If it is not ``lazy``, give it at least twice what the GPUs' KV caches hold together: a
    smaller one keeps what they still have, and serves little.
    """

    ttl_s: ClassVar[None] = None
    kind: Literal["memory"]
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    """Host memory for the chunks of all ranks together, including the data-parallel engines of this machine.
    Allocated whole at start. If an engine spans several machines, each machine provides the share of its own ranks."""
    lazy: bool = True
    """Take a chunk when vLLM is about to evict it from the GPU, and give up first what the GPU has: memory and GPU then
    hold different chunks. Farther tiers get a chunk when it is computed, and load straight to the GPU. Without farther
    tiers, a reset of vLLM's prefix cache loses what memory lacks. ``false``, KV events, ``store_after`` or
    ``kv_consumer``: take a chunk when it is computed, and keep what farther tiers serve."""


class DirectoryConfig(_Tier):
    """What ``SlabConfig`` and ``SharedDirConfig`` have in common: a directory, and movers of its files."""

    ttl_s: ClassVar[None] = None
    kind: Literal["slab", "shared_dir"]
    path: AbsolutePath
    """Created with mode 0700 when missing."""
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    mover: Literal["auto", "gds_mt", "posix", "kvikio"] = "auto"
    """``auto`` takes the first that works here; on a GPU, the fastest by measurement. The log says which and why.
    ``gds_mt``: GPUDirect Storage by NIXL. ``kvikio``: by KvikIO. ``posix``: through host memory,
    by io_uring or, where the kernel forbids that, aio."""
    threads: int = Field(default=8, ge=1, le=256)
    """Movers ``gds_mt`` and ``kvikio``: transfers in parallel, a thread each, per rank. Raise it for small chunks and
    network filesystems. With ``kvikio`` and no cuFile each thread holds 16 MiB of page-locked host memory."""
    direct_io: bool = True
    """Bypass the page cache. ``false`` costs host memory and copies. Off anyway on filesystems without O_DIRECT."""
    keep_free_percent: Percent | None = Field(default=None, alias="keep_free")
    """Share of the filesystem that stays free, such as ``20%``. If omitted, ``10%`` on a drive of this machine on which
    other files lie, or of which a container sees only a part; ``20%`` in an emptyDir; else ``0%``."""

    @property
    def where(self) -> str:
        """Return the directory."""
        return self.path


class SlabConfig(DirectoryConfig):
    """Chunks in one preallocated file per rank, on a local drive. Belongs to one engine at a time."""

    kind: Literal["slab"]
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    """What the directory may hold, all ranks and data-parallel engines together; never exceeded. Slabs grow up to it
    and do not shrink. In an emptyDir, stay below its ``sizeLimit``, at which the kubelet evicts the pod."""


class SharedDirConfig(DirectoryConfig):
    """Chunks in a file per shard, on a filesystem that many servers share, or on a drive that several engines of one
    machine share: with ``--data-parallel-size``, or a server for each GPU.
    """

    is_shared: ClassVar[bool] = True
    kind: Literal["shared_dir"]
    capacity_bytes: SizeBytes = Field(alias="capacity", ge=8192)
    """What the directory may hold; what was not used for longest goes first. In an emptyDir, at most 90 % of its
    ``sizeLimit``, at which the kubelet evicts the pod."""
    evict: bool | None = None
    """``true``: servers keep the directory to ``capacity``, to within what they write in a few seconds. ``false``: run
    ``nixl-offload gc`` by a timer. If omitted, ``true`` on a filesystem of this machine, such as ext4 or xfs."""
    lookup: LookupOptions = LookupOptions()
    """How servers ask what the directory holds."""


class S3Config(_Tier):
    """Chunks as objects in a bucket. Credentials come from the AWS chain, never from this file."""

    is_shared: ClassVar[bool] = True
    kind: Literal["s3"]
    bucket: BucketName
    """``nixl-offload bucket init`` creates it, and its rule for ``ttl``."""
    prefix: ObjectPrefix = ""
    """Object names begin with it and a slash. Slashes at its ends are dropped. If empty, the whole bucket belongs to
    this tier."""
    endpoint: EndpointUrl | None = None
    """``http(s)://host[:port]`` of an S3-compatible server. If omitted, the AWS chain's, else AWS."""
    region: RegionName | None = None
    """If omitted, the AWS chain decides."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """``auto``: ``path`` with an ``endpoint``, else ``virtual``."""
    mover: Literal["auto", "obj", "obstore"] = "auto"
    """``obj``: NIXL's object backend. ``obstore``: that client, on our own threads. ``auto``: ``obj`` where it takes
    device memory, else ``obstore``. The log says which."""
    ttl_s: DurationSeconds | None = Field(default=None, alias="ttl")
    """Objects older than this count as absent. If omitted, none do.
    ``nixl-offload bucket init`` makes it a lifecycle rule in whole days, so the bucket keeps objects up to a day
    longer."""
    capacity_bytes: SizeBytes | None = Field(default=None, alias="capacity", ge=8192)
    """The size to which ``nixl-offload gc`` shrinks the prefix. Servers do not enforce it: run gc by a timer. If
    omitted, gc needs ``--max-size``."""
    ca_bundle: AbsoluteFile | None = None
    """File of certificates to trust for https. If omitted, the AWS chain's, else the system's."""
    connections: int = Field(default=16, ge=1, le=1024)
    """Requests in parallel, per rank."""
    request_timeout_s: DurationSeconds = Field(default=_written("10s"), alias="request_timeout")
    """For one attempt of a request; there are up to three."""
    lookup: LookupOptions = LookupOptions()
    """How servers ask what the bucket holds."""

    @model_validator(mode="after")
    def _check(self) -> S3Config:
        if self.ca_bundle is not None and (self.endpoint or "").startswith("http:"):
            raise _refusal("has no meaning with an endpoint without TLS; remove it, or say https:// there", "ca_bundle")
        return self

    @property
    def where(self) -> str:
        """Return bucket and prefix as a URL."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


SharedConfig = SharedDirConfig | S3Config
"""Tiers that other servers store in, too."""
StoredConfig = SlabConfig | SharedConfig
"""Tiers that outlive the process."""
TIER_MODELS: Final[dict[str, type[BaseModel]]] = {
    "memory": MemoryConfig,
    "slab": SlabConfig,
    "shared_dir": SharedDirConfig,
    "s3": S3Config,
}
"""By kind, nearest the GPU first. A config has any non-empty subset in this order, each at most once."""
TIER_KINDS: Final = tuple(TIER_MODELS)
TierConfig = Annotated[MemoryConfig | SlabConfig | SharedDirConfig | S3Config, Field(discriminator="kind")]


class AuthenticateOptions(_Model):
    """Each chunk in a ``shared_dir`` or ``s3`` tier carries a MAC, and servers load only chunks with a valid one.
    Someone who can write to the storage, but has no key, can only cause misses. These chunks go through host
    memory; a core checks about 5 GB per second.
    """

    key_file: AbsoluteFile
    """File of secret keys, one a line, 64 hex digits each (``openssl rand -hex 32``). The first signs, all verify. The
    file must belong to the server's user or to root, with mode 0600 or 0400; one of root's may have 0440."""


class VllmOptions(TypedDict, total=False):
    """Options of vLLM's own."""

    offload_prompt_only: bool
    self_describing_kv_events: bool
    canonical_layout: bool


VllmOptions.__pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[attr-defined]


class Config(_Model):
    """The checked config. Make one with ``load_config``, ``parse_config`` or ``from_extra_config``."""

    tenant: TenantName = "default"
    """Servers never find chunks of another tenant."""
    chunk_tokens: int = Field(default=256, ge=1)
    """Tokens per stored chunk, rounded up to whole blocks of vLLM's. 1, the default if memory is the only tier: one
    block, or as many as have 256 KiB on each rank. A model that keeps a state (Mamba, GDN) has one block. Larger
    chunks make fewer, faster transfers. The short rest of a prompt is never stored."""
    verify: Verify = "checksum"
    """``checksum``: every byte read from a drive, directory or bucket is verified, and of chunks in this process's own
    memory identity and length. ``always``: every byte of those, too; stores to and loads from memory are slower then.
    ``header``: only identity and length, except of chunks that mover ``obj`` reads, which reports no short reads: their
    bytes are verified; elsewhere flipped bits and writes torn by a crash are not noticed."""
    authenticate: AuthenticateOptions | None = None
    """Sign chunks in ``shared_dir`` and ``s3`` tiers with a secret key, and load only chunks with a valid signature. If
    omitted, anyone who can write to that storage is trusted as much as someone who can write the model's weights."""
    staging_bytes: SizeBytes = Field(default=_written("256MiB"), alias="staging", ge=1 << 20)
    """Host or GPU memory for chunks between storage and KV blocks, per rank, divided among the tiers other than memory.
    Each of these takes room for two chunks at least, even if that is more."""
    load_timeout_s: DurationSeconds = Field(default=_written("30s"), alias="load_timeout")
    """How long a request waits for its load. What has not arrived by then is computed."""
    drain_timeout_s: DurationSeconds = Field(default=_written("3s"), alias="drain_timeout")
    """How long a stopping engine goes on writing what is on its way to a tier. Needs ``vllm serve --shutdown-timeout``,
    some seconds longer: with vLLM's default, 0, the engine is killed at once."""
    store_after: int = Field(default=1, ge=1, le=255)
    """Store a chunk when it is computed for the N-th time. 2 or more keeps one-time prompts out."""
    block_outermost: bool = True
    """On CUDA, ask vLLM for a KV cache with all layers of a block side by side (BLHNC), if the attention backend takes
    it. A block is then one piece, which a drive can read and write without a copy."""
    shards: Annotated[
        ShardCut | None,
        BeforeValidator(_shard_cut, json_schema_input_type=Literal["distinct", "per_rank"] | LayerRanges | ShardCut),
        PlainSerializer(_plain_cut, when_used="json"),
    ] = Field(default=_written("distinct"))
    """How a chunk is split into shards. ``per_rank``: each rank stores its own part; only servers of the same size find
    it. ``distinct``: the same, but data that several ranks hold identically (MLA, or KV heads copied because there are
    more ranks than heads) is stored once; servers of any ``--tensor-parallel-size`` that hold it identically find it. A
    number N: N ranges of KV heads, found by every server whose tensor-parallel size divides N. With pipeline
    parallelism each stage is split separately, so only servers with the same stages share; set ``heads`` and
    ``layers`` to share between different numbers of stages. If the model or the server does not allow the setting, the
    log says why, and ``per_rank`` is used."""
    slow_hits: Literal["skip", "take"] = "skip"
    """A hit that would take longer to load than to compute, as measured by this server: ``skip`` computes it, ``take``
    loads it anyway. With ``skip``, at most four hits are loaded at a time until the speed of a tier is known; others
    wait for them, no longer than computing takes (0.5 s while that is unknown), and are computed then."""
    serve_without_prefix_caching: bool = False
    """Store and load although prefix caching is off in vLLM. Set it only if you turned it off yourself: where vLLM did
    (MLA on a CPU, non-causal attention), answers would be wrong."""
    tiers: tuple[TierConfig, ...] = Field(min_length=1, strict=False)
    """Nearest the GPU first: ``memory``, ``slab``, ``shared_dir``, ``s3``; one or more, each at most once."""
    vllm: VllmOptions = {}
    """Passed to vLLM's ``kv_connector_extra_config``: ``offload_prompt_only``, ``self_describing_kv_events``,
    ``canonical_layout``."""

    @field_validator("tiers")
    @classmethod
    def _check_tiers(cls, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        order = f"allowed: any of {', '.join(TIER_KINDS)}, in this order (nearest the GPU first), each at most once"
        for (_, before), (number, tier) in itertools.pairwise(enumerate(tiers)):
            if tier.kind in [other.kind for other in tiers[:number]]:
                raise _refusal(f"{tier.kind!r} is given twice; {order}", number)
            if TIER_KINDS.index(tier.kind) < TIER_KINDS.index(before.kind):
                raise _refusal(f"{tier.kind!r} comes after {before.kind!r}; {order}", number)
        directories = [(number, tier.path) for number, tier in enumerate(tiers) if isinstance(tier, DirectoryConfig)]
        for (_, other), (number, path) in itertools.pairwise(directories):
            # A slab counts all that lies under its directory as its own, and each tier lists what is in its directory.
            if posixpath.commonpath([other, path]) in (other, path):
                said = f"and the directory of another tier, {other!r}, are the same or one in the other"
                raise _refusal(f"{said}; allowed: directories side by side", number, "path")
        return tiers

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.authenticate is not None and not self.shared:
            said = "has no meaning without a tier of kind shared_dir or s3, where others write, too; remove it"
            raise _refusal(said, "authenticate")
        if not self.stored and "chunk_tokens" not in self.model_fields_set:
            self.__dict__["chunk_tokens"] = 1  # the model is frozen
        return self

    @property
    def memory(self) -> MemoryConfig | None:
        """The memory tier, if there is one; it is the first then."""
        return next((tier for tier in self.tiers if tier.kind == "memory"), None)

    @property
    def stores_lazily(self) -> bool:
        """Whether memory takes chunks only when vLLM is about to evict them."""
        return self.memory is not None and self.memory.lazy and self.store_after == 1

    @property
    def s3(self) -> S3Config | None:
        """The tier in a bucket, if there is one."""
        return next((tier for tier in self.tiers if tier.kind == "s3"), None)

    @property
    def shared(self) -> tuple[SharedConfig, ...]:
        """The tiers that other servers store in, too."""
        return tuple(tier for tier in self.tiers if tier.kind in ("shared_dir", "s3"))

    @property
    def stored(self) -> tuple[StoredConfig, ...]:
        """The tiers that outlive the process."""
        return tuple(tier for tier in self.tiers if tier.kind != "memory")
