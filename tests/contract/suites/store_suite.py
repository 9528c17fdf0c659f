"""The conformance suite of stores.

Subclass ``StoreSuite`` in a test module under a name that pytest collects, and override the fixture ``made``. What is
stored is set and read raw, behind the store's back, so that no store vouches for itself. Threading: tests that need
threads start and join their own.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from nixl_offload.errors import StoreError
from nixl_offload.stores.base import Store

KIB = 1 << 10
MIB = 1 << 20
CLOCK_SKEW_S = 5.0


class StoreRig(ABC):
    """A store that begins empty, and raw access to what it holds."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @abstractmethod
    def raw_set(self, contents: Mapping[str, bytes]) -> None:
        """Put objects without the store."""

    @abstractmethod
    def raw_get(self, name: str) -> bytes | None:
        """Return an object's content without the store; None when it is absent."""

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def read(store: Store, name: str, offset: int, length_bytes: int) -> bytes:
    """Read into memory of its own."""
    memory = bytearray(os.urandom(length_bytes))
    store.read_into(name, offset, memoryview(memory))
    return bytes(memory)


def write(store: Store, name: str, content: bytes) -> None:
    """Write bytes."""
    store.write(name, memoryview(content))


def cause_of(call: Callable[[], object]) -> str:
    """Return the cause of the StoreError that ``call`` must raise."""
    with pytest.raises(StoreError) as caught:
        call()
    return caught.value.cause


CALLS: dict[str, Callable[[Store], object]] = {
    "head": lambda store: store.head("x/1"),
    "read": lambda store: read(store, "x/1", 0, 10),
    "write": lambda store: write(store, "x/1", b"0123456789"),
    "delete": lambda store: store.delete(["x/1"]),
    "list": lambda store: list(store.list("x/")),
}
"""Each kind of call, of object ``x/1``."""


class StoreSuite:
    """Conformance of a store. Attributes say what a backend takes."""

    many = 60
    """Objects of the tests of listing and deleting many; over 1,000 they take more than one of S3's pages."""

    @pytest.fixture
    def made(self) -> StoreRig:
        """A new, empty store."""
        raise NotImplementedError

    @pytest.fixture
    def rig(self, made: StoreRig) -> Iterator[StoreRig]:
        """The same; closed afterwards."""
        yield made
        made.close()

    @pytest.fixture
    def store(self, rig: StoreRig) -> Store:
        """The store of the rig."""
        return rig.store

    def test_what_is_written_is_read(self, rig: StoreRig) -> None:
        """Any size round-trips, replaces all that was there, is what raw access finds, and is told by ``head``."""
        for size_bytes in [0, 1, 4095, 8 * MIB + 1, 64 * KIB]:
            content = os.urandom(size_bytes)
            write(rig.store, "ns/ab/name.0000", content)
            assert rig.raw_get("ns/ab/name.0000") == content
            assert read(rig.store, "ns/ab/name.0000", 0, size_bytes) == content
            found = rig.store.head("ns/ab/name.0000")
            assert found is not None
            assert (found.name, found.size_bytes) == ("ns/ab/name.0000", size_bytes)
            assert abs(found.modified_s - time.time()) < CLOCK_SKEW_S

    def test_ranges(self, rig: StoreRig) -> None:
        """Any range inside the object, and nothing of what is around it."""
        content = os.urandom(3 * MIB + 5)
        rig.raw_set({"x/1": content})
        ranges = [(0, 1), (0, 4096), (1, 4096), (4096, MIB), (MIB - 1, 2 * MIB + 3), (len(content) - 1, 1)]
        for offset, length_bytes in ranges:
            assert read(rig.store, "x/1", offset, length_bytes) == content[offset : offset + length_bytes]

    def test_memory_of_every_kind(self, store: Store) -> None:
        """Mapped pages, a window of larger memory, items wider than a byte; only the window is written."""
        content = os.urandom(64 * KIB)
        store.write("x/1", memoryview(content).cast("Q"))
        with mmap.mmap(-1, 128 * KIB) as pages:
            pages[:] = b"\xa5" * len(pages)
            with memoryview(pages) as whole, whole[4096 : 4096 + len(content)] as window:
                store.read_into("x/1", 0, window)
            assert pages[4096 : 4096 + len(content)] == content
            assert set(pages[:4096]) | set(pages[4096 + len(content) :]) == {0xA5}
        words = memoryview(bytearray(len(content))).cast("Q")
        store.read_into("x/1", 0, words)
        assert words.tobytes() == content

    def test_an_object_that_ends_early_is_short(self, rig: StoreRig) -> None:
        """Whether it ends inside the range, at its beginning or before it; an empty object too."""
        rig.raw_set({"x/five": b"01234", "x/empty": b""})
        ranges = [("five", 0, 6), ("five", 4, 2), ("five", 5, 1), ("five", 9, 4096), ("empty", 0, 1)]
        for name, offset, length_bytes in ranges:
            assert cause_of(partial(read, rig.store, f"x/{name}", offset, length_bytes)) == "short"
        assert read(rig.store, "x/five", 5, 0) == b""
        assert cause_of(lambda: read(rig.store, "x/five", 6, 0)) == "short"

    def test_absence_is_an_answer(self, store: Store) -> None:
        """``head``, ``delete`` and ``list`` say it; a read is an error."""
        assert store.head("ns/ab/none.0000") is None
        store.delete(["ns/ab/none.0000"])
        store.delete([])
        assert list(store.list("ns/")) == []
        assert cause_of(lambda: read(store, "ns/ab/none.0000", 0, 1)) == "missing"
        assert cause_of(lambda: read(store, "ns/ab/none.0000", 0, 0)) == "missing"

    def test_readers_never_see_a_mix(self, store: Store) -> None:
        """While an object is rewritten over and over, each read is all of one version."""
        size_bytes, stop, seen = 256 * KIB, threading.Event(), set()
        write(store, "x/1", bytes(size_bytes))

        def rewrite() -> None:
            try:
                for number in range(1, 40):
                    write(store, "x/1", bytes([number]) * size_bytes)
            finally:
                stop.set()

        def look() -> None:
            while not stop.is_set():
                content = read(store, "x/1", 0, size_bytes)
                assert len(set(content)) == 1
                seen.add(content[0])

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(rewrite), *(pool.submit(look) for _ in range(3))]:
                done.result()
        assert len(seen) > 1

    def test_delete_many(self, rig: StoreRig) -> None:
        """All that were named and nothing else, absent ones among them; deleting again is fine."""
        names = [f"x/{number:05d}" for number in range(self.many)]
        rig.raw_set(dict.fromkeys([*names, "x/kept", "y/kept"], b"1"))
        asked = [*names[::2], "x/absent", "z/absent", *names[1::2]]
        rig.store.delete(asked)
        assert [found.name for found in rig.store.list("")] == ["x/kept", "y/kept"]
        assert rig.raw_get(names[0]) is None
        rig.store.delete(asked)

    def test_list_is_in_the_order_of_names(self, rig: StoreRig) -> None:
        """By bytes, as S3 does it: "a-b/" and "a.b/" come before "a/"."""
        names = ["n/a-b/1", "n/a.b/1", "n/a/1", "n/a/10", "n/a/2/x", "n/a0/1", "n/b/1", "n/z", "o/1"]
        rig.raw_set({name: name.encode() for name in reversed(names)})
        found = list(rig.store.list(""))
        assert [info.name for info in found] == names
        assert [info.size_bytes for info in found] == [len(name) for name in names]
        assert all(abs(info.modified_s - time.time()) < CLOCK_SKEW_S for info in found)
        starts = ["", "n/a-b/1", "n/a/10", "n/z", "m", "n/a/2", "zzz"]
        for directory, start_after in itertools.product(["", "n/", "n/a/", "n/zz/", "o/", "n/a/2/"], starts):
            expected = [name for name in names if name.startswith(directory) and name > start_after]
            got = [info.name for info in rig.store.list(directory, start_after=start_after)]
            assert got == expected, (directory, start_after)

    def test_list_goes_over_pages_and_can_be_taken_up_again(self, rig: StoreRig) -> None:
        """All of many names, once each, in order; and the rest of them after an interruption anywhere."""
        names = [f"ns/{number % 16:02x}/{number:05d}.0000" for number in range(self.many)]
        rig.raw_set(dict.fromkeys(names, b"1"))
        names.sort()
        assert [info.name for info in rig.store.list("ns/")] == names
        first = [info.name for info in itertools.islice(rig.store.list("ns/"), self.many // 3)]
        rest = [info.name for info in rig.store.list("ns/", start_after=first[-1])]
        assert first + rest == names

    def test_a_closed_store_raises_nothing_foreign(self, store: Store) -> None:
        """Every call raises StoreError or goes on, and closing again is fine."""
        write(store, "x/1", b"0123456789")
        store.close()
        store.close()
        for call in CALLS.values():
            with suppress(StoreError):
                call(store)


__all__ = ["CALLS", "StoreRig", "StoreSuite", "cause_of", "read", "write"]
