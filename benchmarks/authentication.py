"""What ``authenticate`` costs: jobs through an engine over a shared directory with MACs and without, and MACs alone.

``python -m benchmarks.authentication [--directory DIR] [--megabytes N] [--rounds N] [--json]``. Both kinds take turns
in one process, in an order drawn each round. GB/s are of processor time, which other work disturbs less, and count each
byte once; a ratio is the median over rounds, with their range. Put the directory on a tmpfs to see nothing else.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import torch
import xxhash
from blake3 import blake3

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.layout import GroupLayout, KVLayout, RegionSpec
from nixl_offload.engine import ChunkIO, Engine
from nixl_offload.movers.copy import CopyMover
from nixl_offload.tiers.shared_dir.link import TreeLink
from nixl_offload.types import Key, Location, Outcome

BLOCKS_PER_CHUNK = 16
LAYERS = 32
PAGES_KIB = (4, 16, 64)


def engine_of(directory: Path, layout: KVLayout, kv: list[torch.Tensor], keys: ChunkKeys | None) -> Engine:
    directory.mkdir()
    link = TreeLink(str(directory), "ab" * 16, 0, CopyMover(), direct_io=False, clock=time.monotonic)
    return Engine(
        tensors=kv,
        layout=layout,
        link=link,
        rank_namespace=bytes(32),
        staging_bytes=max(256 << 20, 32 * layout.slot_bytes(0)),
        direct_min_extent_bytes=1 << 62,
        keys=keys,
    )


def seconds_of(engine: Engine, submit: Callable[[], None]) -> float:
    """Processor time of a job until it has ended."""
    begin = time.process_time()
    submit()
    while not (done := engine.finished()):
        time.sleep(0.002)
    assert set(done[0].outcomes) == {Outcome.OK}, done[0].errors
    return time.process_time() - begin


def jobs(directory: Path, page_bytes: int, total_bytes: int, rounds: int) -> dict[str, object]:
    """Store and load with and without MACs, in turns."""
    count = max(1, total_bytes // (page_bytes * LAYERS * BLOCKS_PER_CHUNK))
    blocks = count * BLOCKS_PER_CHUNK
    kv = [torch.ones((blocks, page_bytes), dtype=torch.uint8) for _ in range(LAYERS)]
    specs = tuple(RegionSpec(n, tensor.data_ptr(), blocks, page_bytes, page_bytes) for n, tensor in enumerate(kv))
    layout = KVLayout(specs, (GroupLayout.of_pages((n, page_bytes) for n in range(LAYERS)),), BLOCKS_PER_CHUNK)
    ids = np.random.default_rng(1).permutation(blocks).astype(np.int32).reshape(count, BLOCKS_PER_CHUNK)
    location = Location(0, 0, layout.slot_bytes(0))
    chunks = [ChunkIO(Key(n.to_bytes(32, "big") + bytes(4)), location, 0, ids[n], 0) for n in range(count)]
    times: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        kinds = {"without": None, "with": ChunkKeys([os.urandom(32)])}
        engines = {
            name: stack.enter_context(closing(engine_of(directory / f"{name}-{page_bytes}", layout, kv, keys)))
            for name, keys in kinds.items()
        }
        job = 0
        for _ in range(rounds + 1):
            for name in random.sample(list(engines), 2):
                engine = engines[name]
                for what, submit in (("store", engine.submit_store), ("load", engine.submit_load)):
                    job += 1
                    took = seconds_of(engine, lambda submit=submit, job=job: submit(job, chunks))
                    times.setdefault((what, name), []).append(took)
    moved = count * BLOCKS_PER_CHUNK * page_bytes * LAYERS
    rows: dict[str, object] = {}
    for what in ("store", "load"):
        without, signed = (times[what, name][1:] for name in ("without", "with"))  # the first round warms up
        ratios = [mine / plain for plain, mine in zip(without, signed, strict=True)]
        rows[what] = {
            "without_gb_s": moved / statistics.median(without) / 1e9,
            "with_gb_s": moved / statistics.median(signed) / 1e9,
            "time_ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
    return rows


def alone(total_bytes: int, rounds: int) -> dict[str, float]:
    """GB/s of candidates over pieces of 4 MiB, in turns."""
    data, key = memoryview(os.urandom(total_bytes)), os.urandom(32)
    candidates: dict[str, Callable[[memoryview], object]] = {
        "xxh3_64 (no MAC)": xxhash.xxh3_64_intdigest,
        "blake3, keyed": lambda piece: blake3(piece, key=key).digest(),
        "hmac-sha-256": lambda piece: hmac.digest(key, piece, "sha256"),
    }
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.poly1305 import Poly1305
    except ImportError:
        pass
    else:

        def gmac(piece: memoryview) -> object:
            encryptor = Cipher(algorithms.AES(key), modes.GCM(os.urandom(12))).encryptor()
            encryptor.authenticate_additional_data(piece)
            encryptor.finalize()
            return encryptor.tag

        candidates |= {"aes-gmac": gmac, "poly1305": lambda piece: Poly1305.generate_tag(key, piece)}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name in random.sample(list(candidates), len(candidates)):
            begin = time.process_time()
            for at in range(0, total_bytes, 4 << 20):
                candidates[name](data[at : at + (4 << 20)])
            times[name].append(time.process_time() - begin)
    return {name: total_bytes / statistics.median(took) / 1e9 for name, took in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size = options.megabytes << 20
    result: dict[str, object] = {"alone": alone(size, options.rounds)}
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for page in PAGES_KIB:
            result[f"{page} KiB"] = jobs(Path(directory), page << 10, size, options.rounds)
    print(json.dumps(result, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
