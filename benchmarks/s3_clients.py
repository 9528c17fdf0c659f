"""obstore against boto3 behind ``stores.base``: HEAD, LIST, GET, PUT, DELETE against rclone's server on this machine.

Rounds alternate between the clients; the table has medians. Run ``python -m benchmarks.s3_clients [--rounds N]
[--json]``; takes some
minutes. Backs decision 0009.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from examples.s3_server import RcloneServer
from nixl_offload.config.schema import S3Config
from nixl_offload.stores.base import Store
from nixl_offload.stores.select import open_store

CLIENTS: Final = ("obstore", "boto3")
THREADS: Final = (8, 16)
SETTLE_S: Final = 1.5
"""rclone 1.75 may take an object for its temporary file, which is gone, until its directory cache is a second old."""
HEADS: Final = 800
SIZES: Final = {"64 KiB": (64 << 10, 512), "2 MiB": (2 << 20, 96)}
"""Bytes of an object, and how many of them."""


def seconds(pool: ThreadPoolExecutor, call: Callable[[str], object], names: Sequence[str]) -> float:
    """Return how long the pool takes to call for every name."""
    start_s = time.perf_counter()
    for _ in pool.map(call, names):
        pass
    return time.perf_counter() - start_s


def measure(store: Store, threads: int, rounds: str) -> dict[str, float]:
    """Return figures by operation: MB/s of data, else operations (LIST: keys) per second."""
    figures: dict[str, float] = {}
    with ThreadPoolExecutor(threads) as pool:
        for label, (size_bytes, count) in SIZES.items():
            content = memoryview(os.urandom(size_bytes))
            names = [f"{rounds}/{size_bytes}/{number:04x}" for number in range(count)]
            buffers = {name: memoryview(bytearray(os.urandom(size_bytes))) for name in names}

            def read(name: str, buffers: dict[str, memoryview] = buffers) -> None:
                store.read_into(name, 0, buffers[name])

            def write(name: str, content: memoryview = content) -> None:
                store.write(name, content)

            total_mb = size_bytes * count / 1e6
            figures[f"PUT {label}, MB/s"] = total_mb / seconds(pool, write, names)
            time.sleep(SETTLE_S)
            figures[f"GET {label}, MB/s"] = total_mb / seconds(pool, read, names)
            assert all(buffer == content for buffer in buffers.values())
        small = [f"{rounds}/{64 << 10}/{number:04x}" for number in range(SIZES["64 KiB"][1])]
        probes = [f"{rounds}/{64 << 10}/{number:04x}" for number in range(HEADS)]
        figures["HEAD, 1/s"] = HEADS / seconds(pool, store.head, probes)
        start_s = time.perf_counter()
        listed = sum(1 for _ in range(8) for _ in store.list(f"{rounds}/{64 << 10}/"))
        figures["LIST, keys/s"] = listed / (time.perf_counter() - start_s)
        start_s = time.perf_counter()
        store.delete(small)
        figures["DELETE, keys/s"] = len(small) / (time.perf_counter() - start_s)
        store.delete([f"{rounds}/{2 << 20}/{number:04x}" for number in range(SIZES["2 MiB"][1])])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[int, dict[str, dict[str, list[float]]]] = {threads: {} for threads in THREADS}
    cpu_s: dict[str, list[float]] = {client: [] for client in CLIENTS}
    with RcloneServer() as server:
        os.environ.update(server.environment)
        tier = S3Config.model_validate({"kind": "s3", "bucket": server.bucket, "endpoint": server.endpoint})
        stores = {client: open_store(tier, client) for client in CLIENTS}
        for number in range(arguments.rounds + 1):
            for threads in THREADS:
                for client in CLIENTS if number % 2 else reversed(CLIENTS):
                    before_s = time.process_time()
                    figures = measure(stores[client], threads, f"{client}-{threads}-{number}")
                    if number == 0:
                        continue  # Warms up.
                    cpu_s[client].append(time.process_time() - before_s)
                    for operation, value in figures.items():
                        results[threads].setdefault(operation, {}).setdefault(client, []).append(value)
        for store in stores.values():
            store.close()
    report: list[dict[str, Any]] = [
        {"threads": threads, "operation": operation, **{c: round(statistics.median(v)) for c, v in by_client.items()}}
        for threads, operations in results.items()
        for operation, by_client in operations.items()
    ]
    if arguments.json:
        json.dump({"rows": report, "cpu_s": {c: statistics.median(v) for c, v in cpu_s.items()}}, sys.stdout, indent=1)
        return
    print("| threads | operation | obstore | boto3 |\n|---:|---|---:|---:|")
    for row in report:
        print(f"| {row['threads']} | {row['operation']} | {row['obstore']:,} | {row['boto3']:,} |")
    print(", ".join(f"{client}: {statistics.median(v):.2f} CPU s per round" for client, v in cpu_s.items()))


if __name__ == "__main__":
    main()
