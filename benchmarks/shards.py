"""Gather and scatter of shards, each a range of KV heads, against a rank's own order; in host memory.

``python -m benchmarks.shards [--chunks N] [--rounds N] [--quick] [--json]``. The KV cache is that of an 8B model (32
layers, 8 KV heads of 128, 16 bits), a chunk has 256 tokens, one rank has all heads. In a rank's own order a chunk is
one payload; of shards each is one, and a call copies a shard of all chunks. Candidates take turns in one process, in an
order drawn each round; a ratio is the median over rounds of (time in the rank's own order / candidate's time), and time
is the processor's. GB/s count each byte once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.copies import Copy, machine, measure
from nixl_offload.chunk.heads import HeadPages, shard_groups
from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine.packer import HostPacker, pages_of
from nixl_offload.engine.streams import READY

LAYERS, HEADS, HEAD_TOKEN_BYTES, CHUNK_TOKENS = 32, 8, 2 * 128 * 2, 256
BLOCK_TOKENS = (16, 64)
SHARDS = (1, 2, 4, 8)
OWN = "own order"
Bytes = npt.NDArray[np.uint8]


class Scene:
    """A KV cache for twice ``chunks`` chunks, of which one half is copied. ``packed``: layers side by side (BLHNC)."""

    def __init__(self, block_tokens: int, chunks: int, *, packed: bool, scattered: bool) -> None:
        self._chunks, self._chunk_blocks = chunks, CHUNK_TOKENS // block_tokens
        blocks, page = 2 * chunks * self._chunk_blocks, HEADS * block_tokens * HEAD_TOKEN_BYTES
        memory = np.ones((blocks, LAYERS, page) if packed else (LAYERS, blocks, page), dtype=np.uint8)
        self._tensors = [memory.reshape(blocks, -1)] if packed else list(memory)
        self._layers = [
            HeadPages(0 if packed else n, n * page if packed else 0, HEADS, page // HEADS) for n in range(LAYERS)
        ]
        order = np.random.default_rng(1).permutation(blocks) if scattered else np.arange(blocks)
        self._ids = order.astype(np.int32)[: blocks // 2].reshape(chunks, -1)
        self.bytes = chunks * self._chunk_blocks * LAYERS * page
        self._payloads = np.ones(self.bytes, dtype=np.uint8)
        """Of all candidates: they find it equally warm."""

    def candidates(self, name: str) -> dict[str, Copy]:
        """By number of shards, what one round of ``gather``, ``gather + sums`` or ``scatter`` is."""
        own = (GroupLayout.of_pages((n, each.shape[1]) for n, each in enumerate(self._tensors)),)
        return {OWN: self._copy(name, own)} | {
            _way(count): self._copy(name, shard_groups(self._layers, count)) for count in SHARDS
        }

    def _copy(self, name: str, groups: tuple[GroupLayout, ...]) -> Copy:
        regions = tuple(
            RegionSpec(n, each.ctypes.data, len(each), each.strides[0], each.shape[1])
            for n, each in enumerate(self._tensors)
        )
        packer = HostPacker(self._tensors, pages_of(KVLayout(regions, groups, self._chunk_blocks)))
        rows = self._payloads.reshape(len(groups), self._chunks, self._chunk_blocks, -1)
        parts = [list(zip(self._ids, rows[shard], strict=True)) for shard in range(len(groups))]

        def copy() -> None:
            for shard, each in enumerate(parts):
                if name == "scatter":
                    packer.scatter_many(shard, each, READY)
                    continue
                summed = packer.gather_many(shard, each, READY)
                if name != "gather":
                    summed.values()

        return copy


def measured(chunks: int, rounds: int, block_tokens: tuple[int, ...]) -> Iterator[dict[str, object]]:
    for tokens in block_tokens:
        for packed in (False, True):
            for scattered in (False, True):
                scene = Scene(tokens, chunks, packed=packed, scattered=scattered)
                for name in ("gather", "gather + sums", "scatter"):
                    row: dict[str, object] = {
                        "copy": name,
                        "block_tokens": tokens,
                        "layout": "BLHNC" if packed else "LBHNC",
                        "blocks": "scattered" if scattered else "consecutive",
                    }
                    yield {**row, "ways": measure(scene.candidates(name), scene.bytes, rounds)}


def _way(shards: int) -> str:
    return "1 shard" if shards == 1 else f"{shards} shards"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", type=int, default=4, help="copied at once, 32 MiB each")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one chunk, one block size, three rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chunks, rounds, tokens = (1, 3, (64,)) if options.quick else (options.chunks, options.rounds, BLOCK_TOKENS)
    rows = list(measured(chunks, rounds, tokens))
    if options.json:
        print(json.dumps({"machine": machine(), "shards": rows}, indent=2))
        return
    print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    ways = [OWN, *map(_way, SHARDS)]
    print(
        f"\n{'copy':15}{'block':>6}  {'layout':7}{'blocks':12}"
        + "".join(f"{way:>16}" for way in ways)
        + "   GB/s (ratio)"
    )
    for row in rows:
        found = row["ways"]
        assert isinstance(found, dict)
        cells = "".join(f"{found[way]['gb_s']:>9.1f} ({found[way]['ratio']:4.2f})" for way in ways)
        print(f"{row['copy']:15}{row['block_tokens']:>6}  {row['layout']:7}{row['blocks']:12}{cells}")


if __name__ == "__main__":
    main()
