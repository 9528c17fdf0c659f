"""Kinds of values in the config: how each is read, checked and normalised.

Threading: pure functions, safe anywhere. A check raises ValueError whose text follows the value: "is not a size; ...".
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer

from nixl_offload.units import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

LONGEST_S: Final = 36_500 * 86_400.0
"""A hundred years: more is a slip, and overflows clocks."""

_PERCENT: Final = "^[1-9][0-9]?%$"
_PART: Final = r"\.*[A-Za-z0-9_=-][A-Za-z0-9._=-]*"
"""Of a prefix: no "." and no ".."."""
_HOST: Final = r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]"
_MOST_SHARDS: Final = 256


def written(text: str) -> Any:
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


def shard_cut(shards: object) -> object:
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
    Field(gt=0, le=LONGEST_S),
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
