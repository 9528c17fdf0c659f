"""What verifying costs: candidate checksums alone, on top of a load, and what another thread feels of them.

``python -m benchmarks.checksum [--directory DIR] [--megabytes N] [--block-kib K] [--json]``. Candidates that are not
installed are left out. One thread loads and hashes; loads with and without checksum are measured interleaved and the
best round of each counts. The directory must lie on a disk for O_DIRECT to say anything.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType

import numpy as np
import xxhash

Digest = Callable[[memoryview], object]
ROUNDS = 5
CALLS_S = 0.3


def tree(leaf_bytes: int) -> Digest:
    """XXH3-64 over leaves and then over their digests: what a device that cannot sum in parallel would want."""
    digest = xxhash.xxh3_64_intdigest

    def over_leaves(block: memoryview) -> object:
        leaves = [digest(block[at : at + leaf_bytes]) for at in range(0, len(block), leaf_bytes)]
        return digest(np.array(leaves, dtype=np.uint64).data)

    return over_leaves


def optional(module: str, make: Callable[[ModuleType], Digest]) -> Digest | None:
    try:
        return make(import_module(module))
    except ImportError:
        return None


def candidates() -> dict[str, Digest]:
    found: dict[str, Digest | None] = {
        "xxh3_64": xxhash.xxh3_64_intdigest,
        "xxh3_128": xxhash.xxh3_128_intdigest,
        "xxh64": xxhash.xxh64_intdigest,
        "xxh3 tree, 64 KiB leaves": tree(65536),
        "xxh3 tree, 16 KiB leaves": tree(16384),
        "xxh3 tree, 4 KiB leaves": tree(4096),
        "sum of words (no checksum)": lambda block: np.frombuffer(block, dtype=np.uint64).sum(),
        "crc32 (zlib)": optional("zlib", lambda module: module.crc32),
        "crc32c (google-crc32c)": optional("google_crc32c", lambda module: lambda block: module.value(bytes(block))),
        "blake3": optional("blake3", lambda module: lambda block: module.blake3(block).digest()),
        "blake2b": optional("hashlib", lambda module: lambda block: module.blake2b(block).digest()),
    }
    return {name: digest for name, digest in found.items() if digest is not None}


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


@contextmanager
def test_file(directory: str | None, size: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path = os.path.join(folder, "payload")
        with open(path, "wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        yield path


class Load:
    """One way to load the file block by block: through the page cache or not, with or without a copy to KV blocks."""

    def __init__(self, path: str, size: int, block_bytes: int, *, direct: bool, scatter: bool) -> None:
        self._file = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        self._staging = mmap.mmap(-1, size)
        self._view = memoryview(self._staging)
        self._blocks = np.zeros(size if scatter else 0, dtype=np.uint8)
        self._size, self._block_bytes = size, block_bytes

    def run(self, digest: Digest | None) -> None:
        """Load every block; hash each as soon as it is there."""
        source = np.frombuffer(self._staging, dtype=np.uint8)
        for at in range(0, self._size, self._block_bytes):
            block = self._view[at : at + self._block_bytes]
            if os.preadv(self._file, [block], at) != len(block):
                raise OSError("short read")
            if digest is not None:
                digest(block)
            if self._blocks.size:
                self._blocks[at : at + len(block)] = source[at : at + len(block)]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def alone(digest: Digest, data: memoryview, block_bytes: int) -> float:
    """GB/s over data larger than the caches."""
    blocks = [data[at : at + block_bytes] for at in range(0, len(data), block_bytes)]
    best = min(seconds(lambda: [digest(block) for block in blocks]) for _ in range(ROUNDS))
    return len(data) / best / 1e9


def others_speed(digest: Digest, data: memoryview, block_bytes: int) -> float:
    """Percent of its small system calls that a thread still gets done while another one hashes.

    It waits for the GIL: in an engine it is vLLM's, and the other one the pump's. 100 is what it gets done beside
    another *process* that is busy, so that waiting for a core does not count. Median of interleaved rounds.
    """

    def work() -> None:
        while not stop.is_set():
            for at in range(0, len(data), block_bytes):
                digest(data[at : at + block_bytes])

    shares = []
    for _ in range(ROUNDS):
        with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) as busy:
            try:
                beside_process = small_calls()
            finally:
                busy.kill()
        stop = threading.Event()
        thread = threading.Thread(target=work)
        thread.start()
        try:
            shares.append(small_calls() / beside_process)
        finally:
            stop.set()
            thread.join()
    return float(np.median(shares)) * 100


def small_calls() -> int:
    """How many a thread gets done in ``CALLS_S`` seconds, once its neighbour is under way."""
    reader, writer = os.pipe()
    time.sleep(0.05)
    calls, end = 0, time.perf_counter() + CALLS_S
    while time.perf_counter() < end:
        os.write(writer, b"x")
        os.read(reader, 1)
        calls += 1
    os.close(reader)
    os.close(writer)
    return calls


def loads(path: str, size: int, block_bytes: int) -> Iterator[tuple[str, Load]]:
    for name, direct, scatter in (
        ("page cache", False, False),
        ("page cache + scatter", False, True),
        ("O_DIRECT", True, False),
        ("O_DIRECT + scatter", True, True),
    ):
        try:
            load = Load(path, size, block_bytes, direct=direct, scatter=scatter)
            load.run(None)
        except OSError:
            continue
        yield name, load
        load.close()


def measure(path: str, size: int, block_bytes: int) -> dict[str, object]:
    digests = candidates()
    data = np.fromfile(path, dtype=np.uint8).data
    table = {
        name: {
            "alone_gb_s": alone(digest, data, block_bytes),
            "others_speed_percent": others_speed(digest, data, block_bytes),
        }
        for name, digest in digests.items()
    }
    rows: dict[str, object] = {}
    for name, load in loads(path, size, block_bytes):
        plain, checked = [], []
        for _ in range(ROUNDS):
            plain.append(seconds(partial(load.run, None)))
            checked.append(seconds(partial(load.run, digests["xxh3_64"])))
        rows[name] = {"load_gb_s": size / min(plain) / 1e9, "checksum_percent": (min(checked) / min(plain) - 1) * 100}
    return {"block_kib": block_bytes >> 10, "candidates": table, "xxh3_64 on top of a load": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", help="where the test file goes; default: the temporary directory")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--block-kib", type=int, default=2048)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    size = options.megabytes << 20
    with test_file(options.directory, size) as path:
        result = measure(path, size, options.block_kib << 10)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    print(f"blocks of {options.block_kib} KiB, {options.megabytes} MiB\n")
    for title, rows in result.items():
        if isinstance(rows, dict):
            print(title)
            for name, values in rows.items():
                print(f"  {name:28}" + "".join(f"{value:10.1f} {unit}" for unit, value in values.items()))


if __name__ == "__main__":
    main()
