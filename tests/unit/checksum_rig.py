"""What tests of checksums share on every device: the value by torch against the library's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.chunk.checksum_torch import xxh3_64_torch

# Around every boundary of the algorithm: a stripe (64), a round (1024), multiples of eight or not.
LENGTHS = [241, 248, 255, 256, 257, 320, 1023, 1024, 1025, 1087, 1088, 1089]
LENGTHS += [2047, 2048, 2049, 2112, 2113, 4096, 4104, 16384, 16385, 65536, 65536 + 240, 65536 + 241, 100_003]


def block_checksums_torch(payload: torch.Tensor) -> npt.NDArray[np.uint64]:
    """Return the checksums of rows by torch, where they lie."""
    digests: npt.NDArray[np.int64] = xxh3_64_torch(payload).cpu().numpy()
    return digests.view(np.uint64)


def random_rows(blocks: int, block_bytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng((seed, blocks, block_bytes)).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


def assert_agreement_at_every_length(device: str) -> None:
    for block_bytes in LENGTHS:
        payload = random_rows(3, block_bytes)
        found = block_checksums_torch(torch.from_numpy(payload).to(device))
        assert found.dtype == np.uint64
        np.testing.assert_array_equal(found, block_checksums(payload), err_msg=f"{block_bytes} bytes")


def assert_agreement_on_rows_not_packed(device: str) -> None:
    wide = random_rows(4, 5000)
    tensor = torch.from_numpy(wide).to(device)
    for begin, end in ((0, 4096), (8, 4104), (3, 4099), (1, 5000)):
        found = block_checksums_torch(tensor[:, begin:end])
        np.testing.assert_array_equal(found, block_checksums(wide[:, begin:end]))
    flat = tensor.view(-1)
    for begin in (1, 8):
        found = block_checksums_torch(flat[begin : begin + 8192].view(2, 4096))
        np.testing.assert_array_equal(found, block_checksums(wide.reshape(-1)[begin : begin + 8192].reshape(2, 4096)))
    every_second = np.ascontiguousarray(wide[:, ::2])
    np.testing.assert_array_equal(block_checksums_torch(tensor[:, ::2]), block_checksums(every_second))
    np.testing.assert_array_equal(block_checksums_torch(tensor[::2]), block_checksums(wide[::2]))
