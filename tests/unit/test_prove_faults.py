"""A few cells of the fault matrix, with one round of each fault; and what the matrix says of itself."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nixl_offload.engine import pump
from nixl_offload.movers import nixl
from nixl_offload.movers.base import Op
from tests.prove import faults
from tests.prove.cells import Outcome
from tests.prove.faults.injection import _arrive_object
from tests.prove.faults.leaks import SOCKETS_PER_MOVER, Leaks
from tests.prove.faults.media import Medium, Piece, damage
from tests.prove.faults.table import FAULTS, POINTS, TIERS, faults_at, why_not
from tests.prove.running import cells_of, run

FEW = "tests.prove.faults.few"


def test_every_fault_at_every_point_is_tried_or_has_a_reason() -> None:
    for tier in TIERS:
        for point in POINTS:
            tried = faults_at(tier, point)
            reasons = {fault: why_not(tier, point, fault) for fault in FAULTS if fault not in tried}
            assert all(reasons.values())
    # What nearly everything else relies on, so that a reason too many is noticed.
    for tier in ("slab", "shared_dir", "s3_obj", "s3_obstore"):
        for point in ("store", "load", "write-through", "promotion", "shutdown", "sleep"):
            assert {"short", "hang", "flipped", "swapped", "stale", "vanished", "late write", "fork"} <= set(
                faults_at(tier, point)
            )
    assert len({cell.name for cell in faults.cells(1)}) == len(TIERS) * len(POINTS)


@pytest.mark.parametrize("names", [("slab/store", "s3_obstore/load"), ("shared_dir/load", "memory/promotion")])
def test_a_few_cells(tmp_path: Path, names: tuple[str, ...]) -> None:
    wanted = [("faults", FEW, cell) for cell in cells_of(FEW, 1) if cell.name in names]
    results = {}
    for part, cell, outcome, _ in run(wanted, 1, workers=2, logs=tmp_path):
        assert outcome.is_good(), (cell.name, outcome)
        assert outcome.counts["faults"] >= 3, outcome
        assert outcome.counts["rounds"] >= outcome.counts["rounds struck"] >= 3, outcome
        results[f"{part}/{cell.name}"] = {"counts": outcome.counts}
    assert len(results) == len(names)
    lines = faults.matrix({"cells": results}).splitlines()
    assert len(lines) == 2 + len(names)
    assert all(line.count("|") == len(FAULTS) + 2 for line in lines)


@pytest.mark.parametrize("lengths", [(100, 100, 100), (100, 100, 300)])
def test_a_shard_of_the_wrong_length_has_another_length(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    medium = Medium("shared_dir", tmp_path, is_small=False)
    pieces = [Piece(tmp_path / str(at), 0, length) for at, length in enumerate(lengths)]
    for seed in range(40):
        for piece in pieces:
            piece.path.write_bytes(random.Random(seed).randbytes(piece.length))
        spoilt = damage("wrong length", medium, pieces, random.Random(seed), {})
        assert spoilt
        assert all(piece.path.stat().st_size != piece.length for piece in spoilt)


def test_a_late_put_replaces_an_object_and_a_late_get_fills_memory(tmp_path: Path) -> None:
    medium, memory = Medium("s3", tmp_path, is_small=False), np.arange(8, dtype=np.uint8)
    places = [(memory.ctypes.data, memory.nbytes)]
    _arrive_object(medium, Op.READ, places, "folder/object", [(0, 8)])
    assert memory.tolist() == [*range(8)], "there is no such object"
    _arrive_object(medium, Op.WRITE, places, "folder/object", [(0, 8)])
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["object"]
    memory[:] = 0
    _arrive_object(medium, Op.READ, places, "folder/object", [(0, 8)])
    assert memory.tolist() == [*range(8)]


@pytest.mark.parametrize("leaks", [False, True])
def test_files_are_judged_although_some_are_left_behind_with_storage_that_hung(
    monkeypatch: pytest.MonkeyPatch, leaks: bool
) -> None:
    outcome = Outcome()
    looks = _looks(monkeypatch, "slab", outcome)
    with contextlib.ExitStack() as opened:
        for server in range(12):
            if server in {3, 6, 9}:
                if server == 6:
                    nixl.keep_forever(object())
                else:
                    pump.LEAKED.append(object())
                opened.enter_context(open(os.devnull))
            if leaks:
                opened.enter_context(open(os.devnull))
            looks.check_after()
    assert looks.judged >= 1
    assert bool(outcome.leaks) == leaks


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("more", [1, SOCKETS_PER_MOVER, SOCKETS_PER_MOVER + 1])
def test_a_mover_that_is_left_behind_may_open_some_sockets_later_but_no_files(
    monkeypatch: pytest.MonkeyPatch, kept: bool, more: int
) -> None:
    assert _leaks_of(monkeypatch, kept, [socket.socket] * more) == (not kept or more > SOCKETS_PER_MOVER)
    assert _leaks_of(monkeypatch, kept, [functools.partial(open, os.devnull)])


def _leaks_of(
    monkeypatch: pytest.MonkeyPatch, kept: bool, opening: Sequence[Callable[[], AbstractContextManager[object]]]
) -> bool:
    outcome = Outcome()
    looks = _looks(monkeypatch, "s3_obj", outcome)
    with contextlib.ExitStack() as opened:
        for server in range(12):
            if server == 6 and kept:
                nixl.keep_forever(object())
            if server == 8:
                for one in opening:
                    opened.enter_context(one())
            looks.check_after()
    return bool(outcome.leaks)


def _looks(monkeypatch: pytest.MonkeyPatch, tier: str, outcome: Outcome) -> Leaks:
    monkeypatch.setattr(pump, "LEAKED", [])
    monkeypatch.setattr(nixl, "keep_forever", nixl.keep_forever)
    monkeypatch.setattr("tests.prove.faults.leaks.SOON_S", 0.1)
    monkeypatch.setattr("tests.prove.faults.leaks.gc", SimpleNamespace(collect=lambda: None))  # half a second each
    unharmed = SimpleNamespace(spared=contextlib.nullcontext)
    looks = Leaks(SimpleNamespace(faults=unharmed, outcome=outcome, where="here", tier=tier))  # type: ignore[arg-type]
    monkeypatch.setattr(looks, "_check_threads", lambda: None)  # of other tests
    return looks
