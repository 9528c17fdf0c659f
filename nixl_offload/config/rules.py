"""What only a look at the whole file can refuse: credentials, the order of tiers, options that would be
ignored.

Threading: pure functions over the data as the YAML gave it, whatever that is. Values of fields that look like
credentials are never repeated.
"""

from __future__ import annotations

import difflib
import itertools
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from nixl_offload.config.document import Path
from nixl_offload.config.schema import (
    FIELDS_IN_FRONT,
    MOVERS_WITH,
    OWNED_EXTRA_KEYS,
    SHARED_KINDS,
    TIER_KINDS,
    VLLM_KEYS,
    DirectoryConfig,
    literals,
)
from nixl_offload.units import parse_size

_CREDENTIAL: Final = re.compile(
    r"(access|secret|api|private|account).?key|secret|passw|credential|(session|auth|security|bearer).?token|^token$"
    r"|^user(name)?$",
    re.IGNORECASE,
)
_USERINFO: Final = re.compile(r"(?<=://)\S*@|[^\s'\"/]*@")
_MAX_SHOWN_CHARS: Final = 80


class Problem(NamedTuple):
    """One thing that is wrong."""

    path: Path
    message: str


def broken_rules(raw: Mapping[str, Any]) -> list[Problem]:
    """Return what the rules of this module say against ``raw``."""
    rules = (_credentials(raw, ()), _tier_order(raw), _directories_apart(raw), _ignored(raw), _passthrough(raw))
    return list(itertools.chain.from_iterable(rules))


def show_value(value: object) -> str:
    """Render ``value`` for an error: short, one line, without what stands before an @ (user and password of a URL)."""
    text = _USERINFO.sub("***@", repr(value))
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."


def _credentials(value: object, path: Path) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and _CREDENTIAL.search(key):
                yield Problem(
                    (*path, key),
                    "credentials are not part of this file; they come from the AWS chain "
                    "(environment, ~/.aws, the machine's role); remove the field",
                )
            else:
                yield from _credentials(item, (*path, key))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from _credentials(item, (*path, position))


def _tiers(raw: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    tiers = raw.get("tiers")
    if isinstance(tiers, list | tuple):
        yield from ((position, tier) for position, tier in enumerate(tiers) if isinstance(tier, Mapping))


def _tier_order(raw: Mapping[str, Any]) -> Iterator[Problem]:
    kinds = [(position, tier["kind"]) for position, tier in _tiers(raw) if tier.get("kind") in TIER_KINDS]
    order = f"allowed: any of {', '.join(TIER_KINDS)}, in this order (nearest the GPU first), each at most once"
    for (_, before), (position, kind) in itertools.pairwise(kinds):
        if kind in [other for at, other in kinds if at < position]:
            yield Problem(("tiers", position), f"{kind!r} is given twice; {order}")
        elif TIER_KINDS.index(kind) < TIER_KINDS.index(before):
            yield Problem(("tiers", position), f"{kind!r} comes after {before!r}; {order}")


def _directories_apart(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """A slab counts all that lies under its directory as its own, and each tier lists what is in its directory."""
    paths = [
        (position, posixpath.normpath(tier["path"]))
        for position, tier in _tiers(raw)
        if tier.get("kind") in ("slab", "shared_dir") and isinstance(tier.get("path"), str)
    ]
    for (_, before), (position, path) in itertools.pairwise(paths):
        if posixpath.isabs(before) and posixpath.isabs(path) and posixpath.commonpath([before, path]) in (before, path):
            yield Problem(
                ("tiers", position, "path"),
                f"{show_value(path)} and the directory of another tier, {show_value(before)}, are the same or one in "
                "the other; allowed: directories side by side",
            )


def _ignored(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield options that nothing would look at, so that nobody relies on them. Saying null is saying nothing."""
    if raw.get("authenticate") is not None and not any(tier.get("kind") in SHARED_KINDS for _, tier in _tiers(raw)):
        yield Problem(
            ("authenticate",),
            f"has no meaning without a tier of kind {' or '.join(SHARED_KINDS)}, where others write, too; remove it",
        )
    for position, tier in _tiers(raw):
        kind, said = tier.get("kind"), {field for field, value in tier.items() if value is not None}
        if kind == "memory":
            yield from _ignored_of_memory(position, tier, said, is_alone=len(raw["tiers"]) == 1)
        elif kind in ("slab", "shared_dir"):
            yield from _ignored_by_mover(position, tier, said)
        elif kind == "s3":
            yield from _ignored_of_s3(position, tier, said)


def _ignored_of_memory(position: int, tier: Mapping[str, Any], said: set[str], *, is_alone: bool) -> Iterator[Problem]:
    if is_alone:
        for field in FIELDS_IN_FRONT:
            if field in said:
                yield Problem(
                    ("tiers", position, field),
                    "has no meaning without a tier behind this one; remove it, or add a tier of kind slab, shared_dir"
                    " or s3",
                )
    elif "unsaved_limit" in said and tier.get("unsaved") == "drop":
        yield Problem(
            ("tiers", position, "unsaved_limit"),
            "has no meaning with unsaved: drop, which pins nothing; remove it, or say unsaved: pin",
        )
    elif "unsaved_limit" in said:
        yield from _more_than_capacity(position, tier)


def _more_than_capacity(position: int, tier: Mapping[str, Any]) -> Iterator[Problem]:
    limit, capacity = tier["unsaved_limit"], tier.get("capacity")
    try:
        too_large = parse_size(limit) > parse_size(capacity)
    except ValueError:
        return  # said of the field itself
    if too_large:
        yield Problem(
            ("tiers", position, "unsaved_limit"),
            f"{show_value(limit)} is more than the capacity; allowed: up to {capacity}, a quarter of it by default",
        )


def _ignored_by_mover(position: int, tier: Mapping[str, Any], said: set[str]) -> Iterator[Problem]:
    mover = tier.get("mover", "auto")
    for field, movers in MOVERS_WITH.items():
        if field in said and mover in literals(DirectoryConfig, "mover") and mover not in movers:
            named = " or ".join(name for name in movers if name != "auto")
            yield Problem(
                ("tiers", position, field),
                f"has no meaning with mover: {mover}; remove it, or say mover: {named} (or auto)",
            )


def _ignored_of_s3(position: int, tier: Mapping[str, Any], said: set[str]) -> Iterator[Problem]:
    endpoint = tier.get("endpoint")
    if "ca_bundle" in said and isinstance(endpoint, str) and endpoint.lower().startswith("http:"):
        yield Problem(
            ("tiers", position, "ca_bundle"),
            "has no meaning with an endpoint without TLS; remove it, or say https:// there",
        )


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a hint at the closest of the ``known`` words, to be put behind ``word``; empty where none is close."""
    close = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def _passthrough(raw: Mapping[str, Any]) -> Iterator[Problem]:
    extra = raw.get("vllm")
    if not isinstance(extra, Mapping):
        return
    for key, value in extra.items():
        path: Path = ("vllm", key)
        if key in ("block_size", "blocks_per_chunk"):
            yield Problem(path, "is set by nixl-offload; say chunk_tokens at the top of the file instead")
        elif key in OWNED_EXTRA_KEYS:
            yield Problem(path, "is set by nixl-offload itself; remove it")
        elif key not in VLLM_KEYS:
            yield Problem(
                path,
                f"unknown field{did_you_mean(key, VLLM_KEYS)}; allowed: {', '.join(VLLM_KEYS)}; what a newer vLLM "
                "knows goes into kv_connector_extra_config",
            )
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            yield Problem(path, f"{show_value(value)} cannot be handed to vLLM as JSON; quote it")
