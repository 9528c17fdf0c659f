"""The proof's fuzzing in seconds: every input that was kept, and some seeded changes of it, to every target."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prove.fuzz.target import Broken, Reader, expect
from tests.prove.fuzz.trees import json_mutated

_ROOT = Path(__file__).parents[2]


def test_kept_inputs_and_changes_of_them_find_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.prove.fuzz.replay"],
        cwd=_ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.count("changes of them") >= 15


def test_what_does_not_hold_is_a_finding() -> None:
    expect(1, "all is well")
    with pytest.raises(Broken, match="a promise"):
        expect(holds=False, promise="a promise")


def test_an_input_that_is_used_up_gives_zeros() -> None:
    reader = Reader(b"\1\2\3")
    assert (reader.number(2), reader.left, reader.rest(), reader.number(), reader.choice("ab")) == (
        0x201, 1, b"\3", 0, "a",
    )  # fmt: skip


def test_json_stays_json_when_it_is_changed_and_the_same_seed_changes_it_alike() -> None:
    document = b'{"a": [1, {"b": null}], "c": "d"}'
    made = [json_mutated(document, random.Random(seed), ("w",)) for seed in range(50)]
    assert made == [json_mutated(document, random.Random(seed), ("w",)) for seed in range(50)]
    assert len(set(made)) > 30
    assert json_mutated(b"{", random.Random(1)) is None
