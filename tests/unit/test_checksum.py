"""One value for the same bytes, wherever they lie; it is public."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from nixl_offload.chunk.checksum import block_checksum, block_checksums, payload_checksums


def test_the_value_is_the_public_xxh3_64() -> None:
    """Any other tool that knows XXH3-64, seed 0, can verify our files; the first value is the reference's."""
    assert block_checksum(np.zeros(0, dtype=np.uint8)) == 0x2D06800538D394C2
    assert block_checksum(memoryview(b"xxhash")) == xxhash.xxh3_64_intdigest(b"xxhash", seed=0)


def test_checksums_of_many_payloads_are_those_of_each() -> None:
    """Bytes of a block must lie side by side, and blocks need not."""
    wide = np.random.default_rng(1).integers(0, 256, (6, 100), dtype=np.uint8)
    payloads, calls = [wide[:2], wide[2:3, :50], wide[::2, 2:52]], list[None]()
    found = payload_checksums(payloads, lambda: calls.append(None))
    assert len(calls) == len(payloads)
    for payload, sums in zip(payloads, found, strict=True):
        assert sums.tolist() == [xxhash.xxh3_64_intdigest(row.tobytes()) for row in payload]
        np.testing.assert_array_equal(sums, block_checksums(payload))
    assert payload_checksums([]) == []
    with pytest.raises((ValueError, BufferError)):
        block_checksums(wide[:, ::2])
