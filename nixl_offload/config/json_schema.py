"""The config's JSON Schema (draft 2020-12), for editors and for checks without this package.

It is derived from the models of ``schema``: names, types, bounds, defaults as the YAML says them, descriptions from the
docstrings. What only a look at the whole file tells (``rules``) is added as far as JSON Schema can say it. What it
cannot say, and ``load`` refuses all the same: a size with a unit below its minimum, parts of a byte, ``unsaved_limit``
above ``capacity``, fields under ``vllm:`` that look like credentials, keys given twice, anchors.

    python -m nixl_offload.config.json_schema            # prints it, as `nixl-offload schema` does
    python -m nixl_offload.config.json_schema --write .  # in a checkout: renews the copies in configs/ and docs/

Threading: pure functions but for reading the source of ``schema`` and for ``--write``.
"""

from __future__ import annotations

import argparse
import inspect
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import annotated_types
from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo

from nixl_offload.config.old_spelling import KIND_OF_LAYOUT
from nixl_offload.config.schema import (
    FIELDS_IN_FRONT,
    MOVERS_WITH,
    OWNED_EXTRA_KEYS,
    TIER_KINDS,
    TIER_MODELS,
    TIER_ORDER,
    Config,
    LookupOptions,
    MemoryConfig,
    literals,
)
from nixl_offload.units import DURATION_PATTERN, SIZE_PATTERN, format_duration, format_size

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
COPY: Final = "configs/nixl-offload.schema.json"
"""Where a checkout keeps it, for the editors of those who read ``configs/``."""

_Schema = dict[str, Any]
_PLAIN: Final[dict[object, str]] = {bool: "boolean", int: "integer", float: "number", str: "string"}


class FieldFacts(NamedTuple):
    """What there is to say of one field."""

    name: str
    """As the YAML says it."""
    schema: _Schema
    """Without description and default."""
    nullable: bool
    required: bool
    default: Any
    """As the YAML says it; None where there is none."""
    description: str


def json_schema() -> _Schema:
    """Return the schema of a whole file."""
    tiers = {
        "type": "array",
        "items": {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in (*TIER_KINDS, "file")]},
        "minItems": 1,
        **_order_of_tiers(),
    }
    schema: _Schema = {"$schema": DIALECT, **_object(Config), "title": "nixl-offload config"}
    del schema["description"]  # it is for programmers
    schema["properties"]["tiers"] |= tiers
    schema["properties"]["vllm"] |= {"properties": dict.fromkeys(OWNED_EXTRA_KEYS, False)}
    rules = {"memory": _rules_of_memory, "slab": _rules_of_files, "shared_dir": _rules_of_files, "s3": _rules_of_s3}
    tier_schemas = {kind: {**_object(model), "allOf": list(rules[kind](model))} for kind, model in TIER_MODELS.items()}
    schema["$defs"] = {
        **tier_schemas,
        "file": _old_spelling(tier_schemas),
        "lookup": _object(LookupOptions),
    }
    return schema


def render_json_schema() -> str:
    """Return the schema as text that ends in a newline; the same text each time."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def fields_of(model: type[BaseModel]) -> list[FieldFacts]:
    """Return what there is to say of the fields of ``model``, in their order."""
    return [
        _facts(name, field, " ".join((field.description or "").replace("``", "`").split()))
        for name, field in model.model_fields.items()
    ]


def _object(model: type[BaseModel]) -> _Schema:
    properties: dict[str, _Schema] = {}
    for fact in fields_of(model):
        schema = fact.schema
        if fact.nullable:
            schema = {"anyOf": [*schema.get("anyOf", [schema]), {"type": "null"}]}
        if fact.description:
            schema = {"description": fact.description, **schema}
        properties[fact.name] = schema if fact.default is None else {**schema, "default": fact.default}
    return {
        "type": "object",
        "description": inspect.cleandoc(model.__doc__ or ""),
        "properties": properties,
        "required": [fact.name for fact in fields_of(model) if fact.required],
        "additionalProperties": False,
    }


def _facts(name: str, field: FieldInfo, description: str) -> FieldFacts:
    annotation, metadata = field.annotation, list(field.metadata)
    arms = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    nullable = types.NoneType in arms
    if nullable:
        (arm,) = (arm for arm in arms if arm is not types.NoneType)
        metadata = [*getattr(arm, "__metadata__", ()), *metadata]
        annotation = getattr(arm, "__origin__", arm) if hasattr(arm, "__metadata__") else arm
    schema = _value(annotation, metadata)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        default = None  # said by its own fields
    elif default is not None and schema.get("pattern") == DURATION_PATTERN:
        default = format_duration(default)
    elif default is not None and is_size(schema):
        default = format_size(default)
    return FieldFacts(field.alias or name, schema, nullable, field.is_required(), default, description)


def is_size(schema: Mapping[str, Any]) -> bool:
    """Whether a field's schema is that of a size."""
    return any(arm.get("pattern") == SIZE_PATTERN for arm in schema.get("anyOf", ()))


def _value(annotation: Any, metadata: Sequence[object]) -> _Schema:
    """Return the schema of what a field holds when it is not null."""
    own = next((item.json_schema for item in metadata if isinstance(item, WithJsonSchema)), None)
    if own is not None:
        arms = own.get("anyOf")
        return dict(own) if arms is None else {"anyOf": [arms[0] | _bounds(metadata), *arms[1:]]}
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        return {"const": choices[0]} if len(choices) == 1 else {"enum": list(choices)}
    if annotation is LookupOptions:
        return {"$ref": "#/$defs/lookup"}
    if typing.get_origin(annotation) in (dict, tuple):
        return {"type": "object" if typing.get_origin(annotation) is dict else "array"}
    return {"type": _PLAIN[annotation], **_bounds(metadata)}


def _bounds(metadata: Sequence[object]) -> _Schema:
    bounds: _Schema = {}
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            bounds["minimum"] = item.ge
        elif isinstance(item, annotated_types.Gt):
            bounds["exclusiveMinimum"] = item.gt
        elif isinstance(item, annotated_types.Le):
            bounds["maximum"] = item.le
    return bounds


def _order_of_tiers() -> _Schema:
    """The order of ``TIER_ORDER``, one of each group; nothing that deals with the next tier where there is none."""
    memory, files, bucket = (
        {"properties": {"kind": {"enum": kinds}}} for kinds in (["memory"], ["slab", "shared_dir", "file"], ["s3"])
    )
    not_memory, not_bucket = (
        {"properties": {"kind": {"not": each["properties"]["kind"]}}} for each in (memory, bucket)
    )
    alone = {"if": memory, "then": _absent(MemoryConfig, FIELDS_IN_FRONT)}
    return {
        "maxItems": len(TIER_ORDER),
        # Not beside `items`, which would then count from the fourth tier on.
        "allOf": [
            {"prefixItems": [{}, not_memory, bucket]},
            {"if": {"minItems": 2}, "then": {"prefixItems": [not_bucket]}, "else": {"items": alone}},
            {"if": {"minItems": 3}, "then": {"prefixItems": [memory, files, bucket]}},
            {"contains": files, "minContains": 0, "maxContains": 1},
        ],
    }


def _old_spelling(tier_schemas: Mapping[str, _Schema]) -> _Schema:
    """``kind: file``, which an earlier release wrote and this one reads."""
    spelled: list[_Schema] = []
    for layout, kind in KIND_OF_LAYOUT.items():
        schema = tier_schemas[kind]
        own = {"kind": {"const": "file"}, "layout": {"const": layout}}
        required = schema["required"] if layout == "slab" else [*schema["required"], "layout"]
        spelled.append({**schema, "properties": {**schema["properties"], **own}, "required": required})
    return {"description": "The old spelling of kind: slab and kind: shared_dir.", "deprecated": True, "oneOf": spelled}


def _rules_of_memory(model: type[BaseModel]) -> Iterator[_Schema]:
    yield _when(_says("unsaved", "drop"), _absent(model, ["unsaved_limit"]))


def _rules_of_files(model: type[BaseModel]) -> Iterator[_Schema]:
    for field, movers in MOVERS_WITH.items():
        others = [mover for mover in literals(model, "mover") if mover not in movers]
        yield _when(_says("mover", *others), _absent(model, [field]))


def _rules_of_s3(model: type[BaseModel]) -> Iterator[_Schema]:
    yield _when(_says("mover", "obstore"), _absent(model, ["crt_min_size"]))
    said = {"properties": {"crt_min_size": {"not": {"type": "null"}}}, "required": ["crt_min_size"]}
    yield {"if": {"not": said}, "then": _absent(model, ["crt_throughput_gbps"])}
    plain = {"properties": {"endpoint": {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp]:"}}, "required": ["endpoint"]}
    yield _when(plain, _absent(model, ["ca_bundle"]))


def _says(field: str, *values: str) -> _Schema:
    return {"properties": {field: {"enum": list(values)}}, "required": [field]}


def _when(condition: _Schema, then: _Schema) -> _Schema:
    return {"if": condition, "then": then}


def _absent(model: type[BaseModel], names: Sequence[str]) -> _Schema:
    """Forbid fields. Saying null, where a field may, is saying nothing."""
    nullable = {fact.name: fact.nullable for fact in fields_of(model)}
    return {"properties": {name: {"type": "null"} if nullable[name] else False for name in names}}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the schema, or the tables of docs/configuration.md, or renew both in a checkout."""
    from nixl_offload.config.field_tables import PAGE, insert_tables, render_tables

    parser = argparse.ArgumentParser(description="The config's JSON Schema and the tables of its fields.")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help=f"print the tables of {PAGE} instead")
    form.add_argument("--write", metavar="DIR", type=Path, help=f"renew {COPY} and {PAGE} in this checkout")
    arguments = parser.parse_args(argv)
    if arguments.write is not None:
        (arguments.write / COPY).write_text(render_json_schema(), encoding="utf-8")
        page = arguments.write / PAGE
        page.write_text(insert_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(render_tables() if arguments.markdown else render_json_schema(), end="")


if __name__ == "__main__":
    main()
