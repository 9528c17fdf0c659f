"""Settings: equal configurations give equal ones in every process, different ones never do, and no secret gets in."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from nixl_offload.identity.excused import EXCUSED
from nixl_offload.identity.namespace import Setting
from nixl_offload.identity.settings import collect


def settings(value: Any, excused: dict[str, dict[str, str]] | None = None) -> dict[str, Setting]:
    found = collect(value, excused or {})
    assert not found.incomparable
    return found.values


def as_json(value: Any) -> str:
    """Return the settings as JSON, as the namespace digests them; there true, 1 and 1.0 differ."""
    return json.dumps(settings(value), sort_keys=True)


class Kernel(enum.Enum):
    """A choice."""

    FAST = 1
    EXACT = 2


@dataclasses.dataclass
class Base:
    """A configuration."""

    size: int = 1
    port: int = 80


class Plain:
    """A class that is no dataclass: its attributes count."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": {}}, {"a": None}),
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({1: "x"}, {"1": "x"}),
        ({"a": "x" * 500}, {"a": "x" * 499 + "y"}),
        ({"a": Kernel.FAST}, {"a": Kernel.EXACT}),
        ({"a": Base()}, {"a": Plain(size=1, port=80)}),
        ({"a": Plain(x=1)}, {"a": Plain(x=2)}),
        ({"a": float("inf")}, {"a": float("nan")}),
        ({"a": b"1"}, {"a": b"2"}),
        ({"a": Path("x")}, {"a": Path("y")}),
        ({"a": int}, {"a": float}),
        ({"a": len}, {"a": max}),
        ({"a": {"deep": {"er": [{"est": 1}]}}}, {"a": {"deep": {"er": [{"est": 2}]}}}),
        ({"password": "one"}, {"password": "two"}),
    ],
)
def test_different_values_differ(one: Any, other: Any) -> None:
    assert as_json(one) != as_json(other)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, JSON)
def test_settings_are_equal_exactly_where_values_are(one: Any, other: Any) -> None:
    """JSON tells True, 1 and 1.0 apart, as settings must."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (as_json({"root": one}) == as_json({"root": other})) is same


def _with_a_name() -> Callable[[], int]:
    made = lambda: 1  # noqa: E731 - of a lambda's name nothing follows, nor of what hangs on it
    made.what = "one"  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    "value",
    [lambda: 1, _with_a_name(), object(), Plain(inner=object()), np.arange(2000), np.zeros(1)],
    ids=["lambda", "lambda with an attribute", "object", "inside", "long array", "array"],
)
def test_what_cannot_be_compared_is_shared_with_nobody(value: Any) -> None:
    """Equal settings would claim that two servers compute the same, which is unknown."""
    first, second = collect({"a": value}, {}), collect({"a": value}, {})
    assert first.incomparable
    assert first.values != second.values


def test_what_is_short_can_be_read_and_what_is_long_is_digested() -> None:
    """In the manifest. Both must stay the same in every release, or an upgrade would start with an empty cache."""
    plain = {"number": 1.5, "url": "https://example.org/model", "other words": "turkeys, stokers", "short": "x" * 160}
    values = {"class": json.JSONDecoder, "function": json.dumps, "path": Path("/a") / "b", "set": {"b", "a"}}
    assert settings({**plain, **values, "long": "x" * 161, "empty": {}, "infinite": float("inf"), "complex": 1j}) == {
        **plain,
        **{"class": "json.decoder.JSONDecoder", "function": "json.dumps", "path": "/a/b", "set": '["a", "b"]'},
        **{"long": "sha256:fdb7f3c40645e79ca4c5d1638753243c", "empty": "(empty)", "infinite": "inf", "complex": "1j"},
    }
    many = settings({"config": {"many": dict.fromkeys(range(256), 0), "more": dict.fromkeys(range(257), 0)}})
    assert len(many) == 256 + 1
    assert "config.more" in many


def test_cycles_repeats_and_depth_end() -> None:
    one = Plain(name="one")
    one.itself = one  # type: ignore[attr-defined]
    twice = Base()
    found = settings({"a": one, "b": twice, "c": twice})
    assert found["a.itself"] == "(itself)"
    assert found["c"] == "(as b)"
    deep: Any = 1
    for _ in range(500):
        deep = {"x": deep}
    assert collect({"a": deep}, {}).incomparable


@pytest.mark.parametrize(
    "value",
    [
        {"api_key": "hunter2"},
        {"loader": {"aws_secret_access_key": "hunter2"}},
        {"HF_TOKEN": "hunter2"},
        {"where": "https://user:hunter2@example.org/model"},
        {"list": ["https://user:hunter2@example.org/model"]},
        {"session": Plain(auth_token="hunter2")},
        {"credentials": ["hunter2"]},
        *({"config": {name: "hunter2"}} for name in ("token", "Authorization", "pwd", "jwt", "sas", "passphrase")),
        {"client.secret.v": "hunter2"},
        {"secrets": {"of": {"mine": "hunter2"}}},
        {"headers": ["x-api-key: hunter2"]},
        {"headers": [{"Authorization": "Bearer hunter2"}]},
        {"loader": "--token hunter2"},
    ],
)
def test_no_secret_gets_in(value: Any) -> None:
    """Settings are written to a manifest in the bucket."""
    assert "hunter2" not in json.dumps(settings(value))


def test_a_file_counts_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An absolute path, or a setting that says so, names a file; a plain word does not."""
    file, elsewhere = tmp_path / "fast", tmp_path / "elsewhere.json"
    file.write_text("{}")
    elsewhere.write_text("{}")
    monkeypatch.chdir(tmp_path)
    content = settings({"scale": str(file)})["scale"]
    assert str(content).startswith("file sha256:")
    names = {"scale_path": "fast", "scale_file": str(elsewhere), "mode": "fast", "no_path": "/no/such/file"}
    assert settings(names) == {**names, "scale_path": content, "scale_file": content}
    file.write_text("{ }")
    assert settings({"scale": str(file)})["scale"] != content


def test_a_directory_counts_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any field and at any path. A word that happens to be a directory's name stays a word."""
    for place in ("a", "b"):
        (tmp_path / place / "llm").mkdir(parents=True)
        (tmp_path / place / "llm" / "model.safetensors").write_bytes(b"weights")
    monkeypatch.chdir(tmp_path / "a")
    names = {"text_model_id": str(tmp_path / "a" / "llm"), "mode": "llm"}
    before = settings(names)
    assert before["mode"] == "llm"
    assert settings({"text_model_id": str(tmp_path / "b" / "llm"), "mode": "llm"}) == before
    assert settings({"text_model_id": "../a/llm", "mode": "llm"}) == before
    (tmp_path / "a" / "llm" / "model.safetensors").write_bytes(b"WEIGHTS")
    assert settings(names) != before


def test_a_pipe_counts_by_its_name(tmp_path: Path) -> None:
    """Reading a pipe would never end. An unreadable file counts by its name too."""
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/proc/self/mem"):
        assert settings({"scale_path": name}) == {"scale_path": name}


def test_a_model_config_counts_without_where_it_was_read() -> None:
    """A config that cannot describe itself counts by its attributes."""
    told = {"_name_or_path": "/a", "_commit_hash": "ab", "transformers_version": "5"}
    config = {"layers": 2, **told, "text_config": {"layers": 3, **told}}
    found = collect({"hf": SimpleNamespace(to_dict=lambda: config)}, EXCUSED).values
    assert found == {"hf.(type)": "SimpleNamespace", "hf.layers": 2, "hf.text_config.layers": 3}

    class Broken:
        def __init__(self) -> None:
            self.layers = 2

        def to_dict(self) -> dict[str, Any]:
            raise TypeError("not JSON")

    assert settings({"hf": Broken()})["hf.layers"] == 2


@dataclasses.dataclass
class Derived(Base):
    """A configuration of another kind."""

    kernel: Kernel = Kernel.FAST
    parts: list[Any] = dataclasses.field(default_factory=list)


def test_excused_fields_of_a_base_class_are_left_out_of_derived_ones() -> None:
    found = settings(Derived(), {"Base": {"port": "a port"}})
    assert found == {"size": 1, "kernel": "Kernel.FAST", "parts": "[]"}
