"""One value for the same bytes, wherever they lie, and another one for bytes that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from nixl_offload.chunk.checksum import block_checksum, block_checksums, payload_checksums
from nixl_offload.chunk.checksum_torch import xxh3_64_torch
from tests.unit.checksum_rig import (
    assert_agreement_at_every_length,
    assert_agreement_on_rows_not_packed,
    block_checksums_torch,
    random_rows,
)


def test_the_value_is_the_public_xxh3_64() -> None:
    """Any other tool that knows XXH3-64, seed 0, can verify our files; the first value is the reference's."""
    assert block_checksum(np.zeros(0, dtype=np.uint8)) == 0x2D06800538D394C2
    assert block_checksum(memoryview(b"xxhash")) == xxhash.xxh3_64_intdigest(b"xxhash", seed=0)


def test_bytes_of_a_block_must_lie_side_by_side_and_blocks_need_not() -> None:
    wide = random_rows(3, 8, 1)
    np.testing.assert_array_equal(block_checksums(wide[:, 2:6]), block_checksums(wide[:, 2:6].copy()))
    with pytest.raises((ValueError, BufferError)):
        block_checksums(wide[:, ::2])


def test_checksums_of_many_payloads_are_those_of_each() -> None:
    payloads, calls = [random_rows(count, 100, count) for count in (2, 1, 3)], list[None]()
    found = payload_checksums(payloads, lambda: calls.append(None))
    assert len(calls) == len(payloads)
    for payload, sums in zip(payloads, found, strict=True):
        np.testing.assert_array_equal(sums, block_checksums(payload))
    assert payload_checksums([]) == []


def test_torch_and_library_agree() -> None:
    """The value computed with torch integer arithmetic is the library's, whatever the length."""
    assert_agreement_at_every_length("cpu")


@pytest.mark.parametrize("value", [0x00, 0x80, 0xFF])
def test_torch_wraps_around_where_unsigned_arithmetic_would(value: int) -> None:
    """Words with the sign bit set and products near 2**64 are where signed arithmetic could go wrong."""
    payload = np.full((2, 4097), value, dtype=np.uint8)
    np.testing.assert_array_equal(block_checksums_torch(torch.from_numpy(payload)), block_checksums(payload))


def test_torch_reads_rows_that_are_not_packed() -> None:
    """Blocks in a staging buffer may be unaligned, apart from each other, or slices of wider rows."""
    assert_agreement_on_rows_not_packed("cpu")


class Watch(TorchDispatchMode):
    """Takes down what is copied, and how large the tensors are that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.copies, self.largest_bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.copies += function.overloadpacket is torch.ops.aten.clone
        if isinstance(made, torch.Tensor) and not made._is_view():
            self.largest_bytes = max(self.largest_bytes, made.nbytes)
        return made


@pytest.mark.parametrize("slice_bytes", [7 * 1024, 1024])
@pytest.mark.parametrize(("block_bytes", "copies"), [(16_384, False), (16_385, True)])
def test_torch_sums_in_place_in_slices(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int, copies: bool, slice_bytes: int
) -> None:
    """The scratch memory is bounded by summing slice after slice; where they are cut changes nothing. Words that do not
    lie at multiples of eight are copied.
    """
    payload = random_rows(3, block_bytes)
    monkeypatch.setattr("nixl_offload.chunk.checksum_torch._SLICE_BYTES", slice_bytes)
    tensor = torch.from_numpy(payload)
    with Watch() as watch:
        found = block_checksums_torch(tensor)
    np.testing.assert_array_equal(found, block_checksums(payload))
    least_bytes = max(1, slice_bytes // (3 * 1024)) * 3 * 1024
    assert least_bytes <= watch.largest_bytes <= 2 * least_bytes
    assert bool(watch.copies) is copies


def test_torch_reads_words_that_lie_right_in_memory_and_wrong_in_their_storage() -> None:
    """Torch views bytes as words only where they begin at a multiple of eight from the storage's beginning."""
    memory = random_rows(1, 4096 + 16)[0]
    storage = memory[(1 - memory.ctypes.data) % 8 :]
    payload = storage[7:][:4096].reshape(1, 4096)
    found = block_checksums_torch(torch.from_numpy(storage)[7:][:4096].view(1, 4096))
    np.testing.assert_array_equal(found, block_checksums(payload))


def test_wrong_shapes_and_types_are_refused() -> None:
    for rows, words in (
        (torch.zeros((2, 300), dtype=torch.int8), "uint8"),
        (torch.zeros(300, dtype=torch.uint8), "uint8 of shape"),
        (torch.zeros((2, 240), dtype=torch.uint8), "longer than 240"),
    ):
        with pytest.raises(ValueError, match=words):
            xxh3_64_torch(rows)
