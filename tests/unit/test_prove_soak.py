"""What judges the soak and the yardstick: a wrong token, a moved logprob, growth and lost recovery are each seen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.prove.soak.laps import Lap
from tests.prove.soak.samples import LIMITS, grown, grown_tables
from tests.prove.yardstick.table import markdown

RIGHT: dict[str, Any] = {"tokens": [5, 6, 7], "logprobs": [-0.1, -0.2, -0.3], "leads": [1.0, 1.0, 1.0]}


def _judged(told: dict[str, Any], **right: Any) -> list[str]:
    lap = Lap("3")
    lap.add({**RIGHT, **right}, [1, 2])
    lap.add(None, [3], abort=1)
    return lap.judge([[told], []])


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"tokens": [5, 8, 7]}, "token 1 is 8, not 6"),
        ({"logprobs": [-0.1, -0.25, -0.3]}, "the logprob of token 1"),
        ({"logprobs": [-0.1, float("nan"), -0.3]}, "the logprob of token 1"),
        ({"tokens": [5, 6], "logprobs": [-0.1, -0.2]}, "2 tokens"),
    ],
)
def test_a_wrong_answer_is_seen(told: dict[str, Any], why: str) -> None:
    [sentence] = _judged({**RIGHT, **told})
    assert why in sentence
    assert sentence.startswith("lap 3, request 0")


def test_right_answers_and_those_given_up_are_not() -> None:
    assert _judged(RIGHT) == []
    assert _judged({**RIGHT, "logprobs": [-0.1001, -0.2, -0.3]}) == []


def test_where_two_tokens_are_as_likely_the_rest_is_not_compared() -> None:
    assert _judged({**RIGHT, "tokens": [5, 9, 9]}, leads=[1.0, 1e-6, 1.0]) == []


def test_an_answer_that_did_not_come_is_seen() -> None:
    lap = Lap("0")
    lap.add(RIGHT, [1])
    assert "no answer" in lap.judge([[]])[0]


@pytest.mark.parametrize("name", LIMITS)
def test_what_grows_is_seen(name: str) -> None:
    first = dict.fromkeys(LIMITS, 100.0)
    assert grown(first, {**first, name: 100.0 + LIMITS[name]}) == []
    [sentence] = grown(first, {**first, name: 101.0 + LIMITS[name]})
    assert sentence.startswith(name)


def test_a_table_that_grows_is_seen() -> None:
    assert grown_tables({"a": 100, "b": 5}, {"a": 120, "b": 30, "c": 1}) == []
    [sentence] = grown_tables({"a": 100}, {"a": 500})
    assert sentence == "a held 100 things at first and 500 at the end"


def test_the_table_says_who_did_what() -> None:
    def row(note: str, **counts: int) -> dict[str, Any]:
        return {"counts": counts, "note": note}

    table = markdown(
        {
            "cells": {
                "soak/30 minutes": row("", laps=1),
                "yardstick/s3": row("this commit: byte flipped: exact; S3 500: exact", faults=2),
                "yardstick/vLLM obj": row("vllm 9: byte flipped: WRONG ANSWER, not recovered; S3 500: hung", faults=2),
                "yardstick/LMCache fs": row("LMCache fs: not installed here"),
            }
        }
    )
    assert table.splitlines()[:4] == [
        "|  | s3 | vLLM obj |",
        "| --- | --- | --- |",
        "| byte flipped | exact | **WRONG ANSWER**, not recovered |",
        "| S3 500 | exact | **hung** |",
    ]
    assert "LMCache fs: LMCache fs (not installed here)" in table


def test_looking_for_a_kernel_in_llvmlites_library_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    from tests.prove.yardstick import beside_llvmlite

    library = beside_llvmlite.ffi.lib
    monkeypatch.setattr(library, "_fntab", dict(library._fntab))
    monkeypatch.setattr(beside_llvmlite, "serve", lambda: 7)
    assert beside_llvmlite.main() == 7
    assert vars(library).get("kernel") is None
