"""Processor time of the scheduler's thread, beside vLLM's ``CPUOffloadingManager``: ``make bench-scheduler``.

vLLM's scheduler half asks all sides, as in a server with one rank: one group of full attention, blocks of 16 tokens. No
bytes are moved; the rank's reports are made up. Sides take turns, and the garbage collector pauses. What is measured:

- **hit**: lookup, allocation, the step's message, and the report that the prompt is loaded
- **miss**, **store**: lookup and allocation of a new prompt; the step that offers its chunks, and the report of them
- **write-through**: the steps and reports until the slab has them, too
- **end**: the steps in which the request that stored and the one that hit end
- **pickle**: a step's message, as it is sent to ranks in other processes
- **waiting**: a step in which requests with a hit are asked once more, and nothing has changed for them
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tqdm import tqdm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks import tables
from nixl_offload.vllm.messages import WorkerReport
from tests.vllm import manager_rig as rigs

BLOCK_TOKENS = 16
SIDES = ("vllm", "memory", "memory+slab")


class Side(rigs.Rig):
    """A scheduler's half with room for ``slots`` chunks in each tier."""

    def __init__(self, name: str, chunk_tokens: int, slots: int, directory: str) -> None:
        self.name, self.spent_ms, self.waiting = name, Counter[str](), list[Request]()
        sizes = {"block_tokens": BLOCK_TOKENS, "chunk_blocks": chunk_tokens // BLOCK_TOKENS}
        tiers = [rigs.memory_tier(slots), rigs.slab_tier(Path(directory), capacity=slots * rigs.SLOT)]
        config = rigs.config_of(*tiers[: 1 + ("slab" in name)], staging="256MiB")
        offloading, caches = rigs.offloading_config(events=False, **sizes), rigs.kv_cache_config(BLOCK_TOKENS)
        super().__init__(config, offloading=offloading, caches=caches)
        if name == "vllm":
            self.spec.get_manager = partial(CPUOffloadingManager, slots)
            self.scheduler = OffloadingConnectorScheduler(self.spec, self.spec.vllm_config, caches)

    def timed(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what ``call`` does, and add its time."""
        gc.disable()
        began_s = time.thread_time()
        found = call(*arguments)
        self.spent_ms[what] += (time.thread_time() - began_s) * 1e3
        gc.enable()
        return found

    def work(self, what: str, **fields: Any) -> Any:
        """Schedule a step, and report that all its work is done; return its message to the ranks."""
        meta = self.timed(what, self.scheduler.build_connector_meta, rigs.step_of(**fields))
        report = KVConnectorOutput(kv_connector_worker_meta=WorkerReport(**rigs.all_done(meta)))
        self.timed(what, self.scheduler.update_connector_output, report)
        return meta

    def serve(self, number: int, tokens: int) -> None:
        """Compute a prompt, store it everywhere, then load it. Another ``number`` is another prompt."""
        for what, asked in (("store", "miss"), ("hit", "hit")):
            request = rigs.request_of(what, range(number, number + tokens), hash_tokens=BLOCK_TOKENS)
            ids = [*range(1, tokens // BLOCK_TOKENS + 1)]
            blocks, new = rigs.allocated(ids), SimpleNamespace(req_id=what, block_ids=(ids,), num_computed_tokens=0)
            self.scheduler.on_new_request(request)
            found, _ = self.timed(asked, self.scheduler.get_num_new_matched_tokens, request, 0)
            assert bool(found) == (what == "hit"), found
            self.timed(asked, self.scheduler.update_state_after_alloc, request, blocks, found)
            computed = {} if found else {"tokens": {what: tokens}, "scheduled_new_reqs": [new]}
            self.timed(f"pickle, {what}", pickle.dumps, self.work(what, **computed))
            while "slab" in self.name and getattr(self.work("write-through"), "moves", ()):
                pass
            request.status = RequestStatus.FINISHED_ABORTED  # computes nothing else
            self.work("end", finished_req_ids={what})

    def ask(self, _: int, request: Request, count: int) -> None:
        """Ask ``count`` copies of a request that has a hit and waits for blocks. They come in the first turn."""
        for at in range(len(self.waiting), count):
            self.waiting.append(copy.copy(request))
            self.waiting[at].request_id = str(at)
            self.scheduler.on_new_request(self.waiting[at])
        ask = self.scheduler.get_num_new_matched_tokens
        answers = self.timed("waiting", lambda: [ask(each, 0) for each in self.waiting])
        assert all(found for found, _ in answers)
        self.work("waiting")


def turns(sides: list[Side], rounds: int, work: Callable[[Side, int], None], **case: int) -> list[dict[str, Any]]:
    """Let the sides take turns, after one that warms up; return a row for each thing that they did."""
    ms: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        for side in sides[:: -1 if number % 2 else 1]:
            side.spent_ms.clear()
            work(side, number)
            for what, spent in side.spent_ms.items() if number else ():
                ms.setdefault(what, {}).setdefault(side.name, []).append(spent)
    return [{"what": what, **case, "ms": each} for what, each in ms.items()]


def measure(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each thing that is measured: its name, the sizes, and ``ms`` by side, of all rounds."""
    for chunk_tokens, tokens in tqdm([(chunk, tokens) for chunk in (256, BLOCK_TOKENS) for tokens in chosen.tokens]):
        slots = max(256, (2 if chosen.full else chosen.rounds + 1) * tokens // chunk_tokens)
        case = {"chunk_tokens": chunk_tokens, "tokens": tokens}
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            sides = [stack.enter_context(closing(Side(side, chunk_tokens, slots, name))) for side in SIDES]
            yield from turns(sides, chosen.rounds, partial(Side.serve, tokens=tokens), **case, requests=1)
            request = rigs.request_of("", range(chosen.rounds, chosen.rounds + tokens), hash_tokens=BLOCK_TOKENS)
            for count in sorted(chosen.waiting) if tokens == chosen.tokens[-1] else ():
                ask = partial(Side.ask, request=request, count=count)
                yield from turns(sides, chosen.rounds, ask, **case, requests=count)


def cells(row: dict[str, Any]) -> list[str]:
    """Return a line of the table: by side the median and range, and the median of each round's ratio to vLLM."""
    ms = {side: np.array(times) for side, times in row["ms"].items()}
    texts = {side: f"{np.median(each):,.2f} ({each.min():,.2f}–{each.max():,.2f})" for side, each in ms.items()}
    ratios = {side: f", × {np.median(each / ms[SIDES[0]]):.2f}" for side, each in ms.items() if SIDES[0] in ms}
    what = "{what}: {requests} × {tokens:,}, chunks of {chunk_tokens}".format(**row)
    return [what, *(texts.get(side, "–") + ratios.get(side, "") for side in SIDES)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler", description=__doc__)
    add = partial(parser.add_argument, nargs="+", type=int)
    add("--tokens", default=[1024, 8192, 32_768, 200_000, 131_072], help="of prompts; waiting requests have the last")
    add("--waiting", default=[1, 8, 64, 512], help="how many requests wait")
    add("--rounds", nargs=None, default=6)
    parser.add_argument("--full", action="store_true", help="tiers have room for two prompts, so that stores evict")
    parser.add_argument("--json", type=Path, help="write what was measured to this file, for docs.pictures")
    chosen = parser.parse_args(arguments)
    machine, rows = tables.machine(), sorted(measure(chosen), key=lambda row: row["what"])
    print(machine, tables.table(["ms", *SIDES], map(cells, rows)), sep="\n")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
