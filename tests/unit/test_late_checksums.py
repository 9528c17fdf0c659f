"""Proves: a chunk that memory took without checksums gets them on its way to a farther tier, once, before the write;
what lies there is what ``verify: always`` would have written; an image without them is served from no storage; and a
page that gets them while others read it is never taken for damage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import numpy.typing as npt
import pytest

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.chunk.header import (
    CHECKSUMS_AT,
    HEADER_BYTES,
    MAX_BLOCKS_PER_CHUNK,
    ExpectedRows,
    check_headers,
    decode_header,
    encode_headers,
    lacks_checksums,
)
from nixl_offload.engine import host as host_module, paths as paths_module
from nixl_offload.engine.host import SlotHeaders
from nixl_offload.types import Outcome
from tests.unit.chain_rig import BUCKET, FILE, MEMORY, ChainRig, blocks_of
from tests.unit.engine_rig import NUM_BLOCKS, SHAPES, opened

OK, FAILED, CORRUPT = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT
Make = Callable[..., ChainRig]
Sums = list[npt.NDArray[np.uint64]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with opened(lambda *movers, **options: ChainRig(Path(mkdtemp(dir=tmp_path)), *movers, **options)) as make:
        yield make


def lacks(rig: ChainRig, slot: int, group: int = 0) -> bool:
    return lacks_checksums(rig.host_bytes(slot, group)[:HEADER_BYTES])


@pytest.mark.parametrize("shape", list(SHAPES))
def test_storage_holds_what_always_writes(make: Make, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, header and padding too, for whole chunks and for the tail that a sliding window leaves; and it is
    served from there.
    """
    monkeypatch.setattr(paths_module.time, "time", lambda: 1_700_000_000.5)
    rigs = {verify: make(shape=shape, verify=verify) for verify in ("checksum", "header", "always")}
    for group in range(len(rigs["checksum"].layout.groups)):
        for number, first in ((0, 0), (1, 2)):
            found = {}
            for verify, rig in rigs.items():
                job = 100 * group + 10 * number
                blocks = list(blocks_of(number))[first:]
                rig.host_bytes(number, group)[:] = 0xAB
                stored = rig.store(job, [rig.chunk(number, MEMORY, blocks, group=group, first=first)])
                assert stored == (OK,)
                assert lacks(rig, number, group) is (verify != "always")
                assert rig.moves(job + 1, [rig.move(number, MEMORY, FILE, group)]) == (OK,)
                assert not lacks(rig, number, group)
                assert np.array_equal(rig.stored(FILE, number, group), rig.host_bytes(number, group))
                found[verify] = rig.stored(FILE, number, group).tobytes()
                wanted = rig.blocks(blocks, group)
                targets = list(range(30, 30 + len(blocks)))
                assert rig.load(job + 2, [rig.chunk(number, FILE, targets, group=group, first=first)]) == (OK,)
                assert np.array_equal(rig.blocks(targets, group), wanted)
            assert found["checksum"] == found["always"] == found["header"]


def test_two_tiers_that_take_a_chunk_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sum it at the same time, and both write the same."""
    rig, both = make(), threading.Barrier(2, timeout=30)

    def together(payloads: Sequence[npt.NDArray[np.uint8]]) -> Sums:
        both.wait()
        return payload_checksums(payloads)

    monkeypatch.setattr(host_module, "payload_checksums", together)
    assert rig.store(1, [rig.chunk(0, MEMORY, blocks_of(0))]) == (OK,)
    assert rig.moves(2, [rig.move(0, MEMORY, FILE), rig.move(0, MEMORY, BUCKET)]) == (OK, OK)
    assert np.array_equal(rig.stored(FILE, 0), rig.stored(BUCKET, 0))
    decode_header(rig.stored(FILE, 0)[:HEADER_BYTES])


@pytest.mark.parametrize("verify", ["checksum", "header", "always"])
def test_an_image_without_checksums_is_served_from_no_storage(make: Make, verify: str) -> None:
    """Only a bug could have written it. It is refused for any ``verify``, directly or through memory."""
    rig = make(verify=verify)
    other = make()
    assert other.store(1, [other.chunk(0, MEMORY, blocks_of(0))]) == (OK,)
    rig.put(FILE, 0, other.host_bytes(0))
    before = rig.blocks(range(NUM_BLOCKS))
    assert rig.load(1, [rig.chunk(0, FILE, blocks_of(3))]) == (CORRUPT,)
    assert rig.results[1].errors == ("corrupt: version",)
    assert rig.load(2, [rig.chunk(0, FILE, blocks_of(3), host=0)], ticket=2) == (CORRUPT,)
    assert rig.moves(3, [rig.move(0, FILE, MEMORY)]) == (CORRUPT,)
    assert rig.moves(4, [rig.move(0, FILE, BUCKET)]) == (CORRUPT,)
    assert np.array_equal(rig.blocks(range(NUM_BLOCKS)), before)
    assert rig.load(5, [rig.chunk(0, MEMORY, blocks_of(3))]) == (CORRUPT,)


def test_what_failed_on_its_way_into_memory_has_no_header_there(make: Make) -> None:
    """The slot of a refused promotion serves neither the new chunk nor the old one."""
    rig = make()
    assert rig.store(1, [rig.chunk(0, MEMORY, blocks_of(0))]) == (OK,)
    image = rig.image(7)
    image[HEADER_BYTES] ^= 1
    rig.put(FILE, 7, image)
    rig.chain.submit_load(2, [rig.chunk(7, FILE, blocks_of(3), host=0)], promotion_ticket=9)
    assert rig.collect(2).outcomes == (CORRUPT,)
    assert rig.settle(9).outcomes == (CORRUPT,)
    assert not rig.host_bytes(0)[:8].any()
    assert rig.load(3, [rig.chunk(0, MEMORY, blocks_of(3))]) == (CORRUPT,)
    assert rig.load(4, [replace(rig.chunk(7, MEMORY, blocks_of(3)), location=rig.at(MEMORY, 0))]) == (CORRUPT,)


def test_damage_to_a_header_in_memory_is_not_written(make: Make) -> None:
    rig = make()
    chunks = [rig.chunk(number, MEMORY, blocks_of(number)) for number in range(3)]
    assert rig.store(1, chunks) == (OK,) * 3
    rig.host_bytes(1)[90] ^= 1
    assert rig.moves(2, [rig.move(number, MEMORY, FILE) for number in range(3)]) == (OK, CORRUPT, OK)
    assert not rig.stored(FILE, 1).any()


class HalfWritten(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A page whose writer stops half way until a reader has seen it so."""

    half: threading.Event
    seen: threading.Event

    def __setitem__(self, where: object, value: object) -> None:
        whole, mine = np.asarray(value, dtype=np.uint8), self.view(np.ndarray)
        mine[: CHECKSUMS_AT + 100] = whole[: CHECKSUMS_AT + 100]
        self.half.set()
        assert self.seen.wait(30)
        mine[:] = whole


@pytest.mark.parametrize("damaged", [False, True])
def test_a_half_written_page_is_looked_at_again(damaged: bool) -> None:
    """While it is being written it looks damaged; afterwards only if it is."""
    blocks, headers = MAX_BLOCKS_PER_CHUNK, SlotHeaders()
    expect = ExpectedRows(bytes(32), [bytes(36)], 3, blocks, 1000)
    pages = encode_headers(expect, None, [0]).copy()
    page = pages[0].view(HalfWritten)
    page.half, page.seen = threading.Event(), threading.Event()
    if damaged:
        pages[0, 100] ^= 1
    with ThreadPoolExecutor(1) as writer:
        written = writer.submit(headers.complete, page, np.ones((blocks, 1000), dtype=np.uint8))  # type: ignore[arg-type]
        assert page.half.wait(30)
        assert set(check_headers(pages, expect, may_lack_checksums=True).errors) == {0}
        threading.Timer(0.05, page.seen.set).start()
        found = headers.check(list(pages), expect)
        written.result(30)
    assert bool(found.errors) is damaged
    assert not lacks_checksums(pages[0])
