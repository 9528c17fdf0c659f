"""The yardstick says so where a side cannot be tried, or a fault has met nothing; over an engine that only pretends."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from examples.demo.engine import Answer
from tests.prove.soak import troubles
from tests.prove.yardstick import trial, try_side
from tests.prove.yardstick.happenings import REQUESTS
from tests.prove.yardstick.sides import Piece, Side
from tests.prove.yardstick.trial import NoHitsError, Trial, Verdict
from tests.s3.proxy import FaultProxy
from tests.vllm.damage import FULL_TOKENS, PROMPT_CHUNKS


@dataclass
class Pretended:
    """Engine, workshop, answers and world in one. ``asks``: whether it sends a GET for each prompt."""

    proxy: FaultProxy
    hit_tokens: int = FULL_TOKENS
    asks: bool = True
    pieces: list[Piece] = field(default_factory=list)
    prompts: Iterator[list[int]] = field(default_factory=lambda: ([n] for n in count()))

    def start_engine(self, **_: Any) -> Pretended:
        return self

    def generate(self, prompts: list[list[int]], **_: Any) -> list[Answer]:
        for n in range(PROMPT_CHUNKS):
            self.pieces.append(Piece(Path(f"{prompts[0]} {n}")))
        if self.asks:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.proxy.endpoint}/bucket/key", timeout=1.0)
        return [Answer((1,), (0.0,), 0, 0.0, 0.0, "length", {"vllm:external_prefix_cache_hits": self.hit_tokens})]

    def right(self, _: list[int]) -> Answer:
        return Answer((1,), (0.0,), 0, 0.0, 0.0, "length")

    def reset_prefix_cache(self) -> None:
        self.pieces = []

    def call(self, *_: Any, **__: Any) -> None: ...

    def close(self) -> None: ...

    def outages(self) -> dict[str, Callable[[], AbstractContextManager[object]]]:
        return {"S3 500": lambda: self.proxy.inject(REQUESTS["S3 500"])}

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        yield


@pytest.fixture
def proxy() -> Iterator[FaultProxy]:
    with FaultProxy(1) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("AGAIN_S", "STORED_S", "IN_FLIGHT_S"):
        monkeypatch.setattr(trial, limit, 0.5)


def tried(pretended: Pretended, faults: str) -> list[Verdict]:
    side = Side("pretended", {}, lambda: pretended.pieces, is_bucket=True)
    made = Trial(pretended, side, pretended, pretended, faults)  # type: ignore[arg-type]
    return list(made.verdicts())


def test_a_side_that_serves_nothing_from_storage_cannot_be_tried(proxy: FaultProxy) -> None:
    with pytest.raises(NoHitsError, match="nothing comes from storage"):
        tried(Pretended(proxy, hit_tokens=0), "S3 500")


@pytest.mark.parametrize("asks", [True, False])
def test_an_outage_that_no_request_meets_is_told_so(proxy: FaultProxy, asks: bool) -> None:
    verdicts = [*tried(Pretended(proxy, asks=asks), "S3 500"), *tried(Pretended(proxy, asks=asks), "in flight")]
    assert [verdict.was_met for verdict in verdicts] == [asks, asks]
    assert str(verdicts[0]) == ("S3 500: exact" if asks else "S3 500: exact, not met")


def test_one_of_ours_without_a_filesystem_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(troubles, "make_disk", lambda *_: None)
    assert try_side("shared_dir", 1).missed == ["shared_dir: no filesystem of its own can be made here"]
    assert try_side("vLLM fs", 1).is_good()
