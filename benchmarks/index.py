"""Index: ns per call, bytes per key, collector pauses, seconds to reopen, for 1 M and 10 M keys.

Calls are given in CPU time, which other processes disturb less; reopening and writing in seconds on the clock.
Run ``python -m benchmarks.index [--keys N ...] [--directory DIR] [--json]``. Each case runs in a process
of its own, so that memory figures do not mix. 10 M keys take about 3 GB of memory, 3 GB of disk and some minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nixl_offload.index import Index
from nixl_offload.index.database import max_bytes
from nixl_offload.index.durable import DurableIndex
from nixl_offload.tiers.slab.reopen import adopt_rows
from nixl_offload.tiers.slot_allocator import SlabAllocator
from nixl_offload.types import Key, Location

SLOT_BYTES = 2 << 20
EXTENT_BYTES = 1 << 30
EXTENT_SLOTS = EXTENT_BYTES // SLOT_BYTES
KEY_BYTES = 36
GEOMETRY = {"benchmark": "index"}
CHAIN = 100_000
"""Calls per measurement."""
ROUNDS = 5


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def keys_of(material: bytes, numbers: Iterator[int] | range | list[int]) -> Iterator[Key]:
    """Yield new bytes objects, so that no hash is cached: what vLLM asks with is new in each request, too."""
    for number in numbers:
        yield Key(material[number * 32 : number * 32 + 32] + bytes(4))


def ns_per_call(call: Callable[[Key], object], make_keys: Callable[[], list[Key]]) -> float:
    """Return the median over rounds of the ns of CPU time per call, the loop around it subtracted."""
    results = []
    for _ in range(ROUNDS):
        keys = make_keys()
        start_s = time.thread_time()
        for key in keys:
            call(key)
        called_s = time.thread_time()
        for _ in keys:
            pass
        looped_s = time.thread_time()
        results.append(((called_s - start_s) - (looped_s - called_s)) * 1e9 / len(keys))
    return sorted(results)[ROUNDS // 2]


def measure_memory(count: int) -> dict[str, Any]:
    """Fill an index, then measure single calls on it."""
    material = np.random.default_rng(1).bytes(32 * count)
    absent = np.random.default_rng(2).bytes(32 * CHAIN)
    choose = random.Random(3)
    gc.collect()
    before_bytes = resident_bytes()
    start_s = time.thread_time()
    index = Index()
    for number, key in enumerate(keys_of(material, range(count))):
        index.insert_ready(key, Location(0, number * SLOT_BYTES, SLOT_BYTES))
    filled_s = time.thread_time() - start_s
    filled_bytes = resident_bytes()

    def some() -> list[Key]:
        return list(keys_of(material, [choose.randrange(count) for _ in range(CHAIN)]))

    def some_stored_in_order() -> list[Key]:
        first = choose.randrange(count - CHAIN + 1)
        return list(keys_of(material, range(first, first + CHAIN)))

    def pin_unpin(key: Key) -> None:
        index.pin(key)
        index.unpin(key)

    def replace(key: Key) -> None:
        victim = index.evict(SLOT_BYTES)
        assert victim is not None
        index.insert_writing(key, victim[1])
        index.commit(key)

    serial = iter(range(1 << 62))
    figures: dict[str, Any] = {
        "bytes_per_key": round((filled_bytes - before_bytes) / count, 1),
        "insert_ns": round(filled_s * 1e9 / count),
        "lookup_hit_ns": round(ns_per_call(index.state, some)),
        "lookup_chain_ns": round(ns_per_call(index.state, some_stored_in_order)),
        "lookup_miss_ns": round(ns_per_call(index.state, lambda: list(keys_of(absent, range(CHAIN))))),
        "touch_ns": round(ns_per_call(index.touch, some)),
        "pin_unpin_ns": round(ns_per_call(pin_unpin, some)),
        "replace_ns": round(
            ns_per_call(replace, lambda: [Key(next(serial).to_bytes(36, "big")) for _ in range(CHAIN)])
        ),
    }
    start_s = time.thread_time()
    gc.collect()
    figures["full_collection_ms"] = round((time.thread_time() - start_s) * 1e3, 1)
    figures["bytes_per_key_after_evictions"] = round((resident_bytes() - before_bytes) / count, 1)
    return figures


def reopen(path: str, count: int) -> tuple[float, float]:
    """Do what a slab tier does at its start. Returns seconds on the clock and of this thread's CPU time."""
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    journal, rows = DurableIndex.open(path, GEOMETRY)
    index = Index()
    stale = adopt_rows(rows, 0, index, SlabAllocator((count + EXTENT_SLOTS) * SLOT_BYTES, [SLOT_BYTES], EXTENT_BYTES))
    took = time.perf_counter() - start_s, time.thread_time() - start_cpu_s
    assert len(index) == count
    assert not stale
    assert journal.close(600.0)
    return took


def reopen_beside_a_busy_thread(path: str, count: int) -> float:
    """Return the seconds on the clock while another thread computes without a pause."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            for _ in range(1000):
                pass

    busy = threading.Thread(target=compute)
    busy.start()
    try:
        return reopen(path, count)[0]
    finally:
        done.set()
        busy.join()


def measure_reopen(count: int, directory: str) -> dict[str, Any]:
    """Write a journal of ``count`` keys, then open it and fill a new index and allocator from it.

    Most keys ascend, so that writing them does not take all day; writing is measured with random keys at the end.
    """
    material = np.random.default_rng(1).bytes(32 * CHAIN)
    path = os.path.join(directory, f"index-{count}.sqlite")
    journal, _ = DurableIndex.open(path, GEOMETRY)
    for number in range(count - CHAIN):
        journal.put(Key(number.to_bytes(KEY_BYTES, "big")), Location(0, number * SLOT_BYTES, SLOT_BYTES))
        if number % CHAIN == 0:
            assert journal.flush(600.0)
    assert journal.flush(600.0)
    locations = [Location(0, number * SLOT_BYTES, SLOT_BYTES) for number in range(count - CHAIN, count)]
    start_s, start_cpu_s = time.perf_counter(), time.thread_time()
    for key, location in zip(keys_of(material, range(CHAIN)), locations, strict=True):
        journal.put(key, location)
    put_s = time.thread_time() - start_cpu_s
    assert journal.flush(600.0)
    written_s = time.perf_counter() - start_s
    assert journal.close(600.0)

    gc.collect()
    before_bytes = peak_bytes()
    reopened_s, reopened_cpu_s = reopen(path, count)
    reopened_peak_bytes = peak_bytes() - before_bytes
    beside_s = reopen_beside_a_busy_thread(path, count)
    os.unlink(path)
    return {
        "reopen_s": round(reopened_s, 2),
        "reopen_cpu_s": round(reopened_cpu_s, 2),
        "reopen_beside_a_busy_thread_s": round(beside_s, 2),
        "reopen_peak_bytes_per_key": round(reopened_peak_bytes / count),
        "journal_put_ns": round(put_s * 1e9 / CHAIN),
        "journal_random_rows_written_per_s": round(CHAIN / written_s),
        "journal_max_bytes_per_key": round(max_bytes(count, KEY_BYTES) / count, 1),
    }


def run_case(what: str, count: int, directory: str) -> dict[str, Any]:
    """Measure in a new process."""
    command = [sys.executable, "-m", "benchmarks.index", "--case", what, "--keys", str(count)]
    output = subprocess.run([*command, "--directory", directory], check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(output)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--directory", default=None, help="where the database is written; default: a temporary one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--case", choices=["memory", "reopen"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(arguments.keys) < CHAIN:
        parser.error(f"--keys: at least {CHAIN}")

    if arguments.case == "memory":
        print(json.dumps(measure_memory(arguments.keys[0])))
        return
    if arguments.case == "reopen":
        print(json.dumps(measure_reopen(arguments.keys[0], arguments.directory)))
        return

    results = []
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="nixl-offload-bench-") as directory:
        for count in arguments.keys:
            result = {
                "keys": count,
                **run_case("memory", count, directory),
                **run_case("reopen", count, directory),
            }
            results.append(result)
            if not arguments.json:
                print(", ".join(f"{name} {value:,}" for name, value in result.items()))
    if arguments.json:
        print(json.dumps({"python": sys.version.split()[0], "cpus": os.cpu_count(), "results": results}, indent=2))


if __name__ == "__main__":
    main()
