"""``nixl-offload verify CONFIG``: reads and checks everything that is stored, while servers write and evict.

Before ``TierRun`` calls a chunk bad, it reads the chunk again: a server may have changed it meanwhile.

Threading: the main thread lists, counts and prints; ``THREADS`` others read and judge, each with a checker of its own.
Memory: a piece per thread and the names of the chunks in flight.
"""

from __future__ import annotations

import json
import threading
import time
from argparse import ArgumentParser, Namespace
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Literal, NamedTuple

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.cli.common import (
    Progress,
    TierFailure,
    about_size,
    add_selection,
    argument,
    keys_of,
    moment,
    plural,
    read_size,
    report_nothing_found,
    selected,
    set_up,
    visit,
)
from nixl_offload.cli.shard import NO_KEY, ChunkChecker, ShardFault
from nixl_offload.config import load_config
from nixl_offload.errors import NixlOffloadError, StoreError
from nixl_offload.tiers.inspect import ChunkInfo, Inspector, NamespaceInfo, ShardInfo, printable
from nixl_offload.tiers.shared.sweep import GRACE_S

_DESCRIPTION = """\
Reads every chunk in the tiers of CONFIG and checks it as a server does before use: header, key, lengths, block
checksums, MACs, and that no shard is missing. Servers do not need it: they detect a bad chunk when they load it,
and compute it again. verify finds bad chunks earlier, and prints where they lie.

    nixl-offload verify kv.yaml                        # everything
    nixl-offload verify kv.yaml --rate 200MiB/s        # beside a busy server
    nixl-offload verify kv.yaml --json                 # one line per chunk that is not good, then one with totals

Servers may run meanwhile. A chunk that a server changes during the check counts as changed, not as bad.
"""

THREADS: Final = 8
_FAILURES_IN_A_ROW: Final = 3
"""After this many unreadable chunks, the storage counts as down."""
_PAUSES_BESIDE_AN_ENGINE_S: Final = (0.3, 1.0)
"""Pauses before a slot is read again. An engine records an eviction in its index within 0.1 s, and writes a slot in
less."""
Verdict = Literal["good", "bad", "changed", "stale", "unfinished", "unreadable", "unauthenticated"]
"""``unfinished``: shards are missing, but the chunk is so young that they may still be written."""
_VERDICT_WORDS: Final[dict[Verdict, str]] = {
    "good": "good",
    "bad": "bad",
    "changed": "changed meanwhile (evicted, rewritten or deleted)",
    "stale": "forgotten (the slot holds another chunk by now; harmless)",
    "unfinished": "not finished (still being written)",
    "unreadable": "not readable (the storage failed)",
    "unauthenticated": "not authenticated: no key (all else of them is right)",
}


def add_verify(parser: ArgumentParser) -> None:
    """Add the arguments of ``verify`` to ``parser``."""
    set_up(parser, run, _DESCRIPTION, json="print JSON lines")
    add_selection(parser)
    how = "read no faster, such as 200MiB/s"
    parser.add_argument("--rate", metavar="SIZE/s", type=argument(_read_rate), help=how)


def _read_rate(text: str) -> int:
    """Return bytes per second."""
    per_second = text.removesuffix("/s")
    if per_second == text:
        raise ValueError("is no rate; allowed: a size and /s, such as 500MB/s")
    rate = read_size(per_second)
    if not rate:
        raise ValueError("would never end")
    return rate


def run(arguments: Namespace) -> int:
    """Print chunks that are not good, and totals. A tier that fails is reported, then the next. Raises ConfigError."""
    config = load_config(arguments.file)
    keys, results, runs, failed = keys_of(config), list[dict[str, Any]](), list[TierRun](), False

    def verify(inspector: Inspector) -> dict[str, Any]:
        runs.append(TierRun(arguments, inspector, keys))
        return runs[-1].run()

    for found in visit(arguments, config, verify):
        if isinstance(found, TierFailure):
            failed = True
            results.append({"tier": found.kind, "where": found.where, "failure": found.words})
        else:
            results.append(found)
    if arguments.json:
        print(json.dumps({"tiers": results}))
    if not failed and report_nothing_found(arguments, [name for each in runs for name in each.namespaces]):
        return 1
    return 1 if failed or any(each.is_bad for each in runs) else 0


class ChunkVerdict(NamedTuple):
    """The result of checking a chunk."""

    kind: Verdict
    chunk: ChunkInfo
    """The chunk as it was last read."""
    faults: tuple[ShardFault, ...] = ()


class TierRun:
    """One run over one tier; usable once."""

    def __init__(self, arguments: Namespace, inspector: Inspector, keys: ChunkKeys | None) -> None:
        self.namespaces: list[NamespaceInfo] = []
        """The selected namespaces."""
        self._chunks: dict[Verdict, int] = dict.fromkeys(_VERDICT_WORDS, 0)
        self._bytes_checked = self._total_bytes = self._failed_in_a_row = 0
        self._arguments, self._inspector, self._keys = arguments, inspector, keys
        self._bar = Progress()
        self._began_s = time.monotonic()
        self._stop = threading.Event()
        self._own = threading.local()
        self._lock = threading.Lock()
        """Guards the counts of the reading threads."""
        self._bytes_read = 0
        self._next_read_s = 0.0

    @property
    def is_bad(self) -> bool:
        """Whether a chunk is bad or unreadable, or a namespace could not be listed."""
        return bool(self._chunks["bad"] or self._chunks["unreadable"] or self._unlisted)

    @property
    def _unlisted(self) -> int:
        return sum(namespace.trouble is not None for namespace in self.namespaces)

    def run(self) -> dict[str, Any]:
        """Read everything, and return the totals as plain data. Raises StoreError, TierError, KeyboardInterrupt."""
        self.namespaces = list(selected(self._inspector, self._arguments))
        self._total_bytes = sum(self._inspector.measure(namespace).size_bytes for namespace in self.namespaces)
        self._began_s, finished = time.monotonic(), False
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="nixl-offload-verify")
        try:
            for namespace in self.namespaces:
                in_flight: deque[Future[ChunkVerdict]] = deque()
                for chunk in self._inspector.chunks(namespace):
                    in_flight.append(pool.submit(self._judge, namespace, chunk))
                    if len(in_flight) >= 2 * THREADS:
                        self._count(namespace, in_flight.popleft().result())
                while in_flight:
                    self._count(namespace, in_flight.popleft().result())
            finished = True
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._bar.clear()
            elapsed_s = time.monotonic() - self._began_s
            if not self._arguments.json:
                self._print_totals(elapsed_s, finished=finished)
        return {
            "tier": self._inspector.kind,
            "where": self._inspector.where,
            "chunks": self._chunks,
            "bytes_checked": self._bytes_checked,
            "unlisted_namespaces": self._unlisted,
            "finished": finished,
            "seconds": round(elapsed_s, 3),
            "bytes_read": self._bytes_read,
        }

    # On the pool's threads.

    def _judge(self, namespace: NamespaceInfo, chunk: ChunkInfo) -> ChunkVerdict:
        """Check a chunk. Raises NixlOffloadError: interrupted, or the index cannot be read."""
        if not hasattr(self._own, "checker"):
            self._own.checker = ChunkChecker(self._inspector, self._keys, self._read)
        check = self._own.checker.check
        faults = check(namespace, chunk)
        beside_an_engine = bool(_without_keys(faults)) and self._inspector.in_use(namespace) is not None
        for pause_s in _PAUSES_BESIDE_AN_ENGINE_S if beside_an_engine else (0.0,):
            if not _without_keys(faults):
                break
            self._stop.wait(pause_s)
            now = self._inspector.look_again(namespace, chunk)
            if now is None or now.version != chunk.version:
                return ChunkVerdict("changed", chunk)
            if {each.place for each in chunk.shards} - {each.place for each in now.shards}:
                return ChunkVerdict("changed", chunk)
            chunk, faults = now, check(namespace, now)
        return ChunkVerdict(self._verdict(chunk, faults), chunk, _without_keys(faults) or faults)

    def _verdict(self, chunk: ChunkInfo, faults: tuple[ShardFault, ...]) -> Verdict:
        reasons = {fault.reason for fault in _without_keys(faults)}
        if not reasons:
            return "unauthenticated" if faults else "good"
        if "unreadable" in reasons:
            return "unreadable"
        if reasons == {"other"} and len(faults) == len(chunk.shards) and self._inspector.exclusive:
            return "stale"  # harmless: a load checks the header
        if reasons - {"number"} == {"missing"} and chunk.modified_s > time.time() - GRACE_S:
            return "unfinished"
        return "bad"

    def _read(self, shard: ShardInfo, offset: int, memory: memoryview) -> None:
        """Read, limiting all threads together to ``--rate``. Raises NixlOffloadError."""
        if self._arguments.rate is not None:
            with self._lock:
                now_s = time.monotonic()
                begin_s = max(self._next_read_s, now_s)
                self._next_read_s = begin_s + memory.nbytes / self._arguments.rate
            self._stop.wait(begin_s - now_s)
        if self._stop.is_set():
            raise NixlOffloadError("interrupted")  # there is no verdict, and nobody waits for one
        self._inspector.read_into(shard, offset, memory)
        with self._lock:
            self._bytes_read += memory.nbytes

    # On the main thread.

    def _count(self, namespace: NamespaceInfo, verdict: ChunkVerdict) -> None:
        is_good = verdict.kind in ("good", "unauthenticated")
        if verdict.kind == "unreadable":
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _FAILURES_IN_A_ROW:
                raise StoreError(f"{verdict.faults[0].words}; gave up after several in a row", cause="io")
        elif is_good:
            self._failed_in_a_row = 0
        self._chunks[verdict.kind] += 1
        self._bytes_checked += verdict.chunk.size_bytes
        if not is_good:
            self._print(namespace, verdict)
        checked, all_bytes = self._bytes_checked, max(self._total_bytes, self._bytes_checked, 1)
        rate = self._bytes_read / max(time.monotonic() - self._began_s, 1e-3)
        left = f", {(all_bytes - checked) / rate / 60:,.1f} min left" if rate else ""
        chunks = plural(sum(self._chunks.values()), "chunk")
        self._bar(
            f"{checked / all_bytes:.0%} of {about_size(all_bytes)}, {chunks}, {self._chunks['bad']:,} bad, "
            f"{about_size(rate)}/s{left}"
        )

    def _print(self, namespace: NamespaceInfo, verdict: ChunkVerdict) -> None:
        """Print a bad or unreadable chunk and its faults; with ``--json``, any verdict."""
        self._bar.clear()
        where, key = self._inspector.where, verdict.chunk.key.hex()
        if self._arguments.json:
            line = {
                "verdict": verdict.kind,
                "tier": self._inspector.kind,
                "where": where,
                "namespace": namespace.path,
                "key": key,
                "bytes": verdict.chunk.size_bytes,
                "problems": [fault._asdict() for fault in verdict.faults],
            }
            print(json.dumps(line), flush=True)
        elif verdict.kind in ("bad", "unreadable"):
            heading = "BAD" if verdict.kind == "bad" else "NOT READABLE"
            lines = [f"{heading} {key} in {where}, namespace {namespace.path}"]
            for fault in verdict.faults:
                since = f"; written {moment(fault.created_s)}" if fault.created_s else ""
                place = f" {fault.place}:" if fault.place else ""
                lines.append(f"    shard {fault.shard}:{place} {printable(fault.words, 600)}{since}")
            print(*lines, sep="\n", flush=True)

    def _print_totals(self, elapsed_s: float, *, finished: bool) -> None:
        rate = f", {about_size(self._bytes_read / elapsed_s)}/s" if elapsed_s > 0 and self._bytes_read else ""
        checked = f"{plural(sum(self._chunks.values()), 'chunk')}, {about_size(self._bytes_checked)} checked{rate}"
        print(f"{self._inspector.where}: {checked}{'' if finished else '; not finished'}")
        for kind, words in _VERDICT_WORDS.items():
            if self._chunks[kind] or kind in ("good", "bad"):
                print(f"  {self._chunks[kind]:,} {words}")
        if self._unlisted:
            namespaces = plural(self._unlisted, "namespace")
            print(f"  {namespaces} whose chunks cannot be listed; nixl-offload ls says why")


def _without_keys(faults: tuple[ShardFault, ...]) -> tuple[ShardFault, ...]:
    """Return the faults except those that only report a missing key."""
    return tuple(fault for fault in faults if fault.reason != NO_KEY)
