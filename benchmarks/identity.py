"""What knowing a local model by its content costs: cold, from the page cache, remembered; beside ``cat``.

``python -m benchmarks.identity [--size 16GB] [--shards 4] [--threads 1 2 4] [--rounds 5] [--directory DIR] [--json]``.
Makes a checkpoint of random bytes in the safetensors format, with the tensors of Llama-3.1-8B scaled to ``--size``, in
a directory that is removed in the end. Every case runs once a round; medians count. "Cold" means that the files were
dropped from the page cache, and says something only on a disk; "remembered" needs one that keeps change times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from nixl_offload.identity.weights import WeightsDigest
from nixl_offload.units import parse_size

LAYERS, HIDDEN, KV, INNER, VOCABULARY = 32, 4096, 1024, 14336, 128256
WHOLE_BYTES = 16_060_522_496
RANDOM_BYTES = 256 << 20
SETTLE_S = 2.5
"""Files younger than this are not remembered."""
WINDOW_S, WINDOWS = 0.3, 21
"""So long, and so often, a loop of the main thread is watched."""


def tensors() -> dict[str, tuple[int, int]]:
    """Return rows and columns of every tensor of Llama-3.1-8B."""
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            f"{at}input_layernorm.weight": (1, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}post_attention_layernorm.weight": (1, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{at}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV, HIDDEN),
        }
    return found | {"model.norm.weight": (1, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}


def make_checkpoint(directory: Path, size_bytes: int, shards: int) -> None:
    """Write the tensors, their rows scaled so that all together take ``size_bytes``, dealt out to ``shards`` files."""
    material = memoryview(os.urandom(RANDOM_BYTES))
    chance = random.Random(1)
    names = list(tensors().items())
    per_shard = -(-len(names) // shards)
    progress = tqdm(total=size_bytes, unit="B", unit_scale=True, desc="writing", disable=None)
    for shard in range(shards):
        header, at = {}, 0
        for name, (rows, columns) in names[shard * per_shard : (shard + 1) * per_shard]:
            scaled = max(1, round(rows * size_bytes / WHOLE_BYTES))
            header[name] = {
                "dtype": "BF16",
                "shape": [scaled, columns],
                "data_offsets": [at, at + scaled * columns * 2],
            }
            at += scaled * columns * 2
        with (directory / f"model-{shard + 1:05}-of-{shards:05}.safetensors").open("wb") as file:
            text = json.dumps(header).encode()
            file.write(struct.pack("<Q", len(text)) + text)
            while at:
                begin = chance.randrange(RANDOM_BYTES // 2)
                piece = material[begin : begin + min(at, RANDOM_BYTES // 2)]
                file.write(piece)
                at -= len(piece)
                progress.update(len(piece))
            file.flush()
            os.fsync(file.fileno())
    progress.close()


def drop_from_page_cache(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_with_cat(paths: list[Path]) -> float:
    """Return the seconds of CPU that ``cat`` took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cat", *paths], stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def read_with_digest(model: Path, cache: Path | None, threads: int) -> float:
    """Return the seconds of CPU that a digest took."""
    before_s = time.process_time()
    digest = WeightsDigest(str(model), cache, threads=threads)
    while not digest.wait(60):
        pass
    digest.result()
    return time.process_time() - before_s


def watch_loop() -> tuple[float, float]:
    """Go round a loop that never lets go of the interpreter; return rounds a second of CPU, and the share of time in
    which the main thread neither ran nor waited for a core: what is left is waiting for the interpreter.
    """
    before, began_s, cpu_s, rounds = scheduled_ns(), time.perf_counter(), time.thread_time(), 0
    while time.perf_counter() - began_s < WINDOW_S:
        for _ in range(2000):
            rounds += 1
    passed_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - cpu_s
    return rounds / cpu_s, max(0.0, 1 - (scheduled_ns() - before) / 1e9 / passed_s)


def scheduled_ns() -> int:
    """Return how long this thread has run or waited for a core."""
    with open(f"/proc/self/task/{threading.get_native_id()}/schedstat") as file:
        run_ns, queue_ns, _ = file.read().split()
    return int(run_ns) + int(queue_ns)


def loop_cost(model: Path, threads: int) -> dict[str, float]:
    """Return what the main thread loses while a digest is made; medians of windows with and without, in turns."""
    windows = []
    for _ in range(WINDOWS):
        speed_alone, blocked_alone = watch_loop()
        digest = WeightsDigest(str(model), None, threads=threads)
        time.sleep(0.02)
        before = digest.progress()[0]
        speed, blocked = watch_loop()
        read_bytes = digest.progress()[0] - before
        digest.close()
        digest.wait(60)
        windows.append((speed / speed_alone, blocked_alone, blocked, read_bytes / WINDOW_S / 1e9))
    speed, blocked_alone, blocked, gb_s = (statistics.median(figures) for figures in zip(*windows, strict=True))
    return {
        "percent_of_speed_per_cpu": round(speed * 100, 1),
        "percent_blocked": round(blocked * 100, 2),
        "percent_blocked_alone": round(blocked_alone * 100, 2),
        "gb_s_read": round(gb_s, 2),
    }


def measure(model: Path, cache: Path, thread_counts: list[int], rounds: int) -> dict[str, object]:
    paths = sorted(model.iterdir())
    size_bytes = sum(path.stat().st_size for path in paths)
    cases: dict[str, Callable[[], float]] = {"cat, cold": lambda: read_with_cat(paths)}
    cases |= {f"{n} threads, cold": lambda n=n: read_with_digest(model, None, n) for n in thread_counts}
    cases["cat, page cache"] = lambda: read_with_cat(paths)
    cases |= {f"{n} threads, page cache": lambda n=n: read_with_digest(model, None, n) for n in thread_counts}
    cases["remembered"] = lambda: read_with_digest(model, cache, 1)
    time.sleep(SETTLE_S)
    read_with_digest(model, cache, 1)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in tqdm(range(rounds), desc="rounds", disable=None):
        for name, case in cases.items():
            if name.endswith("cold"):
                drop_from_page_cache(paths)
            began_s = time.perf_counter()
            cpu_s = case()
            taken[name].append((time.perf_counter() - began_s, cpu_s))
    rows = {}
    for name, pairs in taken.items():
        seconds = statistics.median(pair[0] for pair in pairs)
        rows[name] = {
            "seconds": round(seconds, 3),
            "least_seconds": round(min(pair[0] for pair in pairs), 3),
            "cpu_seconds": round(statistics.median(pair[1] for pair in pairs), 3),
            "gb_s": round(size_bytes / seconds / 1e9, 2),
        }
    return {
        "bytes": size_bytes,
        "files": len(paths),
        "rounds": rounds,
        "load": os.getloadavg()[0],
        "rows": rows,
        "a busy main thread meanwhile": {f"{n} threads": loop_cost(model, n) for n in thread_counts},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=parse_size, default="16GB")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where the checkpoint goes for a while; default: the temporary directory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        model, cache = Path(folder, "model"), Path(folder, "cache")
        model.mkdir()
        make_checkpoint(model, options.size, options.shards)
        result = measure(model, cache, options.threads, options.rounds)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for title, value in result.items():
        if isinstance(value, dict):
            print(title)
            for name, figures in value.items():
                print(f"  {name:24}" + "".join(f"{figure:10} {unit}" for unit, figure in figures.items()))
        else:
            print(f"{title}: {value}")


if __name__ == "__main__":
    main()
