"""Everything that can be wrong with a config, in sentences: path, value, what is allowed, and what was probably meant.

Threading: pure functions, safe anywhere. Values of fields that look like credentials are never repeated.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from nixl_offload.config.document import Path, render_path
from nixl_offload.config.rules import Problem, broken_rules, did_you_mean, show_value
from nixl_offload.config.schema import TIER_KINDS, TIER_MODELS, Config, literals, nested_model
from nixl_offload.units import format_duration, format_size


def find_problems(raw: Mapping[str, Any], error: ValidationError | None) -> list[Problem]:
    """Return what is wrong with ``raw``, each path once: our own rules first, then what pydantic found."""
    problems = broken_rules(raw)
    told = {problem.path for problem in problems}
    for details in error.errors() if error else ():
        if details["type"] == "too_short" and details["input"]:
            continue  # pydantic counts only the tiers that passed; the others have been named
        problem = _translate(details, raw)
        if not any(problem.path[: len(path)] == path for path in told):
            problems.append(problem)
    return problems


def _translate(details: ErrorDetails, raw: Mapping[str, Any]) -> Problem:
    """Turn one of pydantic's findings about ``raw`` into our words."""
    path = _strip_tag(details["loc"])
    kind, context = details["type"], details.get("ctx", {})
    # Somebody may have put a key where the name of its file belongs.
    value = "***" if path[:1] == ("authenticate",) else _written(path, raw, details["input"])
    model = _model_at(path, raw)
    name = str(path[-1]) if path else ""
    if kind == "extra_forbidden":
        fields = _names(model)
        elsewhere = _of_other_kinds(path, raw)
        return Problem(
            path, f"{elsewhere or 'unknown field' + did_you_mean(name, fields)}; allowed: {', '.join(fields)}"
        )
    if kind == "missing":
        return Problem(path, f"is required{_example(name)}")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path = (*path, "kind")
        if kind == "union_tag_not_found":
            return Problem(path, f"is required; allowed: {', '.join(TIER_KINDS)}")
        tag = value.get("kind") if isinstance(value, Mapping) else value
        return Problem(path, _unknown(tag, TIER_KINDS))
    if kind == "literal_error":
        return Problem(path, _unknown(value, literals(model, name)))
    if kind == "value_error":
        return Problem(path, f"{show_value(value)} {context['error']}")
    if kind in _EXPECTED:
        return Problem(path, f"{show_value(value)} is refused; allowed: {_EXPECTED[kind]}")
    if kind in ("greater_than", "greater_than_equal"):
        bound = "more than 0" if kind == "greater_than" else f"{_bound(name, context['ge'])} or more"
        return Problem(path, f"{show_value(value)} is too small; allowed: {bound}")
    if kind == "less_than_equal":
        return Problem(path, f"{show_value(value)} is too large; allowed: at most {_bound(name, context['le'])}")
    if kind == "too_short":
        return Problem(path, f"is empty; allowed: one or more of {', '.join(TIER_KINDS)}")
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
_SIZES: Final = ("capacity", "staging", "unsaved_limit")
_EXAMPLES: Final = {
    "tiers": "; for example: tiers: [{kind: slab, path: /mnt/nvme/kv, capacity: 500GiB}]",
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
    """Return the model whose field ``path`` names."""
    model: type[BaseModel] = Config
    inside = path[:-1]
    if len(path) > 2 and path[0] == "tiers" and isinstance(path[1], int):
        model, inside = TIER_MODELS[raw["tiers"][path[1]]["kind"]], path[2:-1]
    for name in inside:
        model = nested_model(model, str(name)) or model
    return model


def _of_other_kinds(path: Path, raw: Mapping[str, Any]) -> str:
    """Say that a tier's field belongs to tiers of other kinds; empty where no kind has it."""
    if len(path) != 3 or path[0] != "tiers":
        return ""
    _, position, name = path
    kinds = [kind for kind, model in TIER_MODELS.items() if name in _names(model)]
    if not kinds:
        return ""
    kind = raw["tiers"][position]["kind"]
    return f"belongs to kind: {' or '.join(kinds)}, not to kind: {kind}"


def _names(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _bound(name: str, bound: int | float) -> str:
    if isinstance(bound, float):
        return format_duration(bound)
    return format_size(bound) if name in _SIZES else str(bound)


def _unknown(value: object, choices: Sequence[str]) -> str:
    return f"{show_value(value)} is unknown{did_you_mean(value, choices)}; allowed: {', '.join(choices)}"


def render(problems: Iterable[Problem], source: str, lines: Mapping[Path, int]) -> str:
    """Return one line per problem, in the order of the file: ``kv.yaml:12: tiers[1].capacity: ...``."""
    rendered: list[tuple[int, str]] = []
    for problem in problems:
        line = next((lines[problem.path[:n]] for n in range(len(problem.path), 0, -1) if problem.path[:n] in lines), 0)
        where = f"{source}:{line}" if line else source
        rendered.append((line, f"{where}: {render_path(problem.path)}: {problem.message}"))
    return "\n".join(text for _, text in sorted(rendered, key=lambda entry: entry[0]))
