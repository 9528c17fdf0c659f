"""The config's JSON Schema (draft 2020-12), for editors and for checks without this package.

pydantic generates it from the models of ``schema``. Added here is what pydantic cannot know: how sizes and durations
are written, the order of tiers, and which options exclude each other, as far as JSON Schema can say it. What it cannot
say, and ``load`` refuses all the same: a size with a unit below its minimum, parts of a byte, ``unsaved_limit`` above
``capacity``, fields under ``vllm:`` that look like credentials, keys given twice, anchors.

Threading: pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from nixl_offload.config.schema import (
    FIELDS_IN_FRONT,
    MOVERS_WITH,
    TIER_KINDS,
    TIER_MODELS,
    VLLM_KEYS,
    Config,
)
from nixl_offload.units import DURATION_PATTERN, SIZE_PATTERN, format_duration, format_size

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_Schema = dict[str, Any]


def json_schema() -> _Schema:
    """Return the schema of a whole file."""
    generated = _as_written(Config.model_json_schema())
    models = generated.pop("$defs")
    del generated["description"]  # it is for programmers
    rules = {"memory": _rules_of_memory, "slab": _rules_of_files, "shared_dir": _rules_of_files, "s3": _rules_of_s3}
    kinds = {kind: models.pop(model.__name__) for kind, model in TIER_MODELS.items()}
    for kind, schema in kinds.items():
        schema["allOf"] = list(rules[kind](schema))
    schema = {"$schema": DIALECT, "title": "nixl-offload config", **generated}
    schema["properties"]["tiers"] |= {
        "items": {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in TIER_KINDS]},
        **_order_of_tiers(kinds["memory"]),
    }
    schema["properties"]["shards"] |= {"anyOf": _ways_to_cut(models["ShardCut"]), "default": "distinct"}
    schema["properties"]["vllm"] |= {"properties": dict.fromkeys(VLLM_KEYS, True), "additionalProperties": False}
    named = {f"of_{kind}": _is_of_kind(kind) for kind in TIER_KINDS}
    schema["$defs"] = {**kinds, **named, **models}
    return schema


def render_json_schema() -> str:
    """Return the schema as text that ends in a newline; the same text each time."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def _as_written(node: Any) -> Any:
    """Return pydantic's schema with sizes and durations as the YAML writes them, and without titles."""
    if isinstance(node, list):
        return [_as_written(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {name: _as_written(item) for name, item in node.items() if name != "title" or not isinstance(item, str)}
    if isinstance(node.get("description"), str):
        node["description"] = " ".join(node["description"].replace("``", "`").split())
    unit = node.pop("format", None)
    if unit is not None:
        # What is left of pydantic's schema of the number that the text is read as.
        minimum = node.pop("minimum", node.pop("ge", 0))
        node = {name: item for name, item in node.items() if name not in ("type", "gt", "le")}
        if unit == "size":
            node["anyOf"] = [{"type": "integer", "minimum": minimum}, {"type": "string", "pattern": SIZE_PATTERN}]
        else:
            node |= {"type": "string", "pattern": DURATION_PATTERN}
        if "default" in node:
            node["default"] = (format_size if unit == "size" else format_duration)(node["default"])
    return {name: item for name, item in node.items() if name != "default" or item is not None}


def _ways_to_cut(cut: _Schema) -> list[_Schema]:
    """Return what ``shards`` may be: what ``heads`` may be, ``per_rank``, or both in full."""
    names, numbers = cut["properties"]["heads"]["anyOf"]
    return [names | {"enum": ["per_rank", *names["enum"]]}, numbers, {"$ref": "#/$defs/ShardCut"}]


def _order_of_tiers(memory_tier: _Schema) -> _Schema:
    """Behind each tier only kinds that come later in ``TIER_KINDS``; nothing that deals with the next tier where there
    is none.
    """
    of_kind = [{"$ref": f"#/$defs/of_{kind}"} for kind in TIER_KINDS]
    # In `allOf`, as `prefixItems` beside `items` would make that count from the next tier on.
    rules: list[_Schema] = [
        {"if": {"maxItems": 1}, "then": {"items": {"if": of_kind[0], "then": _absent(memory_tier, FIELDS_IN_FRONT)}}}
    ]
    for position in range(len(TIER_KINDS) - 1):
        before: list[_Schema] = [{}] * position
        for at, this in enumerate(of_kind):
            earlier = {"not": {"anyOf": of_kind[: at + 1]}}
            rules.append(
                {
                    "if": {"prefixItems": [*before, this], "minItems": position + 1},
                    "then": {"prefixItems": [*before, {}, earlier]},
                }
            )
    return {"maxItems": len(TIER_KINDS), "allOf": rules}


def _is_of_kind(kind: str) -> _Schema:
    """A tier of this kind."""
    return {"properties": {"kind": {"const": kind}}, "required": ["kind"]}


def _rules_of_memory(tier: _Schema) -> Iterator[_Schema]:
    yield _when(_says("unsaved", "drop"), _absent(tier, ["unsaved_limit"]))


def _rules_of_files(tier: _Schema) -> Iterator[_Schema]:
    for field, movers in MOVERS_WITH.items():
        others = [mover for mover in tier["properties"]["mover"]["enum"] if mover not in movers]
        yield _when(_says("mover", *others), _absent(tier, [field]))


def _rules_of_s3(tier: _Schema) -> Iterator[_Schema]:
    plain = {"properties": {"endpoint": {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp]:"}}, "required": ["endpoint"]}
    yield _when(plain, _absent(tier, ["ca_bundle"]))


def _says(field: str, *values: str) -> _Schema:
    return {"properties": {field: {"enum": list(values)}}, "required": [field]}


def _when(condition: _Schema, then: _Schema) -> _Schema:
    return {"if": condition, "then": then}


def _absent(tier: _Schema, names: Sequence[str]) -> _Schema:
    """Forbid fields. Saying null, where a field may, is saying nothing."""
    fields = tier["properties"]
    return {
        "properties": {name: {"type": "null"} if {"type": "null"} in _arms(fields[name]) else False for name in names}
    }


def _arms(field: _Schema) -> list[_Schema]:
    return list(field.get("anyOf", ()))
