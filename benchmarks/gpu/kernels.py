"""Within device memory: blocks gathered, summed and scattered, by Triton and by torch, against one plain copy.

Each byte of the payload is counted once. A copy, a gather and a scatter read and write each: the memory moves twice as
many bytes. Checksums of blocks or rows only read: at the memory's own speed their ratio to a copy is near 2.
Threading: one thread. Times are the device's own, between two events; the host has queued everything before the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.rounds import Row, Run, WrongBytesError, contest, unit
from benchmarks.gpu.scene import KIB, MIB, Scene
from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.engine.kernels.base import GroupKernels, Page
from nixl_offload.engine.kernels.select import open_kernels
from nixl_offload.engine.kernels.torch_kernels import TorchKernels

SHAPES = ((16 * KIB, 32, 1), (64 * KIB, 32, 1), (256 * KIB, 32, 1), (2 * MIB, 1, 1), (8 * KIB, 32, 8))
"""Bytes that are copied of a page, layers, shards of a page: three caches with a tensor for each layer, one in which a
block is one page, and one of which a head is copied, an eighth of its pages.
"""
SETS = 4
"""Disjoint sets of blocks that rounds take in turns, and as many times what a round moves: the L2 cache has none."""
COPY = "copy"
HEAD_START_CYCLES = 4_000_000
"""About 2 ms in which the device waits and the host queues: launches of Triton cost it tens of microseconds."""


def measure(scene: Scene) -> Iterator[Row]:
    """Rows of part ``kernels``."""
    for number, (page_bytes, layers, shards) in enumerate(SHAPES):
        cache = _Blocks(scene, page_bytes, layers, shards)
        candidates = {COPY: cache.copy}
        ways: dict[str, GroupKernels] = {"torch": TorchKernels(cache.tensors, cache.pages)}
        found = open_kernels(cache.tensors, cache.pages)
        ways = {found.name: found, **ways}
        for way, kernels in ways.items():
            candidates |= {f"{case}, {way}": run for case, run in cache.cases(kernels).items()}
        deadline_s = scene.share(number, len(SHAPES))
        result = contest(candidates, cache.total_bytes, scene.scale.rounds, deadline_s)
        for name in candidates:
            case, _, way = name.partition(", ")
            row = result.row("kernels", case, name, unit(page_bytes), COPY)
            yield replace(row, way=way or "one plain copy")
        if "triton" not in ways:
            note = "Triton's kernels do not run here; the log says why"
            yield Row("kernels", "gather", "triton", unit(page_bytes), note=note, failed=not scene.emulated)


class _Blocks:
    """A KV cache, rows for a round's blocks twice, and what can be timed with them."""

    def __init__(self, scene: Scene, page_bytes: int, layers: int, shards: int) -> None:
        self._scene = scene
        self._block_bytes = page_bytes * layers
        count = max(1, scene.scale.total_bytes // (self._block_bytes * shards))
        self.total_bytes = count * self._block_bytes
        blocks, row = count * SETS, page_bytes * shards
        self.tensors = [scene.noise(blocks * row).view(blocks, row) for _ in range(layers)]
        offset = row - page_bytes
        self.pages = [Page(layer, layer * page_bytes, page_bytes, offset) for layer in range(layers)]
        order = torch.from_numpy(np.random.default_rng(1).permutation(blocks)).view(SETS, count)
        self._ids = order.to(scene.device.torch_device)
        self._rows = [scene.noise(self.total_bytes).view(count, self._block_bytes) for _ in range(2)]
        scene.sync()

    def copy(self, number: int) -> float:
        """One round of the plain copy."""
        source, target = self._rows[number % 2], self._rows[(number + 1) % 2]
        return self._timed(lambda: target.copy_(source))

    def cases(self, kernels: GroupKernels) -> Mapping[str, Run]:
        """What kernels do, as rounds of a contest; the first round checks what came of it."""

        def gather(number: int) -> float:
            ids, rows = self._given(number)
            return self._checked(number, lambda: kernels.gather(ids, rows), lambda _: _same(rows, self._blocks(ids)))

        def gather_summed(number: int) -> float:
            ids, rows = self._given(number)

            def check(sums: torch.Tensor) -> None:
                _same(rows, self._blocks(ids))
                _agree(sums, rows)

            return self._checked(number, lambda: kernels.gather_summed(ids, rows), check)

        def scatter(number: int) -> float:
            ids, rows = self._given(number)
            return self._checked(number, lambda: kernels.scatter(ids, rows), lambda _: _same(self._blocks(ids), rows))

        def sums(number: int) -> float:
            ids, _ = self._given(number)
            return self._checked(number, lambda: kernels.sums(ids), lambda found: _agree(found, self._blocks(ids)))

        def sums_of_rows(number: int) -> float:
            _, rows = self._given(number)
            return self._checked(number, lambda: kernels.sums_of_rows(rows), lambda found: _agree(found, rows))

        return {
            "gather": gather,
            "gather + sums": gather_summed,
            "scatter": scatter,
            "sums of blocks": sums,
            "sums of rows": sums_of_rows,
        }

    def _given(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks and rows of a round; in the first, which is checked, the rows are what nobody has copied yet."""
        ids, rows = self._ids[number % SETS], self._rows[number % 2]
        if not number:
            rows.view(torch.int64).random_()
        return ids, rows

    def _blocks(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([page.of(self.tensors).index_select(0, ids) for page in self.pages], dim=1)

    def _checked(self, number: int, work: Callable[[], object], check: Callable[[torch.Tensor], None]) -> float:
        found: list[object] = []
        seconds = self._timed(lambda: found.append(work()))
        if not number:
            check(found[0])  # type: ignore[arg-type]
        return seconds

    def _timed(self, work: Callable[[], object]) -> float:
        """Seconds of the device."""
        if self._scene.emulated:
            begun_s = time.perf_counter()
            work()
            return time.perf_counter() - begun_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def _same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found, wanted):
        raise WrongBytesError("other bytes were copied than lay there")


def _agree(sums: torch.Tensor, rows: torch.Tensor) -> None:
    if not np.array_equal(sums.cpu().numpy().view(np.uint64), block_checksums(rows.cpu().numpy())):
        raise WrongBytesError("other checksums than the host's")
