"""Our kernels within device memory, and the packer over the bus, each against one plain copy of as many bytes.

Each byte of the payload is counted once. A copy, a gather and a scatter read and write each: the memory moves twice as
many bytes. Checksums only read: at the memory's own speed their ratio to a copy is near 2.
Threading: one thread. Times of kernels are the device's own, between two events; the host has queued everything before
the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.contest import Candidate, Row, Run, WrongBytesError, contest
from benchmarks.gpu.bench import KIB, MIB, PIECES_BYTES, Cache, Scene
from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.kernels.torch_kernels import Page, TorchKernels, open_kernels
from nixl_offload.engine.packer import pages_of

SHAPES = ((16 * KIB, 32, 1), (64 * KIB, 32, 1), (256 * KIB, 32, 1), (2 * MIB, 1, 1), (8 * KIB, 32, 8))
"""Bytes that are copied of a page, layers, shards of a page: three caches with a tensor for each layer, one in which a
block is one page, and one of which a head is copied, an eighth of its pages.
"""
COPY = "copy, one plain copy"
PLAIN = "plain copy"
HEAD_START_CYCLES = 4_000_000
"""About 2 ms in which the device waits and the host queues: launches of Triton cost it tens of microseconds."""


def measure(scene: Scene) -> Iterator[Row]:
    """Yield rows of part ``kernels``."""
    for number, (page_bytes, layers, shards) in enumerate(SHAPES):
        cache = Cache(scene, page_bytes, layers, shards)
        pages = [Page(layer, layer * page_bytes, page_bytes, (shards - 1) * page_bytes) for layer in range(layers)]
        kernels = open_kernels(cache.tensors, pages)
        turns = _kernel_turns(scene, cache, kernels)
        found = contest(turns, cache.total_bytes, scene.scale.rounds, scene.share(number, len(SHAPES)))
        yield from found.rows(COPY, "kernels", f"{page_bytes >> 10} KiB")
        if kernels.name != "triton" and not scene.emulated:
            note = "Triton's kernels do not run here; the log says why"
            yield Row(("kernels", f"{page_bytes >> 10} KiB"), "triton", note=note, failed=True)


def measure_bus(scene: Scene) -> Iterator[Row]:
    """Yield rows of part ``bus``: device to page-locked memory and back."""
    for number, piece_bytes in enumerate(PIECES_BYTES):
        cache = Cache(scene, piece_bytes)
        for step, (direction, turns) in enumerate(_bus_turns(scene, cache).items()):
            deadline_s = scene.share(2 * number + step, 2 * len(PIECES_BYTES))
            found = contest(turns, cache.total_bytes, scene.scale.rounds, deadline_s)
            yield from found.rows(PLAIN, "bus", direction, f"{piece_bytes >> 10} KiB")


def _kernel_turns(scene: Scene, cache: Cache, kernels: TorchKernels) -> dict[str, Candidate]:
    """Return the plain copy and the kernels as candidates. The first round checks what a kernel did."""
    both_rows = [scene.noise(cache.total_bytes).view(-1, cache.block_bytes) for _ in range(2)]

    def copy(number: int) -> Run:
        source, target = both_rows[number % 2], both_rows[(number + 1) % 2]
        return Run(_timed(scene, lambda: target.copy_(source))[0])

    def turn(work: Callable[..., object], *, copies: bool, sums: bool) -> Candidate:
        def run(number: int) -> Run:
            ids, rows = cache.index(number), both_rows[number % 2]
            if not number:
                rows.view(torch.int64).random_()  # bytes that were not copied before
            seconds, found = _timed(scene, lambda: work(ids, rows))
            if not number:
                blocks = cache.blocks(number)
                if copies and not torch.equal(rows, blocks):
                    raise WrongBytesError("other bytes were copied than lay there")
                if sums and isinstance(found, torch.Tensor):
                    words = found.cpu().numpy().view(np.uint64)
                    if not any(np.array_equal(words, block_checksums(each.cpu().numpy())) for each in (rows, blocks)):
                        raise WrongBytesError("other checksums than the host's")
            return Run(seconds)

        return run

    def gather_and_sum(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        kernels.gather(ids, rows)
        return kernels.sums_of_rows(rows)

    turns = {
        "gather": turn(kernels.gather, copies=True, sums=False),
        "gather + sums": turn(gather_and_sum, copies=True, sums=True),
        "scatter": turn(kernels.scatter, copies=True, sums=False),
        "sums of rows": turn(lambda _, rows: kernels.sums_of_rows(rows), copies=False, sums=True),
    }
    return {COPY: copy} | {f"{case}, {kernels.name}": run for case, run in turns.items()}


def _timed(scene: Scene, work: Callable[[], object]) -> tuple[float, object]:
    """Return seconds of the device, and what ``work`` returned."""
    if scene.emulated:
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


def _bus_turns(scene: Scene, cache: Cache) -> dict[str, dict[str, Candidate]]:
    """Return candidates by direction. The first round checks what the packer did."""
    packer = DevicePacker(cache.tensors, pages_of(cache.layout), scene.device)
    host = [torch.zeros(cache.total_bytes, dtype=torch.uint8, pin_memory=scene.device.page_locks) for _ in range(2)]
    flat = [scene.noise(cache.total_bytes) for _ in range(2)]

    def packed(move: Callable[..., Any]) -> Candidate:
        def run(number: int) -> Run:
            rows = host[number % 2].numpy().reshape(cache.chunks, -1, cache.block_bytes)
            begin_s = time.perf_counter()
            fence = move(0, list(zip(cache.ids(number), rows, strict=True)), scene.device.compute_fence())
            while not fence.done():
                pass
            seconds = time.perf_counter() - begin_s
            if not number and not torch.equal(host[0].view(-1, cache.block_bytes), cache.blocks(number).cpu()):
                raise WrongBytesError("host memory and blocks differ after the round")
            return Run(seconds)

        return run

    def plain(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Candidate:
        def run(number: int) -> Run:
            begin_s = time.perf_counter()
            targets[number % 2].copy_(sources[number % 2], non_blocking=True)
            scene.sync()
            return Run(time.perf_counter() - begin_s)

        return run

    return {
        "gather": {PLAIN: plain(host, flat), "packer": packed(packer.gather_many)},
        "scatter": {PLAIN: plain(flat, host), "packer": packed(packer.scatter_many)},
    }
