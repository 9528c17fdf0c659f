"""Several engines on one drive: a slab for each against one shared directory, and what the directory costs besides.

``python -m benchmarks.data_parallel [--dir DIR] [--json] [--rounds N] [--engines 1,2,4]``. Engines are processes; they
store and load at the same time, each its own chunks, from and to KV blocks in host memory, checksums and all. Slab and
directory take turns. Then the shared directory alone: what a request waits until it knows what of its prompt is there,
and how long a pass of eviction takes over so many files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.file_engine import WholeEngine
from nixl_offload.config.schema import LookupOptions
from nixl_offload.identity.namespace import GroupFields, Namespace, NamespaceFields, make_namespace
from nixl_offload.movers.base import Op
from nixl_offload.stores.directory import TreeStore
from nixl_offload.tiers.shared import eviction
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.types import Key, Lookup, LookupContext

KIB, MIB = 1 << 10, 1 << 20
SHAPES: Final = {"1024 × 64 KiB": (1024, 64 * KIB), "128 × 2 MiB": (128, 2 * MIB), "64 × 8 MiB": (64, 8 * MIB)}
"""Chunks of each engine, and their bytes."""
PROMPT_CHUNKS: Final = 1000
STEP_S: Final = 0.002


def _engine(pipe: Connection, directory: str, chunks: int, size_bytes: int, shares: bool) -> None:
    """A process: store or load all chunks each time it is told to, and tell in how many seconds."""
    engine = WholeEngine("posix_uring", Path(directory), chunks, size_bytes, shares=shares)
    pipe.send(0.0)
    while (op := pipe.recv()) is not None:
        pipe.send(engine.run(op, np.random.default_rng().permutation(chunks).astype(np.int32)))
    engine.close()


def throughput(root: Path, engines: int, shape: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return medians in MB/s of each engine: by layout, then by operation."""
    chunks, size_bytes = SHAPES[shape]
    context = multiprocessing.get_context("spawn")
    sides: dict[str, list[Connection]] = {}
    processes = []
    for layout in ("slab", "shared_dir"):
        sides[layout] = []
        for number in range(engines):
            directory = root / layout if layout == "shared_dir" else root / f"dp-{number}"
            directory.mkdir(exist_ok=True)
            pipe, other = context.Pipe()
            arguments = (other, str(directory), chunks, size_bytes, layout == "shared_dir")
            processes.append(context.Process(target=_engine, args=arguments, daemon=True))
            processes[-1].start()
            sides[layout].append(pipe)
            pipe.recv()
    seconds: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for op in (Op.WRITE, Op.READ):
            for layout, pipes in sides.items():
                for pipe in pipes:
                    pipe.send(op)
                seconds.setdefault((layout, op.name), []).append(statistics.mean(pipe.recv() for pipe in pipes))
    for pipes in sides.values():
        for pipe in pipes:
            pipe.send(None)
    for process in processes:
        process.join()
    return {
        layout: {
            name: chunks * size_bytes / 1e6 / statistics.median(seconds[layout, op.name])
            for name, op in (("store", Op.WRITE), ("load", Op.READ))
        }
        for layout in sides
    }


def _namespace() -> Namespace:
    fields: dict[str, Any] = dict.fromkeys(("attention_backend", "revision", "weights", "hash_seed"), None)
    return make_namespace(
        NamespaceFields(
            tenant="default",
            engine="benchmark",
            platform="cpu",
            model="model",
            dtype="bfloat16",
            kv_layout="LBHNC",
            tokens_per_block=16,
            blocks_per_chunk=1,
            tokens_per_hash=16,
            hash_algorithm="sha256",
            groups=(GroupFields(0, 16, (4096,)),),
            ranks=("ab",),
            settings={},
            tp=1,
            pp=1,
            pcp=1,
            dcp=1,
            world_size=1,
            **fields,
        )
    )


def _key(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(8, "big")).digest() + bytes(4))


def directory_costs(root: Path, files: int) -> dict[str, float]:
    """Return milliseconds: of a lookup by how much of a prompt is there, and of passes over ``files`` files."""
    namespace, store = _namespace(), TreeStore(str(root / "tree"))
    for number in range(files):
        path = Path(store.where, shard_name(namespace.name, _key(number), 0))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            os.truncate(file.fileno(), 4096)
    found: dict[str, float] = {}
    for share in (0.0, 0.5, 1.0):
        there = round(share * PROMPT_CHUNKS)
        keys = [_key(number if number < there else files + number) for number in range(PROMPT_CHUNKS)]
        samples = []
        for _ in range(5):
            tier = SharedTier(
                0,
                TreeStore(store.where),
                namespace,
                lookup=LookupOptions(),
                ttl_s=None,
                name="benchmark",
            )
            samples.append(_look(tier, keys, there))
            tier.close()
        found[f"lookup, {share:.0%} of {PROMPT_CHUNKS} there"] = 1e3 * statistics.median(samples)
    for name, capacity_bytes in (("nothing goes", 1 << 50), ("half goes", files * 4096 // 2)):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        eviction.shrink(store, capacity_bytes)
        found[f"pass over {files} files, {name}"] = 1e3 * (time.perf_counter() - began_s)
        found[f"pass over {files} files, {name}: processor"] = 1e3 * (time.process_time() - began_cpu_s)
    store.close()
    return found


def _look(tier: SharedTier, keys: list[Key], there: int) -> float:
    """Ask as vLLM does, once a step, until nothing is unknown."""
    context, began_s = LookupContext("request"), time.perf_counter()
    while True:
        now_s, hits = time.monotonic(), 0
        for key in keys:
            answer = tier.lookup(key, context, now_s)
            if answer is Lookup.MISS:
                assert hits == there, (hits, there)
                return time.perf_counter() - began_s
            hits += answer is Lookup.HIT
        if hits == len(keys):
            return time.perf_counter() - began_s
        tier.flush(now_s)
        time.sleep(STEP_S)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", default=None, help="where; default: a temporary directory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", default="1,2,4")
    parser.add_argument("--files", type=int, default=20_000, help="in the shared directory, for lookups and eviction")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="data-parallel-", dir=arguments.dir))
    results: dict[str, Any] = {}
    try:
        for engines in map(int, arguments.engines.split(",")):
            for shape in SHAPES:
                found = throughput(root, engines, shape, arguments.rounds)
                results[f"{engines} × {shape}"] = found
                told = "; ".join(
                    f"{layout}: store {found[layout]['store']:,.0f}, load {found[layout]['load']:,.0f}"
                    for layout in found
                )
                print(f"{engines} engines × {shape}, MB/s each: {told}", file=sys.stderr)
                for path in root.iterdir():
                    shutil.rmtree(path)
        results["shared directory, ms"] = directory_costs(root, arguments.files)
        for name, value in results["shared directory, ms"].items():
            print(f"{name}: {value:,.1f} ms", file=sys.stderr)
        if arguments.json:
            print(json.dumps(results, indent=2))
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
