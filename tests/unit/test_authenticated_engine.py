"""Engines whose chunks have MACs: every path into storage signs, every path out verifies, in every layout, also beside
a tier without MACs. Work that only a device could do is done in host memory then.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.chunk.authentication import ChunkKeys, stated_key_id
from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.errors import FormatError
from nixl_offload.movers.threaded import CopyMover
from nixl_offload.types import Outcome
from tests.unit.chain_rig import BUCKET, FILE, MEMORY, ChainRig
from tests.unit.device_lab import Way, assert_round_trip, open_lab
from tests.unit.engine_rig import Rig, opened
from tests.unit.link_rig import object_files, objects, shards, tree

OK, FAILED, CORRUPT = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT
KEYS = ChunkKeys([os.urandom(32), os.urandom(32)])
Make = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with opened(partial(Rig, tmp_path, keys=KEYS)) as build:
        yield build


def is_signed(image: bytes, block_bytes: int) -> bool:
    page = np.frombuffer(image, dtype=np.uint8)[:HEADER_BYTES]
    header = decode_header(page)
    rows = np.frombuffer(image, dtype=np.uint8)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    try:
        KEYS.verify(page, rows.reshape(-1, block_bytes)[header.first_valid_block :])
    except FormatError:
        return False
    return True


def test_only_the_forged_chunk_of_a_batch_fails(make: Make, tmp_path: Path) -> None:
    """Forged: other content, valid but for the missing MAC."""
    rig = make("per_layer", link=tree(tmp_path / "shared"), staging_slots=32)
    chunks = [rig.chunk(number, range(4 * number, 4 * number + 4)) for number in range(8)]
    assert rig.store(1, chunks) == (OK,) * 8
    assert all(is_signed(path.read_bytes(), rig.layout.groups[0].block_bytes) for path in shards(tmp_path / "shared"))
    wanted = [rig.bytes_of(range(4 * number, 4 * number + 4)) for number in range(8)]
    victim = next(path for path in shards(tmp_path / "shared") if path.name.startswith(chunks[3].key.hex()))
    signature = bytearray(victim.read_bytes())
    plain = make("per_layer", link=tree(tmp_path / "plain"), keys=None, seed=9)
    plain.store(1, [plain.chunk(3, range(12, 16))])
    victim.write_bytes(shards(tmp_path / "plain")[0].read_bytes())
    rig.wipe(0xEE)
    assert rig.load(2, chunks) == (OK, OK, OK, CORRUPT, OK, OK, OK, OK)
    for number in range(8):
        found = rig.bytes_of(range(4 * number, 4 * number + 4))
        assert found == (wanted[number] if number != 3 else b"\xee" * len(found))
    victim.write_bytes(signature)
    assert rig.load(3, chunks) == (OK,) * 8


def test_verify_header_still_checks_macs(make: Make, tmp_path: Path) -> None:
    rig = make("direct_blocks", link=tree(tmp_path / "shared"), verify="header")
    assert rig.store(1, [rig.chunk(0, [0, 1, 2, 3])]) == (OK,)
    (path,) = shards(tmp_path / "shared")
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 77] ^= 1
    path.write_bytes(data)
    assert rig.load(2, [rig.chunk(0, [5, 6, 7, 8])]) == (CORRUPT,)


@pytest.mark.parametrize("way", ["direct", "device", "host"])
@pytest.mark.parametrize("shape", ["packed_blocks", "per_layer_pages"])
def test_on_a_device_chunks_go_through_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shape: str, way: Way
) -> None:
    """The log says why. The device computes checksums as usual; the CPU computes MACs."""
    with open_lab(tmp_path) as lab:
        with caplog.at_level(logging.INFO, logger="nixl_offload.engine"):
            rig = lab.make(None, shape, way, keys=KEYS)
        assert caplog.text.count("packed through host memory, because MACs are made there (authenticate)") == 1
        assert_round_trip(rig, lambda: time.sleep(0.005))
        assert KEYS.first_id in Path(rig.slab.path).read_bytes()


# -- with memory in front, and a slab without MACs beside -----------------------------------------------------------


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[ChainRig]:
    """Memory, a slab without MACs, and objects with MACs."""
    movers = CopyMover(), object_files(tmp_path / "bucket")
    rig = ChainRig(tmp_path, *movers, bucket=objects(), keys=KEYS)
    yield rig
    rig.close()


def stored_objects(tmp_path: Path) -> list[bytes]:
    return [path.read_bytes() for path in shards(tmp_path / "bucket")]


def test_chunks_of_a_slab_without_macs_are_signed_on_their_way(chain: ChainRig, tmp_path: Path) -> None:
    """Both ways: through a relay slot, and from memory after a promotion."""
    rig = chain
    for number in (1, 2):
        rig.put(FILE, number)
    assert rig.moves(1, [rig.move(1, FILE, BUCKET)]) == (OK,)
    rig.chain.submit_load(2, [rig.chunk(2, FILE, [0, 1, 2, 3], host=2)], promotion_ticket=7)
    assert rig.collect(2).outcomes == (OK,)
    assert rig.settle(7).outcomes == (OK,)
    assert rig.moves(3, [rig.move(2, MEMORY, BUCKET)]) == (OK,)
    images = stored_objects(tmp_path)
    assert len(images) == 2
    assert all(is_signed(image, rig.layout.groups[0].block_bytes) for image in images)


def test_chunks_signed_with_the_old_key_are_passed_on_unchanged(chain: ChainRig, tmp_path: Path) -> None:
    rig = chain
    image, rows = rig.image(3), rig.payload(3)
    second = ChunkKeys([KEYS._keys[known] for known in list(KEYS._keys)[1:]])
    image[:HEADER_BYTES] = second.signed(image[:HEADER_BYTES], rows)
    rig.host_bytes(3)[:] = image
    assert rig.moves(1, [rig.move(3, MEMORY, BUCKET)]) == (OK,)
    (stored,) = stored_objects(tmp_path)
    assert stated_key_id(stored[:HEADER_BYTES]) == second.first_id
    assert rig.load(2, [rig.chunk(3, BUCKET, [0, 1, 2, 3])]) == (OK,)
