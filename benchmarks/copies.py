"""Copies between KV blocks and the memory tier: batched against a call for each layer, and what verifying costs.

``python -m benchmarks.copies [--megabytes N] [--rounds N] [--quick] [--json]``. Candidates take turns in one process,
in an order drawn each round; a ratio is the median over rounds of (per-layer time / candidate time). On a machine
with CUDA the KV blocks lie on the device and the slots in page-locked memory, and time is what a clock says; otherwise
both lie in host memory, and time is the processor's, which other work disturbs less. GB/s count each byte once.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine.host import HostSlab
from nixl_offload.engine.host_copies import runs_of
from nixl_offload.engine.kernels.base import Page
from nixl_offload.engine.memory_tier import MemoryEngine
from nixl_offload.engine.packer import Packer, make_packer
from nixl_offload.engine.records import ChunkIO
from nixl_offload.types import Key, Location, Outcome, Verify

BLOCKS_PER_CHUNK = 16
PAGES_KIB = (4, 16, 64, 256, 1024)
LAYERS = (4, 32)
VERIFY: tuple[Verify, ...] = ("always", "checksum")
Copy = Callable[[], None]


@dataclass
class Scene:
    """KV cache and slots for about as many bytes as asked for. ``parts``: block ids and payload of each chunk."""

    kv: list[torch.Tensor]
    slab: HostSlab
    layout: KVLayout
    packer: Packer
    parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]]
    locations: list[Location]

    @property
    def bytes(self) -> int:
        return sum(payload.nbytes for _, payload in self.parts)


def scene(page_bytes: int, layers: int, total_bytes: int, *, scattered: bool) -> Scene:
    rng = np.random.default_rng(1)
    cuda = torch.cuda.is_available()
    chunks = max(1, total_bytes // (page_bytes * layers * BLOCKS_PER_CHUNK))
    blocks = 2 * chunks * BLOCKS_PER_CHUNK
    kv = [torch.ones((blocks, page_bytes), dtype=torch.uint8, device="cuda" if cuda else "cpu") for _ in range(layers)]
    specs = tuple(RegionSpec(n, tensor.data_ptr(), blocks, page_bytes, page_bytes) for n, tensor in enumerate(kv))
    layout = KVLayout(specs, (GroupLayout.of_pages((n, page_bytes) for n in range(layers)),), BLOCKS_PER_CHUNK)
    slot_bytes = layout.slot_bytes(0)
    slab = HostSlab(
        memory_bytes=2 * chunks * slot_bytes, relay_slots=0, slot_bytes=slot_bytes, pinned=cuda, progress=_silent
    )
    ids = (rng.permutation(blocks) if scattered else np.arange(blocks)).astype(np.int32)
    order = rng.permutation(2 * chunks) if scattered else np.arange(2 * chunks)
    locations = [Location(0, int(slot) * slot_bytes, slot_bytes) for slot in order[:chunks]]
    parts = []
    for n, location in enumerate(locations):
        memory = slab.slot(location.offset, slot_bytes).memory
        payload = memory[HEADER_BYTES : HEADER_BYTES + BLOCKS_PER_CHUNK * page_bytes * layers]
        parts.append((ids[n * BLOCKS_PER_CHUNK : (n + 1) * BLOCKS_PER_CHUNK], payload.reshape(BLOCKS_PER_CHUNK, -1)))
    pages = [Page(n, n * page_bytes, page_bytes) for n in range(layers)]
    return Scene(kv, slab, layout, make_packer(kv, [pages]), parts, locations)


def per_layer(view: Scene) -> tuple[Copy, Copy]:
    """A call for each chunk and layer: by index on the host, and with a copy over the bus each on a device."""
    size = view.kv[0].shape[1]
    if view.kv[0].is_cuda:
        rows = [torch.from_numpy(ids.astype(np.int64)).cuda() for ids, _ in view.parts]
        hosts = [torch.from_numpy(payload) for _, payload in view.parts]

        def gather() -> None:
            for row, host in zip(rows, hosts, strict=True):
                for n, tensor in enumerate(view.kv):
                    host[:, n * size : (n + 1) * size].copy_(tensor.index_select(0, row), non_blocking=True)
            torch.cuda.synchronize()

        def scatter() -> None:
            for row, host in zip(rows, hosts, strict=True):
                for n, tensor in enumerate(view.kv):
                    tensor.index_copy_(0, row, host[:, n * size : (n + 1) * size].to("cuda", non_blocking=True))
            torch.cuda.synchronize()

        return gather, scatter
    arrays = [tensor.numpy() for tensor in view.kv]

    def gather_host() -> None:
        for ids, payload in view.parts:
            for n, array in enumerate(arrays):
                payload[:, n * size : (n + 1) * size] = array[ids]

    def scatter_host() -> None:
        for ids, payload in view.parts:
            for n, array in enumerate(arrays):
                array[ids] = payload[:, n * size : (n + 1) * size]

    return gather_host, scatter_host


def per_run(view: Scene) -> tuple[Copy, Copy]:
    """A slice for each layer and run of consecutive blocks; host only."""
    size, arrays = view.kv[0].shape[1], [tensor.numpy() for tensor in view.kv]
    runs = [runs_of(ids, [len(ids)]) for ids, _ in view.parts]

    def pairs() -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        for (_, payload), of in zip(view.parts, runs, strict=True):
            for n, array in enumerate(arrays):
                for _, row, block, count in of:
                    yield payload[row : row + count, n * size : (n + 1) * size], array[block : block + count]

    def gather() -> None:
        for packed, page in pairs():
            packed[...] = page

    def scatter() -> None:
        for packed, page in pairs():
            page[...] = packed

    return gather, scatter


def torch_layers(view: Scene) -> tuple[Copy, Copy]:
    """``index_select`` and ``index_copy_`` for each chunk and layer, with torch's threads; host only."""
    size = view.kv[0].shape[1]
    rows = [torch.from_numpy(ids.astype(np.int64)) for ids, _ in view.parts]
    hosts = [torch.from_numpy(payload) for _, payload in view.parts]

    def gather() -> None:
        for row, host in zip(rows, hosts, strict=True):
            for n, tensor in enumerate(view.kv):
                torch.index_select(tensor, 0, row, out=host[:, n * size : (n + 1) * size])

    def scatter() -> None:
        for row, host in zip(rows, hosts, strict=True):
            for n, tensor in enumerate(view.kv):
                tensor.index_copy_(0, row, host[:, n * size : (n + 1) * size])

    return gather, scatter


def foreach(view: Scene) -> tuple[Copy, Copy]:
    """One ``torch._foreach_copy_`` of a view for each layer and run; host only."""
    size = view.kv[0].shape[1]

    def views() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        packed, pages = [], []
        for ids, payload in view.parts:
            host = torch.from_numpy(payload)
            for _, row, block, count in runs_of(ids, [len(ids)]):
                for n, tensor in enumerate(view.kv):
                    packed.append(host[row : row + count, n * size : (n + 1) * size])
                    pages.append(tensor[block : block + count])
        return packed, pages

    def gather() -> None:
        packed, pages = views()
        torch._foreach_copy_(packed, pages)

    def scatter() -> None:
        packed, pages = views()
        torch._foreach_copy_(pages, packed)

    return gather, scatter


def batched(view: Scene) -> tuple[Copy, Copy]:
    """What the memory tier does: one call of the packer for all chunks."""

    def run(copy: Callable[..., object]) -> None:
        fence = copy(0, view.parts, view.packer.fence())
        while not fence.done():  # type: ignore[attr-defined]
            time.sleep(0.00005)

    return lambda: run(view.packer.gather_many), lambda: run(view.packer.scatter_many)


def measure(candidates: dict[str, Copy], size_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in GB/s, and ratios to the first candidate by rounds."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    lots = random.Random(1)
    for number in range(rounds + 1):
        # By lot: whoever always came after the same other one was seen to run up to a quarter slower or faster.
        for name, copy in lots.sample([*candidates.items()], len(candidates)):
            begin = clock()
            copy()
            if number:  # the first round warms up
                taken[name].append(clock() - begin)
    first = next(iter(taken.values()))
    return {
        name: {
            "gb_s": size_bytes / statistics.median(times) / 1e9,
            "ratio": statistics.median(base / mine for base, mine in zip(first, times, strict=True)),
        }
        for name, times in taken.items()
    }


def copies(total_bytes: int, rounds: int, pages_kib: Sequence[int], *, torch_threads: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for page_kib in pages_kib:
        for layers in _layers(page_kib, total_bytes):
            for scattered in (True, False):
                view = scene(page_kib << 10, layers, total_bytes, scattered=scattered)
                ways = {"per layer": per_layer(view), "batched": batched(view)}
                if not view.kv[0].is_cuda:
                    ways |= {"runs": per_run(view), "foreach": foreach(view)}
                    if torch_threads:
                        ways["torch"] = torch_layers(view)
                for direction, name in enumerate(("gather", "scatter")):
                    found = measure({way: pair[direction] for way, pair in ways.items()}, view.bytes, rounds)
                    row = {"copy": name, "page_kib": page_kib, "layers": layers, "blocks": _spread(scattered)}
                    rows.append({**row, "ways": found})
                view.slab.close()
    return rows


def verifying(total_bytes: int, rounds: int, pages_kib: Sequence[int]) -> list[dict[str, object]]:
    """Stores and loads of one job through the memory tier's engine, with and without checksums."""
    rows: list[dict[str, object]] = []
    for page_kib in pages_kib:
        for layers in _layers(page_kib, total_bytes):
            view = scene(page_kib << 10, layers, total_bytes, scattered=True)
            engines = {
                verify: MemoryEngine(
                    tensors=view.kv, layout=view.layout, host=view.slab, rank_namespace=bytes(32), verify=verify
                )
                for verify in VERIFY
            }
            chunks = [
                ChunkIO(Key(n.to_bytes(32, "little") + bytes(4)), location, 0, ids, 0)
                for n, ((ids, _), location) in enumerate(zip(view.parts, view.locations, strict=True))
            ]
            row: dict[str, object] = {"page_kib": page_kib, "layers": layers}
            for what in ("store", "load"):
                _run(engines["always"], chunks, is_store=True)  # whose images either engine loads
                jobs = {
                    verify: partial(_run, engine, chunks, is_store=what == "store")
                    for verify, engine in engines.items()
                }
                row[what] = measure(jobs, view.bytes, rounds)
            rows.append(row)
            for engine in engines.values():
                engine.close()
            view.slab.close()
    return rows


def _run(engine: MemoryEngine, chunks: Sequence[ChunkIO], *, is_store: bool) -> None:
    (engine.submit_store if is_store else engine.submit_load)(0, chunks)
    while not (results := engine.finished()):
        time.sleep(0.001)
    if set(results[0].outcomes) != {Outcome.OK}:
        raise RuntimeError(f"not every chunk was copied: {results[0].errors}")


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "numpy": np.__version__,
    }


def _layers(page_kib: int, total_bytes: int) -> list[int]:
    """Not those whose single chunk is far more than what is to be copied."""
    return [layers for layers in LAYERS if (page_kib << 10) * layers * BLOCKS_PER_CHUNK <= 4 * total_bytes]


def _spread(scattered: bool) -> str:
    return "scattered" if scattered else "consecutive"


def _silent(done_bytes: int, total_bytes: int) -> None:
    """No progress line between the tables."""


def show(result: dict[str, object]) -> None:
    print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    rows = result["copies"]
    assert isinstance(rows, list)
    ways = list(rows[0]["ways"])
    print(
        f"\n{'copy':8}{'page':>7}{'layers':>7}  {'blocks':12}"
        + "".join(f"{way:>16}" for way in ways)
        + "   GB/s (ratio)"
    )
    for row in rows:
        cells = "".join(f"{row['ways'][way]['gb_s']:>9.1f} ({row['ways'][way]['ratio']:4.2f})" for way in ways)
        print(f"{row['copy']:8}{row['page_kib']:>4}KiB{row['layers']:>7}  {row['blocks']:12}{cells}")
    rows = result["verifying"]
    assert isinstance(rows, list)
    heads = "".join(f"{what + ', ' + verify:>18}" for what in ("store", "load") for verify in VERIFY)
    print(f"\n{'page':>7}{'layers':>7}{heads}   GB/s by the engine (ratio)")
    for row in rows:
        cells = [row[what][verify] for what in ("store", "load") for verify in VERIFY]
        words = "".join(f"{cell['gb_s']:>11.1f} ({cell['ratio']:4.2f})" for cell in cells)
        print(f"{row['page_kib']:>4}KiB{row['layers']:>7}{words}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=64, help="copied at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two page sizes, three rounds")
    parser.add_argument("--torch", action="store_true", help="torch's threads too: on busy cores 400 times slower")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.torch and not torch.cuda.is_available():
        torch.set_num_threads(1)
    pages_kib, rounds = ((4, 64), 3) if options.quick else (PAGES_KIB, options.rounds)
    total_bytes = options.megabytes << 20
    result = {
        "machine": machine(),
        "copies": copies(total_bytes, rounds, pages_kib, torch_threads=options.torch),
        "verifying": verifying(total_bytes, rounds, pages_kib),
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
