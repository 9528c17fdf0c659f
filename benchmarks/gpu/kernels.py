"""Within device memory: blocks gathered, summed and scattered by our kernels, against one plain copy.

Each byte of the payload is counted once. A copy, a gather and a scatter read and write each: the memory moves twice as
many bytes. Checksums only read: at the memory's own speed their ratio to a copy is near 2.
Threading: one thread. Times are the device's own, between two events; the host has queued everything before the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.gpu.bench import KIB, MIB, Row, Run, Scene, WrongBytesError, contest
from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.engine.kernels.torch_kernels import Page, TorchKernels, open_kernels

SHAPES = ((16 * KIB, 32, 1), (64 * KIB, 32, 1), (256 * KIB, 32, 1), (2 * MIB, 1, 1), (8 * KIB, 32, 8))
"""Bytes that are copied of a page, layers, shards of a page: three caches with a tensor for each layer, one in which a
block is one page, and one of which a head is copied, an eighth of its pages.
"""
SETS = 4
"""Disjoint sets of blocks that rounds take in turns, and as many times what a round moves: the L2 cache has none."""
COPY = "copy, one plain copy"
HEAD_START_CYCLES = 4_000_000
"""About 2 ms in which the device waits and the host queues: launches of Triton cost it tens of microseconds."""


def measure(scene: Scene) -> Iterator[Row]:
    """Yield rows of part ``kernels``."""
    for number, (page_bytes, layers, shards) in enumerate(SHAPES):
        cache = _Blocks(scene, page_bytes, layers, shards)
        found = open_kernels(cache.tensors, cache.pages)
        candidates = {COPY: cache.copy} | {f"{case}, {found.name}": run for case, run in cache.cases(found).items()}
        result = contest(candidates, cache.total_bytes, scene.scale.rounds, scene.share(number, len(SHAPES)))
        yield from result.rows("kernels", "pages", page_bytes, COPY)
        if found.name != "triton" and not scene.emulated:
            note = "Triton's kernels do not run here; the log says why"
            yield Row("kernels", "pages", "triton", f"{page_bytes >> 10} KiB", note=note, failed=True)


class _Blocks:
    """A KV cache, rows for a round's blocks twice, and what can be timed with them."""

    def __init__(self, scene: Scene, page_bytes: int, layers: int, shards: int) -> None:
        self._scene = scene
        block_bytes, row = page_bytes * layers, page_bytes * shards
        count = max(1, scene.scale.total_bytes // (block_bytes * shards))
        self.total_bytes = count * block_bytes
        blocks = count * SETS
        self.tensors = [scene.noise(blocks * row).view(blocks, row) for _ in range(layers)]
        self.pages = [Page(layer, layer * page_bytes, page_bytes, row - page_bytes) for layer in range(layers)]
        order = torch.from_numpy(np.random.default_rng(1).permutation(blocks)).view(SETS, count)
        self._ids = order.to(scene.device.torch_device)
        self._rows = [scene.noise(self.total_bytes).view(count, block_bytes) for _ in range(2)]
        scene.sync()

    def copy(self, number: int) -> float:
        """One round of the plain copy."""
        source, target = self._rows[number % 2], self._rows[(number + 1) % 2]
        return self._timed(lambda: target.copy_(source))[0]

    def cases(self, kernels: TorchKernels) -> dict[str, Run]:
        """Return what kernels do, as rounds of a contest; the first round checks what came of it."""

        def case(work: Callable[..., object], *, copies: bool, sums: bool) -> Run:
            def run(number: int) -> float:
                ids, rows = self._ids[number % SETS], self._rows[number % 2]
                if not number:
                    rows.view(torch.int64).random_()  # what nobody has copied yet
                seconds, found = self._timed(lambda: work(ids, rows))
                if not number:
                    self._check(ids, rows, found if sums else None, copies=copies)
                return seconds

            return run

        def gather_and_sum(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            kernels.gather(ids, rows)
            return kernels.sums_of_rows(rows)

        return {
            "gather": case(kernels.gather, copies=True, sums=False),
            "gather + sums": case(gather_and_sum, copies=True, sums=True),
            "scatter": case(kernels.scatter, copies=True, sums=False),
            "sums of rows": case(lambda _, rows: kernels.sums_of_rows(rows), copies=False, sums=True),
        }

    def _check(self, ids: torch.Tensor, rows: torch.Tensor, sums: object, *, copies: bool) -> None:
        blocks = torch.cat([page.of(self.tensors).index_select(0, ids) for page in self.pages], dim=1)
        if copies and not torch.equal(rows, blocks):
            raise WrongBytesError("other bytes were copied than lay there")
        if isinstance(sums, torch.Tensor):
            found = sums.cpu().numpy().view(np.uint64)
            if not any(np.array_equal(found, block_checksums(each.cpu().numpy())) for each in (rows, blocks)):
                raise WrongBytesError("other checksums than the host's")

    def _timed(self, work: Callable[[], object]) -> tuple[float, object]:
        """Return seconds of the device, and what ``work`` returned."""
        if self._scene.emulated:
            begun_s = time.perf_counter()
            found = work()
            return time.perf_counter() - begun_s, found
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        found = work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000, found
