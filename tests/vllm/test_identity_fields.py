"""What is excused from the namespace is there in vLLM. All else counts, fields that a future vLLM adds included."""

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

from nixl_offload.identity.excused import ALSO_COUNTED, EXCUSED, EXCUSED_ENVIRONMENT, EXCUSED_WITH_SHARDS
from nixl_offload.identity.settings import collect


def _nested(annotation: Any) -> Iterator[type]:
    """Yield vLLM's configuration classes that an annotation names. Other classes count, whatever they hold."""
    if dataclasses.is_dataclass(annotation) and getattr(annotation, "__module__", "").startswith("vllm.config."):
        assert isinstance(annotation, type)
        yield annotation
    for part in typing.get_args(annotation):
        yield from _nested(part)


def _classes() -> dict[str, set[str]]:
    """Return the fields of vLLM's configuration classes, as far as these are not excused as a whole."""
    found: dict[str, set[str]] = {}
    waiting: list[type] = [VllmConfig]
    while waiting:
        kind = waiting.pop()
        if kind.__name__ in found:
            continue
        hints = typing.get_type_hints(kind)
        names = found[kind.__name__] = {field.name for field in dataclasses.fields(kind)}
        for name in names - set(EXCUSED.get(kind.__name__, {})):
            waiting += _nested(hints[name])
    return found


def test_no_list_names_a_field_that_there_is_not() -> None:
    """A misspelt excuse excuses nothing, and one for a field that is gone may one day excuse another of that name."""
    classes = _classes()
    assert set(EXCUSED) - {"PretrainedConfig"} <= set(classes)
    for kind, excuses in EXCUSED.items():
        assert set(excuses) <= classes.get(kind, set(excuses)), kind


def test_shards_excuse_only_what_counts_without_them() -> None:
    for path in EXCUSED_WITH_SHARDS:
        *above, name = path.split(".")
        if above == ["environment"]:
            assert name in set(vllm.envs.environment_variables) - set(EXCUSED_ENVIRONMENT)
        elif "hf_config" not in above:  # which has what the model's author wrote
            kind: type = VllmConfig
            for field in above:
                (kind,) = _nested(typing.get_type_hints(kind)[field])
            assert name in {field.name for field in dataclasses.fields(kind)} - set(EXCUSED.get(kind.__name__, {}))


def test_every_variable_of_the_lists_is_read_by_somebody() -> None:
    """A misspelt variable excuses, or counts, nothing."""
    known = set(vllm.envs.environment_variables)
    assert set(EXCUSED_ENVIRONMENT) <= known
    assert not known & set(ALSO_COUNTED)
    missing = set(ALSO_COUNTED) - {"NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"}  # by cuBLAS and torch
    for content in (file.read_text() for file in Path(vllm.__file__).parent.rglob("*.py")):
        missing -= {name for name in missing if f'"{name}"' in content}
    assert not missing


def test_a_field_that_nobody_has_looked_at_counts() -> None:
    """What a new vLLM adds to a class of which some fields are excused."""

    @dataclasses.dataclass
    class SchedulerConfig:
        max_num_seqs: int = 8
        rope_of_the_future: str = "short"

    assert collect(SchedulerConfig(), EXCUSED).values == {"rope_of_the_future": "short"}
