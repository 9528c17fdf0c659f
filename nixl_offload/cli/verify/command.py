"""``nixl-offload verify CONFIG``: reads everything that is stored and checks it, beside servers or without.

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
from typing import Any, Final, TextIO

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.cli.common import (
    Commands,
    TierFailure,
    add_command,
    add_selection,
    keys_of,
    report_nothing_found,
    selected,
    visit,
)
from nixl_offload.cli.terminal import Progress, about_size, moment, plural, rate_argument
from nixl_offload.cli.verify.judge import ChunkVerdict, Judge, Verdict
from nixl_offload.config import load_config
from nixl_offload.errors import StoreError
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo, printable

_DESCRIPTION = """\
Reads every chunk that the tiers of CONFIG hold and checks it as a server would before using it: header, key, lengths,
the checksum of each block, MACs, and that the shards of all ranks are there. A server that loads a bad chunk finds that
out itself and computes it anew; verify finds it earlier, and says where it lies.

    nixl-offload verify kv.yaml                        # everything
    nixl-offload verify kv.yaml --rate 200MiB/s        # beside a busy server
    nixl-offload verify kv.yaml --json                 # a line per chunk that is not good, and a last one with totals

Servers go on meanwhile: what they change while it is read counts as changed, not as bad.

Exit code 0: all is good. 1: bad chunks were found, the namespace is not there, or the storage failed.
2: CONFIG or the options are wrong. 130: interrupted.
"""


THREADS: Final = 8
_IN_FLIGHT: Final = 2 * THREADS
_FAILURES_IN_A_ROW: Final = 3
"""After so many chunks that cannot be read, the storage counts as down."""
_WORDS_CHARS: Final = 600
_VERDICT_WORDS: Final[dict[Verdict, str]] = {
    "good": "good",
    "bad": "bad",
    "changed": "changed meanwhile (evicted, rewritten or deleted)",
    "stale": "forgotten (the slot holds another chunk by now; harmless)",
    "unfinished": "not finished (still being written)",
    "unreadable": "not readable (the storage failed)",
    "unauthenticated": "not authenticated: no key (all else of them is right)",
}


def add_verify(commands: Commands) -> None:
    """Add ``verify`` to the command line."""
    parser = add_command(commands, "verify", run, description=_DESCRIPTION, json="print JSON lines")
    add_selection(parser, tenant=False)
    parser.add_argument("--rate", metavar="SIZE/s", type=rate_argument, help="read no faster, such as 200MiB/s")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. A tier that fails is reported, and the others go on. Raises ConfigError, KeyboardInterrupt."""
    config = load_config(arguments.file)
    keys, results, runs, failed = keys_of(config), list[dict[str, Any]](), list[TierRun](), False

    def verify(inspector: Inspector) -> dict[str, Any]:
        runs.append(TierRun(arguments, inspector, out, keys))
        return runs[-1].run()

    for found in visit(arguments, config, verify):
        if isinstance(found, TierFailure):
            failed = True
            results.append({"tier": found.kind, "where": found.where, "failure": found.words})
        else:
            results.append(found)
    if arguments.json:
        print(json.dumps({"tiers": results}), file=out)
    if arguments.namespace is not None and not any(each.namespaces for each in runs) and not failed:
        report_nothing_found(arguments)
        return 1
    return 1 if failed or any(each.is_bad for each in runs) else 0


class TierRun:
    """One run over one tier; usable once."""

    def __init__(
        self, arguments: argparse.Namespace, inspector: Inspector, out: TextIO, keys: ChunkKeys | None
    ) -> None:
        self.namespaces: list[NamespaceInfo] = []
        """Those that were selected."""
        self._chunks: dict[Verdict, int] = dict.fromkeys(_VERDICT_WORDS, 0)
        self._bytes_checked = self._total_bytes = 0
        self._arguments = arguments
        self._inspector = inspector
        self._out = out
        self._bar = Progress(sys.stderr)
        self._stop = threading.Event()
        self._judge = Judge(inspector, arguments.rate, self._stop, keys)
        self._failed_in_a_row = 0
        self._began_s = time.monotonic()

    @property
    def is_bad(self) -> bool:
        """Whether something is wrong, or unknown."""
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
                self._read_namespace(pool, namespace)
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
            "bytes_read": self._judge.bytes_read,
        }

    def _read_namespace(self, pool: ThreadPoolExecutor, namespace: NamespaceInfo) -> None:
        in_flight: deque[Future[ChunkVerdict]] = deque()
        for chunk in self._inspector.chunks(namespace):
            in_flight.append(pool.submit(self._judge.judge, namespace, chunk))
            if len(in_flight) >= _IN_FLIGHT:
                self._settle(namespace, in_flight.popleft().result())
        while in_flight:
            self._settle(namespace, in_flight.popleft().result())

    def _settle(self, namespace: NamespaceInfo, verdict: ChunkVerdict) -> None:
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
            self._report(namespace, verdict)
        self._show_progress()

    def _report(self, namespace: NamespaceInfo, verdict: ChunkVerdict) -> None:
        """Print a bad chunk and what is wrong with it; as JSON any verdict."""
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
            }
            print(json.dumps(line), file=out, flush=True)
        elif verdict.kind in ("bad", "unreadable"):
            heading = "BAD" if verdict.kind == "bad" else "NOT READABLE"
            print(f"{heading} {verdict.chunk.key.hex()} in {where}, namespace {namespace.path}", file=out)
            for fault in verdict.faults:
                since = f"; written {moment(fault.created_s)}" if fault.created_s else ""
                place = f" {fault.place}:" if fault.place else ""
                print(f"    rank {fault.rank}:{place} {printable(fault.words, _WORDS_CHARS)}{since}", file=out)
            out.flush()

    def _show_progress(self) -> None:
        checked, all_bytes = self._bytes_checked, max(self._total_bytes, self._bytes_checked, 1)
        rate = self._judge.bytes_read / max(time.monotonic() - self._began_s, 1e-3)
        left = f", {_about_time((all_bytes - checked) / rate)} left" if rate else ""
        chunks = plural(sum(self._chunks.values()), "chunk")
        self._bar(
            f"{checked / all_bytes:.0%} of {about_size(all_bytes)}, {chunks}, {self._chunks['bad']:,} bad, "
            f"{about_size(int(rate))}/s{left}"
        )

    def _print_totals(self, elapsed_s: float, *, finished: bool) -> None:
        out, bytes_read = self._out, self._judge.bytes_read
        rate = f", {about_size(int(bytes_read / elapsed_s))}/s" if elapsed_s > 0 and bytes_read else ""
        checked = f"{plural(sum(self._chunks.values()), 'chunk')}, {about_size(self._bytes_checked)} checked{rate}"
        print(f"{self._inspector.where}: {checked}{'' if finished else '; not finished'}", file=out)
        for kind, words in _VERDICT_WORDS.items():
            if self._chunks[kind] or kind in ("good", "bad"):
                print(f"  {self._chunks[kind]:,} {words}", file=out)
        if self._unlisted:
            namespaces = plural(self._unlisted, "namespace")
            print(f"  {namespaces} whose chunks cannot be listed; nixl-offload ls says why", file=out)


def _about_time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
