"""The proof's fuzzing in seconds: every input that was kept, and some seeded changes of it, to every target."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prove import fuzz
from tests.prove.fuzz.target import Broken, Reader, expect
from tests.prove.fuzz.targets import TARGETS
from tests.prove.fuzz.trees import json_mutated

_ROOT = Path(__file__).parents[2]


def test_kept_inputs_and_changes_of_them_find_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.prove.fuzz.replay"],
        cwd=_ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert ended.stdout.count("changes of them") >= 15


@pytest.mark.parametrize("status", [0, 77])
def test_what_is_found_is_kept_as_a_fixture_and_the_corpus_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """An input that found something, and that which ended the process. A target that ran out of time says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz, "KEPT", tmp_path / "build" / "prove")
    monkeypatch.setattr(fuzz, "_SECONDS", 30)

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert f"--corpus={tmp_path}/build/prove/corpus/stored-names" in command
        found = {"kind": "wrong", "error": "no promise holds", "input": base64.b64encode(b"one").decode()}
        Path("found.jsonl").write_text(json.dumps(found))
        if status:
            Path("scratch").mkdir()
            Path("scratch", f"crash-{'0' * 40}").write_bytes(b"two")
        return subprocess.CompletedProcess(command, status, "", "stat::number_of_executed_units: 1234\nthe end")

    monkeypatch.setattr(subprocess, "run", run)
    outcome = fuzz.fuzz("stored/names", 1)
    one, two = (f"build/prove/found/stored-names/{hashlib.sha1(data).hexdigest()[:12]}" for data in (b"one", b"two"))
    assert outcome.counts == {"inputs": 1234}
    assert outcome.wrong == [f"no promise holds; input: {one}"]
    assert (tmp_path / one).read_bytes() == b"one"
    if status:
        assert outcome.dead[0].endswith(f"the end; inputs: {two}")
        assert (tmp_path / two).read_bytes() == b"two"
    else:
        assert not outcome.dead
        assert outcome.note == "1,234 of 200,000 inputs, for 30 s were over"


def test_every_target_has_kept_inputs() -> None:
    assert [name for name, target in TARGETS.items() if not target.corpus()] == []


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
