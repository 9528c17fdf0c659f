"""Verifies all that one tier holds: several reads in flight, verdicts in order.

Threading: the main thread lists, settles and prints; ``THREADS`` others read and check. Memory: a piece per thread and
the names of the chunks in flight.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TextIO

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.cli.common import Throttle, selected
from nixl_offload.cli.terminal import Progress, about_size, moment, plural
from nixl_offload.cli.verify.judge import (
    BAD,
    CHANGED,
    GOOD,
    STALE,
    UNAUTHENTICATED,
    UNFINISHED,
    UNREADABLE,
    VERDICTS,
    ChunkVerdict,
    Judge,
)
from nixl_offload.errors import StoreError
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo, printable

THREADS: Final = 8
_IN_FLIGHT: Final = 2 * THREADS
_FAILURES_IN_A_ROW: Final = 3
"""After so many chunks that cannot be read, the storage counts as down."""
_BAR_CHARS: Final = 20
_WORDS_CHARS: Final = 600
_VERDICT_WORDS: Final = {
    BAD: "bad",
    CHANGED: "changed meanwhile (evicted, rewritten or deleted)",
    STALE: "forgotten (the slot holds another chunk by now; harmless)",
    UNFINISHED: "not finished (still being written)",
    UNREADABLE: "not readable (the storage failed)",
    UNAUTHENTICATED: "not authenticated: no key (all else of them is right)",
}


@dataclass(slots=True)
class VerifyTotals:
    """What was verified of one tier."""

    chunks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))
    """By verdict."""
    bytes_checked: int = 0
    deleted: int = 0
    left: int = 0
    """Bad chunks that could not be deleted."""
    unlisted_namespaces: int = 0
    finished: bool = False

    def add(self, kind: str, size_bytes: int) -> None:
        """Count a verdict."""
        self.chunks[kind] += 1
        self.bytes_checked += size_bytes

    @property
    def is_bad(self) -> bool:
        """Whether something is wrong, or unknown."""
        return bool(self.chunks[BAD] or self.chunks[UNREADABLE] or self.unlisted_namespaces)


class TierRun:
    """One run over one tier; usable once."""

    def __init__(
        self, arguments: argparse.Namespace, inspector: Inspector, out: TextIO, keys: ChunkKeys | None = None
    ) -> None:
        """``keys``: None: MACs are not looked at."""
        self.totals = VerifyTotals()
        self.found = 0
        """Namespaces that were selected."""
        self._arguments = arguments
        self._inspector = inspector
        self._out = out
        self._bar = Progress(sys.stderr)
        self._stop = threading.Event()
        self._judge = Judge(inspector, Throttle(arguments.rate), self._stop, keys)
        self._bad: list[ChunkVerdict] = []
        self._failed_in_a_row = 0
        self._total_bytes = 0
        self._began_s = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Read everything, and return the totals as plain data. Raises StoreError, TierError, KeyboardInterrupt."""
        namespaces = list(selected(self._inspector, self._arguments))
        self.found = len(namespaces)
        self._total_bytes = sum(self._inspector.measure(namespace).size_bytes for namespace in namespaces)
        self._began_s = time.monotonic()
        pool = ThreadPoolExecutor(THREADS, thread_name_prefix="nixl-offload-verify")
        try:
            for namespace in namespaces:
                if namespace.trouble is not None:
                    self.totals.unlisted_namespaces += 1
                    continue
                self._read_namespace(pool, namespace)
            self.totals.finished = True
        finally:
            self._stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._bar.clear()
            elapsed_s = time.monotonic() - self._began_s
            if not self._arguments.json:
                self._print_totals(elapsed_s)
        return {
            "tier": self._inspector.kind,
            "where": self._inspector.where,
            **asdict(self.totals),
            "seconds": round(elapsed_s, 3),
            "bytes_read": self._judge.bytes_read,
        }

    def _read_namespace(self, pool: ThreadPoolExecutor, namespace: NamespaceInfo) -> None:
        flight: deque[Future[ChunkVerdict]] = deque()
        try:
            for chunk in self._inspector.chunks(namespace):
                flight.append(pool.submit(self._judge.judge, namespace, chunk))
                if len(flight) >= _IN_FLIGHT:
                    self._settle(namespace, flight)
            while flight:
                self._settle(namespace, flight)
        finally:
            self._delete_bad(namespace)

    def _settle(self, namespace: NamespaceInfo, flight: deque[Future[ChunkVerdict]]) -> None:
        verdict = flight[0].result()
        flight.popleft()
        if verdict.kind == UNREADABLE:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _FAILURES_IN_A_ROW:
                raise StoreError(f"{verdict.faults[0].words}; gave up after several in a row", cause="io")
        elif verdict.kind in (GOOD, UNAUTHENTICATED):
            self._failed_in_a_row = 0
        self.totals.add(verdict.kind, verdict.chunk.size_bytes)
        if self._arguments.delete_bad and verdict.kind in (BAD, STALE):
            self._bad.append(verdict)
            if len(self._bad) >= self._inspector.delete_batch:
                self._delete_bad(namespace)
        elif verdict.kind not in (GOOD, UNAUTHENTICATED):
            self._report(namespace, verdict)
        elapsed_s = time.monotonic() - self._began_s
        self._bar(bar_text(self.totals, self._judge.bytes_read, self._total_bytes, elapsed_s))

    def _delete_bad(self, namespace: NamespaceInfo) -> None:
        bad, self._bad = self._bad, []
        results = self._inspector.delete(namespace, [(each.chunk, each.bad_shards) for each in bad]) if bad else []
        for verdict, left_because in zip(bad, results, strict=True):
            done = left_because is None
            self.totals.deleted += done
            self.totals.left += not done and verdict.kind == BAD
            whole = len(verdict.bad_shards) in (0, len(verdict.chunk.shards))
            words = left_because or ("deleted" if whole else "deleted what belongs to no rank; the chunk stays")
            self._report(namespace, verdict, done, words)

    def _report(
        self, namespace: NamespaceInfo, verdict: ChunkVerdict, done: bool | None = None, words: str | None = None
    ) -> None:
        """Print a bad chunk and what is wrong with it; as JSON any verdict. ``done``: whether it was deleted."""
        self._bar.clear()
        where, out = self._inspector.where, self._out
        if self._arguments.json:
            line = {
                "verdict": verdict.kind,
                "tier": self._inspector.kind,
                "where": where,
                "namespace": namespace.path,
                "key": verdict.chunk.key.hex(),
                "bytes": verdict.chunk.size_bytes,
                "problems": [fault._asdict() for fault in verdict.faults],
                "deleted": done,
                "left_because": None if done else words,
            }
            print(json.dumps(line), file=out, flush=True)
        elif verdict.kind in (BAD, UNREADABLE):
            heading = "BAD" if verdict.kind == BAD else "NOT READABLE"
            what = f", {printable(words, _WORDS_CHARS)}" if words else ""
            print(f"{heading} {verdict.chunk.key.hex()} in {where}, namespace {namespace.path}{what}", file=out)
            for fault in verdict.faults:
                since = f"; written {moment(fault.created_s)}" if fault.created_s else ""
                place = f" {fault.place}:" if fault.place else ""
                print(f"    rank {fault.rank}:{place} {printable(fault.words, _WORDS_CHARS)}{since}", file=out)
            out.flush()

    def _print_totals(self, elapsed_s: float) -> None:
        totals, out, bytes_read = self.totals, self._out, self._judge.bytes_read
        rate = f", {about_size(int(bytes_read / elapsed_s))}/s" if elapsed_s > 0 and bytes_read else ""
        checked = plural(sum(totals.chunks.values()), "chunk")
        end = "" if totals.finished else "; not finished"
        print(f"{self._inspector.where}: {checked}, {about_size(totals.bytes_checked)} checked{rate}{end}", file=out)
        print(f"  {totals.chunks[GOOD]:,} good", file=out)
        for kind, words in _VERDICT_WORDS.items():
            if totals.chunks[kind] or kind == BAD:
                print(f"  {totals.chunks[kind]:,} {words}", file=out)
        if totals.deleted or totals.left:
            print(f"  {totals.deleted:,} deleted, {totals.left:,} bad ones left", file=out)
        if totals.unlisted_namespaces:
            namespaces = plural(totals.unlisted_namespaces, "namespace")
            print(f"  {namespaces} whose chunks cannot be listed; nixl-offload ls says why", file=out)


def bar_text(totals: VerifyTotals, bytes_read: int, total_bytes: int, elapsed_s: float) -> str:
    """Return the progress line: bar, bytes, chunks, bad ones, bytes per second, time left."""
    total_bytes = max(total_bytes, totals.bytes_checked, 1)
    rate = bytes_read / elapsed_s if elapsed_s > 0 else 0.0
    left = f"{_about_time((total_bytes - totals.bytes_checked) / rate)} left" if rate > 0 else "…"
    full = round(totals.bytes_checked / total_bytes * _BAR_CHARS)
    return (
        f"[{'#' * full}{'.' * (_BAR_CHARS - full)}] {about_size(totals.bytes_checked)} of {about_size(total_bytes)}, "
        f"{plural(sum(totals.chunks.values()), 'chunk')}, {totals.chunks[BAD]:,} bad, {about_size(int(rate))}/s, "
        f"{left}"
    )


def _about_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
