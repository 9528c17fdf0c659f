"""One value for the same bytes, wherever they lie, and another one for bytes that differ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from nixl_offload.checksum import block_checksum, block_checksums
from nixl_offload.checksum_torch import SHORT_BYTES, block_checksums_torch, xxh3_64_torch

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
# Around every boundary of the algorithm: the short forms, a stripe (64), a round (1024), multiples of eight or not.
LENGTHS = [1, 8, 16, 17, 128, 129, 240, 241, 248, 255, 256, 257, 320, 1023, 1024, 1025, 1087, 1088, 1089]
LENGTHS += [2047, 2048, 2049, 2112, 2113, 4096, 4104, 16384, 16385, 65536, 65536 + 240, 65536 + 241, 100_003]


def random_rows(blocks: int, block_bytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng((seed, blocks, block_bytes)).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


def test_the_value_is_the_public_xxh3_64() -> None:
    """Any other tool that knows XXH3-64, seed 0, can verify our files; the first value is the reference's."""
    assert block_checksum(np.zeros(0, dtype=np.uint8)) == 0x2D06800538D394C2
    assert block_checksum(memoryview(b"xxhash")) == xxhash.xxh3_64_intdigest(b"xxhash", seed=0)


@pytest.mark.parametrize("device", DEVICES)
def test_torch_and_library_agree(device: str) -> None:
    """The value computed with torch integer arithmetic on any device is the library's, whatever the length."""
    for block_bytes in LENGTHS:
        payload = random_rows(3, block_bytes)
        found = block_checksums_torch(torch.from_numpy(payload).to(device))
        assert found.dtype == np.uint64
        np.testing.assert_array_equal(found, block_checksums(payload), err_msg=f"{block_bytes} bytes")


@given(st.integers(SHORT_BYTES + 1, 5000), st.integers(0, 2**32 - 1))
def test_torch_and_library_agree_at_any_length(block_bytes: int, seed: int) -> None:
    payload = random_rows(2, block_bytes, seed)
    np.testing.assert_array_equal(block_checksums_torch(torch.from_numpy(payload)), block_checksums(payload))


@pytest.mark.parametrize("value", [0x00, 0x80, 0xFF])
def test_torch_wraps_around_where_unsigned_arithmetic_would(value: int) -> None:
    """Words with the sign bit set and products near 2**64 are where signed arithmetic could go wrong."""
    payload = np.full((2, 4097), value, dtype=np.uint8)
    np.testing.assert_array_equal(block_checksums_torch(torch.from_numpy(payload)), block_checksums(payload))


@pytest.mark.parametrize("device", DEVICES)
def test_torch_reads_rows_that_are_not_packed(device: str) -> None:
    """Blocks in a staging buffer may be unaligned, apart from each other, or slices of wider rows."""
    wide = random_rows(4, 5000)
    tensor = torch.from_numpy(wide).to(device)
    for begin, end in ((0, 4096), (8, 4104), (3, 4099), (1, 5000)):
        found = block_checksums_torch(tensor[:, begin:end])
        np.testing.assert_array_equal(found, block_checksums(wide[:, begin:end]))
    np.testing.assert_array_equal(block_checksums_torch(tensor[::2]), block_checksums(wide[::2]))


def test_torch_sums_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch memory is bounded by summing slice after slice; where they are cut changes nothing."""
    payload = random_rows(3, 20_001)
    monkeypatch.setattr("nixl_offload.checksum_torch._SLICE_BYTES", 7 * 1024)
    np.testing.assert_array_equal(block_checksums_torch(torch.from_numpy(payload)), block_checksums(payload))


def test_an_empty_batch_has_no_checksums() -> None:
    assert block_checksums(np.empty((0, 4096), dtype=np.uint8)).shape == (0,)
    assert block_checksums_torch(torch.empty((0, 4096), dtype=torch.uint8)).shape == (0,)


def test_wrong_shapes_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        block_checksums(np.zeros((2, 8), dtype=np.int8))
    with pytest.raises(ValueError, match="blocks, block_bytes"):
        block_checksums(np.zeros(8, dtype=np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        block_checksums(np.zeros((2, 8), dtype=np.uint8)[:, ::2])
    with pytest.raises(ValueError, match="uint8"):
        block_checksums_torch(torch.zeros((2, 300), dtype=torch.int8))
    with pytest.raises(ValueError, match="longer than 240"):
        xxh3_64_torch(torch.zeros((2, 240), dtype=torch.uint8))


@given(st.integers(1, 3000), st.data())
def test_a_flipped_bit_changes_the_checksum_of_its_block_only(block_bytes: int, data: st.DataObject) -> None:
    payload = random_rows(3, block_bytes)
    before = block_checksums(payload)
    bit = data.draw(st.integers(0, payload.size * 8 - 1))
    payload.reshape(-1)[bit // 8] ^= 1 << (bit % 8)
    changed = block_checksums(payload) != before
    assert changed.tolist() == [bit // 8 // block_bytes == row for row in range(3)]
