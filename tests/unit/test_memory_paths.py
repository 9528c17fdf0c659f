"""Proves of the memory tier: chunks of every layout come back bit for bit from host slots, whose images are those of a
file once they have checksums; no chunk is served from a slot whose header is not its own, and with ``verify: always``
none whose bytes have changed; a slot is told of only when no copy is at it; ``wait`` frees source blocks and nothing
sooner; what a device does not end costs its slots and nobody's wait.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.engine import paths
from nixl_offload.engine.pump import LEAKED
from nixl_offload.errors import FormatError
from nixl_offload.types import Outcome
from tests.headers import Expected, check_header
from tests.unit.device_rig import ThreadedDevice, ThreadedStream, devices
from tests.unit.engine_rig import CHUNK_BLOCKS, NAMESPACE, NUM_BLOCKS, SHAPES, MemoryRig, opened, until
from tests.unit.rank_rig import causes_of

OK, FAILED, CORRUPT, DROPPED, TAINTED = (Outcome.OK, Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED, Outcome.TAINTED)
Make = Callable[..., MemoryRig]


@pytest.fixture
def make() -> Iterator[Make]:
    with opened(MemoryRig) as make:
        yield make


device = pytest.fixture(devices)


def out_of(rig: MemoryRig) -> ThreadedStream:
    """The stream that copies blocks to slots."""
    stream: ThreadedStream = rig.engine.paths.packer._out
    return stream


# -- round trips ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["always", "checksum"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_slot_holds_the_image_that_a_file_would(make: Make, shape: str, verify: str) -> None:
    """Header, checksums of each block, payload, and zeros for padding whatever lay there before. Unless ``always``, the
    checksums are still to be added, and until then no reader of storage would take the header.
    """
    rig = make(shape, verify=verify)
    for group in range(len(rig.shape.groups)):
        blocks = [5, 4, 30, 31]
        rig.memory(group)[:] = 0xAB
        assert rig.store(group, [rig.chunk(group, blocks, group=group)]) == (OK,)
        image = rig.memory(group)
        block_bytes = rig.layout.groups[group].block_bytes
        end = HEADER_BYTES + CHUNK_BLOCKS * block_bytes
        payload = image[HEADER_BYTES:end]
        expected = Expected(NAMESPACE, rig.key(group, group), group, CHUNK_BLOCKS, block_bytes)
        if verify == "checksum":
            assert (
                check_header(image[:HEADER_BYTES], expected, may_lack_checksums=True).checksums == (0,) * CHUNK_BLOCKS
            )
            with pytest.raises(FormatError, match="algorithm 0"):
                check_header(image[:HEADER_BYTES], expected)
            rig.host.headers.complete(image[:HEADER_BYTES], payload.reshape(CHUNK_BLOCKS, -1))
        header = check_header(image[:HEADER_BYTES], expected)
        assert payload.tobytes() == rig.bytes_of(blocks, group)
        assert header.checksums == tuple(block_checksums(payload.reshape(CHUNK_BLOCKS, block_bytes)).tolist())
        assert not image[end : rig.layout.slot_bytes(group)].any()


# -- never a wrong token --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["checksum", "header"])
def test_by_default_headers_are_verified_and_blocks_are_trusted(make: Make, verify: str) -> None:
    """What is promised of memory, and what is not: a header that has changed anywhere is refused; a block that has
    changed is served as it is, as vLLM would serve one of its own.
    """
    rig = make("per_layer", verify=verify)
    wanted = bytearray(rig.bytes_of([1, 2, 3, 4]))
    assert rig.store(0, [rig.chunk(2, [1, 2, 3, 4])]) == (OK,)
    rig.wipe(0xEE)
    for job, place in enumerate([*range(200), 240, 3000, HEADER_BYTES - 9, HEADER_BYTES - 1], start=1):
        for bit in (0x01, 0x80):
            rig.memory(2)[place] ^= bit
            assert rig.load(2 * job + (bit == 1), [rig.chunk(2, [5, 6, 7, 8])]) == (CORRUPT,), place
            rig.memory(2)[place] ^= bit
    assert set(rig.bytes_of(range(NUM_BLOCKS))) == {0xEE}
    rig.memory(2)[HEADER_BYTES + 5] ^= 1
    assert rig.load(999, [rig.chunk(2, [5, 6, 7, 8])]) == (OK,)
    wanted[5] ^= 1
    assert rig.bytes_of([5, 6, 7, 8]) == bytes(wanted)


@pytest.mark.parametrize("verify", ["checksum", "header", "always"])
def test_a_slot_that_is_being_given_to_another_chunk_serves_neither(
    make: Make, device: ThreadedDevice, verify: str
) -> None:
    """From before the first byte of the copy to its end; nor afterwards, if the store was given up."""
    rig = make("per_layer", device=device, verify=verify)
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4], slot=3)]) == (OK,)
    before = rig.bytes_of(range(NUM_BLOCKS))
    with out_of(rig).held():
        rig.engine.submit_store(1, [rig.chunk(1, [5, 6, 7, 8], slot=3)])
        until(lambda: not rig.memory(3)[:8].any())  # its header is invalid
        for job, number in ((2, 0), (3, 1)):
            assert rig.load(job, [rig.chunk(number, [9, 10, 11, 12], slot=3)]) == (CORRUPT,)
            assert rig.collect(job).errors == ("corrupt: magic",)
        rig.engine.wait([1], limit_s=0.01)
    assert rig.collect(1).outcomes == (FAILED,)
    assert rig.load(4, [rig.chunk(1, [9, 10, 11, 12], slot=3)]) == (CORRUPT,)
    assert rig.bytes_of(range(NUM_BLOCKS)) == before


def test_always_takes_no_chunk_without_checksums(make: Make) -> None:
    """Such as an image that another engine left in the slab."""
    rig = make("per_layer")
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    strict = make("per_layer", verify="always", host=rig.host)
    assert strict.load(0, [strict.chunk(0, [5, 6, 7, 8])]) == (CORRUPT,)
    assert strict.collect(0).errors == ("corrupt: version",)
    rig.host.headers.complete(rig.memory(0)[:HEADER_BYTES], np.ones(CHUNK_BLOCKS, dtype=np.uint64))
    assert strict.load(1, [strict.chunk(0, [5, 6, 7, 8])]) == (CORRUPT,)
    assert strict.collect(1).errors == ("corrupt: checksum",)


# -- wait, order, pressure ------------------------------------------------------------------------------------------


def test_a_store_that_wait_gave_up_keeps_its_slot_until_the_copy_is_over(make: Make, device: ThreadedDevice) -> None:
    """Its blocks change under the copy: it must not become OK; and until then its slot must not be given away."""
    rig = make("per_layer", device=device)
    with out_of(rig).held():
        rig.engine.submit_store(0, [rig.chunk(0, [1, 2, 3, 4])])
        until(lambda: bool(rig.engine._batches))
        rig.engine.wait([0], limit_s=0.02)
        rig.wipe(9)
        time.sleep(0.02)
        assert rig.engine.finished() == []
        assert not rig.engine.idle()
    assert rig.collect(0).outcomes == (FAILED,)
    assert rig.collect(0).errors == ("its blocks were given away meanwhile",)
    assert causes_of(rig.collect(0)) == ((FAILED, "needed_back", 1),)
    assert rig.load(1, [rig.chunk(0, [5, 6, 7, 8])]) == (CORRUPT,)


def test_a_load_overtakes_stores_that_have_not_begun_and_others_get_the_interpreter(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host a batch ends with its first step. The pump releases the GIL before the next batch."""
    rig, order = make("per_layer", slots=80), list[str]()
    assert rig.store(0, [rig.chunk(9, [1, 2, 3, 4])]) == (OK,)
    gather_many, scatter_many = rig.engine.paths.packer.gather_many, rig.engine.paths.packer.scatter_many

    def gather(*arguments: Any) -> Any:
        order.append("store")
        if order.count("store") == 1:
            rig.engine.submit_load(2, [rig.chunk(9, [5, 6, 7, 8])])
        return gather_many(*arguments)

    def scatter(*arguments: Any) -> Any:
        order.append("load")
        return scatter_many(*arguments)

    monkeypatch.setattr(rig.engine.paths.packer, "gather_many", gather)
    monkeypatch.setattr(rig.engine.paths.packer, "scatter_many", scatter)
    monkeypatch.setattr(paths, "HOLD_S", 0.0)
    monkeypatch.setattr(rig.engine.paths.stretch, "_let_go", lambda: order.append("let go"))
    rig.engine.submit_store(1, [rig.chunk(n % 8, [1, 2, 3, 4]) for n in range(80)])
    assert rig.collect(1).outcomes == (OK,) * 80
    assert rig.collect(2).outcomes == (OK,)
    steps = [what for what in order if what != "let go"]
    assert steps == ["store", "load", "store", "store"]
    for step, following in pairwise([at for at, what in enumerate(order) if what != "let go"]):
        assert "let go" in order[step:following]


# -- failures of the copier itself ----------------------------------------------------------------------------------


def test_a_chunk_that_cannot_be_copied_fails_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The chunks of its batch are tried again one by one. One that was alone is not."""
    rig = make("per_layer")
    packer, bad, good, asked = rig.engine.paths.packer, [1, 2, 3, 4], [5, 6, 7, 8], list[list[list[int]]]()
    gather_many = packer.gather_many

    def gather(group: int, parts: Any, fence: Any) -> Any:
        asked.append([ids.tolist() for ids, _ in parts])
        if bad in asked[-1]:
            raise RuntimeError("a block is out of order")
        return gather_many(group, parts, fence)

    monkeypatch.setattr(packer, "gather_many", gather)
    assert rig.store(0, [rig.chunk(0, bad), rig.chunk(1, good)]) == (FAILED, OK)
    assert asked == [[bad, good], [bad], [good]]
    assert "A chunk failed unexpectedly: RuntimeError('a block is out of order')" in caplog.text
    assert rig.store(1, [rig.chunk(0, bad)]) == (FAILED,)
    assert asked[3:] == [[bad]]


def test_a_fence_that_breaks_taints_what_the_device_may_still_write_to(
    make: Make, device: ThreadedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead device reports nothing. Slots that it may write are never used again; the slab is kept for ever."""
    rig = make("per_layer", device=device)

    def dead(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    kept = len(LEAKED)
    with monkeypatch.context() as patch:
        patch.setattr(rig.engine.paths.packer._kernels[0], "gather", dead)
        assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4]), rig.chunk(2, [5, 6, 7, 8])]) == (TAINTED, TAINTED)
    assert len(LEAKED) == kept + 1
    del LEAKED[kept:]
    with pytest.raises(RuntimeError, match="launch failure"):
        out_of(rig).synchronize()
    assert rig.store(1, [rig.chunk(1, [1, 2, 3, 4])]) == (OK,)


# -- close ----------------------------------------------------------------------------------------------------------


def test_close_gives_up_what_a_device_does_not_end(
    make: Make, device: ThreadedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Slots it writes to are TAINTED, waiting chunks DROPPED, and the slab's memory is kept."""
    rig, kept = make("per_layer", device=device), len(LEAKED)
    with out_of(rig).held():
        for job in range(5):
            rig.engine.submit_store(job, [rig.chunk(job, [1, 2, 3, 4])])
        until(lambda: len(rig.engine._batches) == 4)
        began_s = time.monotonic()
        with caplog.at_level(logging.ERROR):
            rig.engine.close(0.1)
        assert time.monotonic() - began_s < 2
    assert [rig.collect(job).outcomes for job in range(5)] == [(TAINTED,)] * 4 + [(DROPPED,)]
    assert "4 transfers did not end" in caplog.text
    assert any(entry[0].host is rig.host for entry in LEAKED[kept:] if isinstance(entry, tuple))
    del LEAKED[kept:]


def test_nothing_is_held_after_close(make: Make) -> None:
    """KV tensors and slab can be freed: neither a thread nor a cycle keeps them."""
    rig = make("per_layer")
    assert rig.store(0, [rig.chunk(0, [1, 2, 3, 4])]) == (OK,)
    rig.engine.close()
    rig.host.close()
    rig.results.clear()
    memory = weakref.ref(rig.host)
    engine = weakref.ref(rig.engine)
    del rig.host, rig.engine
    gc.collect()
    assert memory() is None
    assert engine() is None
    rig.engine = rig.host = SimpleNamespace(close=lambda *_: None)  # type: ignore[assignment]
