"""Chunks of a batch whose headers were read: their checksums are compared here, and the corrupt ones ended.

Threading: the pump's thread. The header pages must not change meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import HeaderRows, verify_rows
from nixl_offload.engine.ratelog import RateLog
from nixl_offload.engine.records import Chunk
from nixl_offload.errors import FormatError
from nixl_offload.types import Outcome


@dataclass(frozen=True, slots=True)
class CheckedChunks:
    """Chunks of which the headers were read: ``chunks`` by ``Chunk.row``."""

    rate_log: RateLog
    chunks: Sequence[Chunk]
    headers: HeaderRows

    def refuse_absent(self) -> None:
        """A chunk of which a wanted block was never stored is CORRUPT. One that wants no block is right."""
        for row, (chunk, first) in enumerate(zip(self.chunks, self.headers.first_valid_block, strict=True)):
            if first > chunk.first_block and len(chunk.block_ids) and row not in self.headers.errors:
                words = f"block {chunk.first_block} was asked for, the shard begins with {first}"
                self.headers.errors[row] = FormatError(words, reason="blocks")
        self.end_corrupt()

    def first_valid_block(self, chunk: Chunk) -> int:
        """Return the first block that a chunk holds."""
        return self.headers.first_valid_block[chunk.row]

    def authenticate(
        self, chunk: Chunk, keys: ChunkKeys, page: npt.NDArray[np.uint8], rows: npt.NDArray[np.uint8]
    ) -> None:
        """Compare a chunk's MAC; ``rows``: the blocks that it holds. Without a right one it is CORRUPT."""
        try:
            keys.verify(page, rows)
        except FormatError as error:
            self.headers.errors[chunk.row] = error
            self.end_corrupt()

    def verify(
        self, chunks: Sequence[Chunk], first_blocks: Sequence[int], sums: Sequence[npt.NDArray[np.uint64]]
    ) -> None:
        """Compare checksums with the headers; a chunk with a wrong one is CORRUPT."""
        if chunks:
            verify_rows(self.headers, [chunk.row for chunk in chunks], first_blocks, sums)
            self.end_corrupt()

    def end_corrupt(self) -> None:
        """End the chunks with an error."""
        for row, error in self.headers.errors.items():
            if self.chunks[row].result is None:
                words = f"corrupt: {error.reason}"
                self.rate_log.warning(words, "A stored chunk was refused and will be recomputed: %s", error)
                self.chunks[row].end(Outcome.CORRUPT, words, error.reason)
