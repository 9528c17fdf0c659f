"""Everything that can be wrong with a config, in sentences: path, value, what is allowed, and what was probably meant.

Threading: pure functions, safe anywhere. Values of fields that look like credentials are never repeated.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nixl_offload import __version__
from nixl_offload.config.document import Path, render_path
from nixl_offload.config.schema import AVAILABLE, OWNED_EXTRA_KEYS, TIER_MODELS, TIER_ORDER, Config
from nixl_offload.units import format_size

_CREDENTIAL: Final = re.compile(
    r"(access|secret|api|private|account).?key|secret|passw|credential|(session|auth|security|bearer).?token|^token$"
    r"|^user(name)?$",
    re.IGNORECASE,
)
_URL_USERINFO: Final = re.compile(r"(?<=://)[^/@\s]*@")
_MAX_SHOWN_CHARS: Final = 80
_RELEASE: Final = ".".join(__version__.split(".")[:2])


class Problem(NamedTuple):
    """One thing that is wrong."""

    path: Path
    message: str


def find_problems(raw: Mapping[str, Any], error: ValidationError | None) -> list[Problem]:
    """Return what is wrong with ``raw``, each path once: our own rules first, then what pydantic found."""
    problems = [*_credentials(raw, ()), *_unavailable(raw), *_tier_order(raw), *_passthrough(raw)]
    told = {problem.path for problem in problems}
    for details in error.errors() if error else ():
        if details["type"] == "too_short" and details["input"]:
            continue  # pydantic counts only the tiers that passed; the others have been named
        problem = _translate(details, raw)
        if not any(problem.path[: len(path)] == path or _within_refused_tier(problem.path, path) for path in told):
            problems.append(problem)
    return problems


def show_value(value: object) -> str:
    """Render ``value`` for an error: short, one line, without user and password of a URL."""
    text = _URL_USERINFO.sub("***@", repr(value))
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[: _MAX_SHOWN_CHARS - 3]}..."


def _within_refused_tier(path: Path, refused: Path) -> bool:
    """Whether ``path`` lies in a tier whose kind is refused: its other faults are of no interest."""
    return refused[-1:] == ("kind",) and path[:2] == refused[:2]


def _credentials(value: object, path: Path) -> Iterable[Problem]:
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


def _tiers(raw: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    tiers = raw.get("tiers")
    if isinstance(tiers, list | tuple):
        yield from ((position, tier) for position, tier in enumerate(tiers) if isinstance(tier, Mapping))


def _unavailable(raw: Mapping[str, Any]) -> Iterable[Problem]:
    for position, tier in _tiers(raw):
        kind = tier.get("kind")
        if not isinstance(kind, str) or kind not in TIER_MODELS:
            continue
        if kind not in AVAILABLE:
            yield Problem(("tiers", position, "kind"), _not_available(kind, AVAILABLE))
            continue
        for field, built in AVAILABLE[kind].items():
            value = tier.get(field)
            if isinstance(value, str) and value in _literals(TIER_MODELS[kind], field) and value not in built:
                yield Problem(("tiers", position, field), _not_available(value, built))


def _not_available(value: str, built: Iterable[str]) -> str:
    return f"{value!r} is not available in nixl-offload {_RELEASE}; available: {', '.join(built)}"


def _tier_order(raw: Mapping[str, Any]) -> Iterable[Problem]:
    kinds = [(position, tier["kind"]) for position, tier in _tiers(raw) if tier.get("kind") in TIER_ORDER]
    order = f"allowed: any of {', '.join(TIER_ORDER)}, in this order (nearest the GPU first), each at most once"
    for (_, before), (position, kind) in itertools.pairwise(kinds):
        if kind in [other for at, other in kinds if at < position]:
            yield Problem(("tiers", position), f"{kind!r} is given twice; {order}")
        elif TIER_ORDER.index(kind) < TIER_ORDER.index(before):
            yield Problem(("tiers", position), f"{kind!r} comes after {before!r}; {order}")


def _passthrough(raw: Mapping[str, Any]) -> Iterable[Problem]:
    extra = raw.get("vllm")
    if not isinstance(extra, Mapping):
        return
    for key, value in extra.items():
        path: Path = ("vllm", key)
        if key in ("block_size", "blocks_per_chunk"):
            yield Problem(path, "is set by nixl-offload; say chunk_tokens at the top of the file instead")
        elif key in OWNED_EXTRA_KEYS:
            yield Problem(path, "is set by nixl-offload itself; remove it")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            yield Problem(path, f"{show_value(value)} cannot be handed to vLLM as JSON; quote it")


def _translate(details: ErrorDetails, raw: Mapping[str, Any]) -> Problem:
    """Turn one of pydantic's findings into our words."""
    path = _strip_tag(details["loc"])
    kind, context = details["type"], details.get("ctx", {})
    value = _written(path, raw, details["input"])
    model = _model_at(path, raw)
    name = str(path[-1]) if path else ""
    if kind == "extra_forbidden":
        fields = [field.alias or key for key, field in model.model_fields.items()]
        return Problem(path, f"unknown field{_did_you_mean(name, fields)}; allowed: {', '.join(fields)}")
    if kind == "missing":
        return Problem(path, f"is required{_example(name)}")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, "kind")
        if kind == "union_tag_not_found":
            return Problem(path, f"is required; allowed: {', '.join(TIER_ORDER)}")
        tag = value.get("kind") if isinstance(value, Mapping) else value
        return Problem(path, _unknown(tag, TIER_ORDER))
    if kind == "literal_error":
        return Problem(path, _unknown(value, _literals(model, name)))
    if kind == "value_error":
        return Problem(path, f"{show_value(value)} {context['error']}")
    if kind in _EXPECTED:
        return Problem(path, f"{show_value(value)} is refused; allowed: {_EXPECTED[kind]}")
    if kind in ("greater_than", "greater_than_equal"):
        bound = "more than 0" if kind == "greater_than" else f"{_bound(name, context['ge'])} or more"
        return Problem(path, f"{show_value(value)} is too small; allowed: {bound}")
    if kind == "too_short":
        return Problem(path, f"is empty; allowed: one or more of {', '.join(TIER_ORDER)}")
    return Problem(path, f"{show_value(value)} is refused: {details['msg']}")


_EXPECTED: Final = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "string_type": "text",
    "tuple_type": "a list",
}
_EXAMPLES: Final = {
    "tiers": "; for example: tiers: [{kind: file, path: /mnt/nvme/kv, capacity: 500GiB}]",
    "path": "; for example: path: /mnt/nvme/kv",
    "capacity": "; for example: capacity: 500GiB",
    "bucket": "; for example: bucket: kv-cache",
}


def _example(name: str) -> str:
    return _EXAMPLES.get(name, "")


def _strip_tag(loc: tuple[int | str, ...]) -> Path:
    """Drop the union tag that pydantic puts behind a tier's position."""
    if len(loc) > 2 and loc[0] == "tiers" and loc[2] in TIER_MODELS:
        return (*loc[:2], *loc[3:])
    return loc


def _written(path: Path, raw: object, otherwise: object) -> object:
    """Return the value as the user wrote it; pydantic's is already converted, "1KiB" to 1024."""
    try:
        return functools.reduce(operator.getitem, path, raw)  # type: ignore[arg-type]  # what has no items raises
    except (KeyError, IndexError, TypeError):
        return otherwise


def _model_at(path: Path, raw: Mapping[str, Any]) -> type[BaseModel]:
    if len(path) > 2 and path[0] == "tiers" and isinstance(path[1], int):
        return TIER_MODELS[raw["tiers"][path[1]]["kind"]]
    return Config


def _literals(model: type[BaseModel], name: str) -> tuple[str, ...]:
    """Return the words that a field may say; empty for a field of another kind."""
    field = model.model_fields.get(name)
    return tuple(str(choice) for choice in getattr(field.annotation, "__args__", ())) if field else ()


def _bound(name: str, bound: int) -> str:
    return format_size(bound) if name in ("capacity", "staging") else str(bound)


def _unknown(value: object, choices: Sequence[str]) -> str:
    return f"{show_value(value)} is unknown{_did_you_mean(value, choices)}; allowed: {', '.join(choices)}"


def _did_you_mean(word: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return f" (did you mean {close[0]!r}?)" if close else ""


def render(problems: Iterable[Problem], source: str, lines: Mapping[Path, int]) -> str:
    """Return one line per problem, in the order of the file: ``kv.yaml:12: tiers[1].capacity: ...``."""
    rendered: list[tuple[int, str]] = []
    for problem in problems:
        line = next((lines[problem.path[:n]] for n in range(len(problem.path), 0, -1) if problem.path[:n] in lines), 0)
        where = f"{source}:{line}" if line else source
        rendered.append((line, f"{where}: {render_path(problem.path)}: {problem.message}"))
    return "\n".join(text for _, text in sorted(rendered, key=lambda entry: entry[0]))
