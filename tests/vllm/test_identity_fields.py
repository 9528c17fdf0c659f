"""Every field of vLLM's configuration was looked at: it counts, or it is excused with a reason. A field that a future
vLLM adds counts by itself, and fails here until somebody has said so.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm.envs
from vllm.config import VllmConfig

from nixl_offload.identity.excused import EXCUSED, EXCUSED_WITH_SHARDS
from nixl_offload.identity.excused_environment import ALSO_COUNTED, EXCUSED_ENVIRONMENT
from tests.vllm.identity_fields import COUNTED_FIELDS, COUNTED_VARIABLES


def _nested(annotation: Any) -> Iterator[type]:
    """Yield vLLM's configuration classes that an annotation names. Other classes count, whatever they hold."""
    if dataclasses.is_dataclass(annotation) and getattr(annotation, "__module__", "").startswith("vllm.config."):
        assert isinstance(annotation, type)
        yield annotation
    for part in typing.get_args(annotation):
        yield from _nested(part)


def _classes() -> dict[str, type]:
    """Return vLLM's configuration classes, as far as they are not excused as a whole."""
    found: dict[str, type] = {}
    waiting: list[type] = [VllmConfig]
    while waiting:
        kind = waiting.pop()
        if kind.__name__ in found:
            continue
        found[kind.__name__] = kind
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name not in EXCUSED.get(kind.__name__, {}):
                waiting += _nested(hints[field.name])
    return found


CLASSES = _classes()


def test_the_walk_reaches_what_it_should() -> None:
    """Or the tests below would prove nothing of the classes that it misses."""
    assert {
        "AttentionConfig",
        "CacheConfig",
        "CompilationConfig",
        "KernelConfig",
        "LoRAConfig",
        "LoadConfig",
        "ModelConfig",
        "MultiModalConfig",
        "ParallelConfig",
        "SchedulerConfig",
        "SpeculativeConfig",
    } <= set(CLASSES)
    assert set(CLASSES) <= {*COUNTED_FIELDS, *EXCUSED}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_field_counts_or_is_excused(name: str) -> None:
    fields = {field.name for field in dataclasses.fields(CLASSES[name])}
    counted, excused = set(COUNTED_FIELDS.get(name, "").split()), set(EXCUSED.get(name, {}))
    assert not counted & excused, "both"
    assert fields <= counted | excused, f"{name}: neither counted nor excused: {fields - counted - excused}"


def test_no_list_names_a_field_that_there_is_not() -> None:
    """A misspelt excuse excuses nothing, and one for a field that is gone may one day excuse another of that name."""
    for name, kind in CLASSES.items():
        known = set(COUNTED_FIELDS.get(name, "").split()) | set(EXCUSED.get(name, {}))
        assert known <= {field.name for field in dataclasses.fields(kind)}
    assert set(EXCUSED) - {"PretrainedConfig"} <= set(CLASSES)


def test_shards_excuse_only_what_counts_without_them() -> None:
    for path in EXCUSED_WITH_SHARDS:
        *above, name = path.split(".")
        if above == ["environment"]:
            assert name in COUNTED_VARIABLES.split()
        elif "hf_config" not in above:  # which has what the model's author wrote
            kind: type = VllmConfig
            for field in above:
                (kind,) = _nested(typing.get_type_hints(kind)[field])
            assert name in COUNTED_FIELDS[kind.__name__].split()


def test_every_excuse_has_a_reason() -> None:
    for name, fields in EXCUSED.items():
        for field, reason in fields.items():
            assert reason.strip(), f"{name}.{field}"


def test_every_variable_counts_or_is_excused() -> None:
    known, counted = set(vllm.envs.environment_variables), set(COUNTED_VARIABLES.split())
    excused = set(EXCUSED_ENVIRONMENT)
    assert not counted & excused, "both"
    assert known <= counted | excused, f"neither counted nor excused: {known - counted - excused}"
    assert counted | excused <= known, "no such variable"
    assert not known & set(ALSO_COUNTED)


def test_what_counts_beside_vllms_own_variables_is_read_by_somebody() -> None:
    """A misspelt variable counts nothing."""
    missing = set(ALSO_COUNTED)
    missing -= {"NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"}  # by cuBLAS and torch
    assert len(missing) == len(ALSO_COUNTED) - 2
    for content in (file.read_text() for file in Path(vllm.__file__).parent.rglob("*.py")):
        missing -= {name for name in missing if f'"{name}"' in content}
    assert not missing


def test_a_field_that_nobody_has_looked_at_counts() -> None:
    """What a new vLLM adds to a class of which some fields are excused."""
    from nixl_offload.identity.settings import collect

    @dataclasses.dataclass
    class SchedulerConfig:
        max_num_seqs: int = 8
        rope_of_the_future: str = "short"

    assert collect(SchedulerConfig(), EXCUSED).values == {"rope_of_the_future": "short"}
