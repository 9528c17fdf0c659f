"""Proves that a forked process never ends what it has inherited: that hangs or crashes it, or changes others' files."""

from __future__ import annotations

import gc
import multiprocessing
import sqlite3
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_offload.index.database import Database
from nixl_offload.keep import keep_in_children


class Thing:
    """Something that can be watched."""


@pytest.fixture(autouse=True)
def _collects_little() -> Iterator[None]:
    """Children collect what a test has made, not all that the tests before it have left: that takes a minute."""
    gc.freeze()
    yield
    gc.unfreeze()


def holds_in_child(holds: Callable[[], bool]) -> bool:
    child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(0 if holds() else 3))
    child.start()
    child.join(200.0)
    assert child.exitcode in (0, 3)
    return child.exitcode == 0


def test_what_is_kept_in_children_lives_on_there_and_is_freed_here() -> None:
    held = [Thing()]
    lives = weakref.ref(held[0])

    def lives_on() -> bool:
        held.clear()
        gc.collect()
        return lives() is not None

    assert not holds_in_child(lives_on)
    keep_in_children(held[0])
    assert holds_in_child(lives_on)
    assert not lives_on()


def test_a_child_does_not_close_the_index(tmp_path: Path) -> None:
    """SQLite would wait for a lock that the writer had, or roll the parent's transaction back."""
    held = [Database(str(tmp_path / "index.sqlite"), {})]
    held[0].connect()
    open_before = connections()

    def left_open() -> int:
        held.clear()
        return connections()

    assert holds_in_child(lambda: left_open() == open_before)
    assert left_open() == open_before - 1


def connections() -> int:
    gc.collect()
    return sum(type(each) is sqlite3.Connection for each in gc.get_objects())
