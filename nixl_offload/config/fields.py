"""Kinds of values that fields of the config hold: how each is read, checked and normalised.

Each type also carries what JSON Schema can say of it, for ``json_schema``: as near to the check as that language comes.

Threading: pure functions, safe anywhere. A check raises ValueError that goes on after the value: "is not a size; ...".
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from nixl_offload.units import format_duration, format_size, parse_duration, parse_size

LONGEST_S: Final = 36_500 * 86_400.0
"""A hundred years: more is a slip, and overflows clocks."""

_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_ENDPOINT_HOST: Final = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")
_MOST_SHARDS: Final = 256
_PREFIX_PART: Final = re.compile(r"[A-Za-z0-9._=-]+")
_PREFIX_CHARS: Final = 512
"""A store adds up to 200 to it, and S3 ends at 1024."""
_PERCENT: Final = re.compile(r"([1-9][0-9]?)%")
_REGION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _absolute_path(path: str) -> str:
    if not posixpath.isabs(path):
        raise ValueError("is not an absolute path; allowed: a directory such as /mnt/nvme/kv")
    if "\0" in path:
        raise ValueError("contains a NUL byte")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError("is not UTF-8") from None
    return posixpath.normpath(path)


def _absolute_file(path: str) -> str:
    if not posixpath.isabs(path) or path.endswith("/"):
        raise ValueError("is not the absolute path of a file; allowed: such as /etc/ssl/certs/our-ca.pem")
    if not path.isprintable():
        raise ValueError("contains control characters")
    return posixpath.normpath(path)


def _bucket(bucket: str) -> str:
    if not _BUCKET.fullmatch(bucket):
        raise ValueError("is not a bucket name; allowed: 3 to 63 of a-z, 0-9, '.', '-', without s3:// and slashes")
    return bucket


def _prefix(prefix: str) -> str:
    prefix = prefix.strip("/")
    parts = prefix.split("/") if prefix else []
    if len(prefix) > _PREFIX_CHARS or not all(_PREFIX_PART.fullmatch(part) for part in parts) or {".", ".."} & {*parts}:
        raise ValueError(
            "is not a prefix; allowed: names of A-Z, a-z, 0-9, '.', '_', '-', '=' with single slashes between them, "
            f"at most {_PREFIX_CHARS} characters, no '.' or '..'"
        )
    return prefix


def _endpoint(endpoint: str) -> str:
    """Return scheme, host and port, without a slash at the end."""
    if "@" in endpoint:
        raise ValueError("must not carry credentials; allowed: http(s)://host[:port]")
    refusal = ValueError("is not an endpoint; allowed: http(s)://host[:port]")
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        raise refusal from None
    # Put together again, because urlsplit quietly drops tabs and newlines and forgives much else.
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    whole = f"{parts.scheme}://{host}" + ("" if port is None else f":{port}")
    if parts.scheme not in ("http", "https") or not _ENDPOINT_HOST.fullmatch(host) or port == 0:
        raise refusal
    if endpoint.lower().removesuffix("/") != whole:
        raise refusal
    return whole


def _percent(value: object) -> int:
    """Return the whole percents that text such as "25%" means."""
    match = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("is not a share; allowed: whole percents from 1% to 99%")
    return int(match[1])


def _region(region: str) -> str:
    if not _REGION.fullmatch(region):
        raise ValueError("is not a region; allowed: such as eu-central-1")
    return region


def _tenant(tenant: str) -> str:
    if not _TENANT.fullmatch(tenant):
        raise ValueError("is not a tenant name; allowed: 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-'")
    return tenant


def _head_ranges(count: object) -> object:
    if count == "distinct" or _is_count(count):
        return count
    raise ValueError(f"is no number of shards; allowed: distinct, or a number from 1 to {_MOST_SHARDS}")


def _layer_ranges(count: object) -> object:
    if _is_count(count):
        return count
    raise ValueError(f"is no number of pipeline stages; allowed: a number from 1 to {_MOST_SHARDS}")


def _is_count(count: object) -> bool:
    return type(count) is int and 1 <= count <= _MOST_SHARDS


def shard_cut(shards: object) -> object:
    """Return how chunks are cut, in full; None: not at all."""
    if shards == "per_rank":
        return None
    if shards == "distinct" or _is_count(shards):
        return {"heads": shards}
    if isinstance(shards, dict | BaseModel):
        return shards
    raise ValueError(
        f"is no way to cut a chunk; allowed: distinct, per_rank, a number from 1 to {_MOST_SHARDS}, or heads and layers"
    )


def _text(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern})


_NAMES: Final = rf"{_PREFIX_PART.pattern}(/{_PREFIX_PART.pattern})*"

_COUNT: Final = {"type": "integer", "minimum": 1, "maximum": _MOST_SHARDS}
HeadRanges = Annotated[
    Literal["distinct"] | int,
    BeforeValidator(_head_ranges),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": ["distinct"]}, _COUNT]}),
]
LayerRanges = Annotated[int, BeforeValidator(_layer_ranges), WithJsonSchema(_COUNT)]
SizeBytes = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, when_used="json"),
    Field(json_schema_extra={"format": "size"}),
]
DurationSeconds = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, when_used="json"),
    Field(gt=0, le=LONGEST_S, json_schema_extra={"format": "duration"}),
]
Percent = Annotated[
    int,
    BeforeValidator(_percent),
    PlainSerializer(lambda percent: f"{percent}%", when_used="json"),
    _text(f"^{_PERCENT.pattern}$"),
]
AbsolutePath = Annotated[str, AfterValidator(_absolute_path), _text("^/")]
AbsoluteFile = Annotated[str, AfterValidator(_absolute_file), _text("^/(.*[^/])$")]
BucketName = Annotated[str, AfterValidator(_bucket), _text(f"^{_BUCKET.pattern}$")]
ObjectPrefix = Annotated[str, AfterValidator(_prefix), _text(rf"^(?!/*(.*/)?\.{{1,2}}(/|$))/*({_NAMES})?/*$")]
EndpointUrl = Annotated[
    str, AfterValidator(_endpoint), _text(rf"^[Hh][Tt][Tt][Pp][Ss]?://({_ENDPOINT_HOST.pattern})(:[0-9]{{1,5}})?/?$")
]
RegionName = Annotated[str, AfterValidator(_region), _text(f"^{_REGION.pattern}$")]
TenantName = Annotated[str, AfterValidator(_tenant), _text(f"^{_TENANT.pattern}$")]
