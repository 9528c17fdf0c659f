"""What ``nixl-offload verify`` tells: bad chunks as they are found, a progress bar, totals; as text and as JSON lines.

Threading: one thread.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final, TextIO

from nixl_offload.cli.gc.collect import shown
from nixl_offload.cli.inventory.base import Held, Inventory
from nixl_offload.cli.terminal import about_size, moment, plural
from nixl_offload.cli.verify.delete import Deleted
from nixl_offload.cli.verify.judge import BAD, CHANGED, GOOD, STALE, UNFINISHED, UNREADABLE, Verdict
from nixl_offload.cli.verify.state import TierProgress

_EACH_S: Final = 0.2
_EACH_LOG_LINE_S: Final = 10.0
_BAR_CHARS: Final = 20
_WORDS_CHARS: Final = 600
_SAID: Final = {
    BAD: "bad",
    CHANGED: "changed meanwhile (evicted, rewritten or deleted)",
    STALE: "forgotten (the slot holds another chunk by now; harmless)",
    UNFINISHED: "not finished (still being written)",
    UNREADABLE: "not readable (the storage failed)",
}


class VerifyBar:
    """One line that is written over on a terminal; a line every ten seconds in a log. Erased by ``clear``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._each_s = _EACH_S if self._terminal else _EACH_LOG_LINE_S
        self._began_s = time.monotonic()
        self._next_s = self._began_s + self._each_s
        self._shown = False

    def __call__(self, progress: TierProgress, bytes_read: int, total_bytes: int) -> None:
        """Show how far it is, unless something was shown just now. ``bytes_read``: since this process began."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._each_s
        text = bar_text(progress, bytes_read, total_bytes, now_s - self._began_s)
        if self._terminal:
            self._stream.write(f"\r\x1b[K{text}")
            self._shown = True
        else:
            self._stream.write(f"nixl-offload: {text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Leave no half line behind."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


def bar_text(progress: TierProgress, bytes_read: int, total_bytes: int, elapsed_s: float) -> str:
    """Return the line: bar, bytes, chunks, bad ones, bytes per second, time left."""
    total_bytes = max(total_bytes, progress.bytes_checked, 1)
    share = progress.bytes_checked / total_bytes
    rate = bytes_read / elapsed_s if elapsed_s > 0 else 0.0
    left = f"{_span((total_bytes - progress.bytes_checked) / rate)} left" if rate > 0 else "…"
    full = round(share * _BAR_CHARS)
    return (
        f"[{'#' * full}{'.' * (_BAR_CHARS - full)}] {about_size(progress.bytes_checked)} of {about_size(total_bytes)}, "
        f"{plural(sum(progress.chunks.values()), 'chunk')}, {progress.chunks[BAD]:,} bad, {about_size(int(rate))}/s, "
        f"{left}"
    )


def print_verdict(inventory: Inventory, held: Held, verdict: Verdict, deleted: Deleted | None, out: TextIO) -> None:
    """Print a bad chunk, and each thing that is wrong with it. What needs nobody's care is only counted."""
    if verdict.kind not in (BAD, UNREADABLE):
        return
    words = "BAD" if verdict.kind == BAD else "NOT READABLE"
    what = f", {shown(deleted.words, _WORDS_CHARS)}" if deleted else ""
    print(f"{words} {verdict.chunk.key.hex()} in {inventory.where}, namespace {held.path}{what}", file=out)
    for problem in verdict.problems:
        since = f"; written {moment(problem.created_s)}" if problem.created_s else ""
        place = f" {problem.place}:" if problem.place else ""
        print(f"    rank {problem.rank}:{place} {shown(problem.words, _WORDS_CHARS)}{since}", file=out)
    out.flush()


def verdict_line(inventory: Inventory, held: Held, verdict: Verdict, deleted: Deleted | None) -> str:
    """Return the same, of any verdict, as one line of JSON."""
    return json.dumps(
        {
            "verdict": verdict.kind,
            "tier": inventory.kind,
            "where": inventory.where,
            "namespace": held.path,
            "key": verdict.chunk.key.hex(),
            "bytes": verdict.chunk.size_bytes,
            "problems": [problem._asdict() for problem in verdict.problems],
            "deleted": None if deleted is None else deleted.done,
            "left_because": None if deleted is None or deleted.done else deleted.words,
        }
    )


def print_totals(inventory: Inventory, progress: TierProgress, elapsed_s: float, bytes_read: int, out: TextIO) -> None:
    """Print what became of a tier."""
    rate = f", {about_size(int(bytes_read / elapsed_s))}/s" if elapsed_s > 0 and bytes_read else ""
    checked = plural(sum(progress.chunks.values()), "chunk")
    end = "" if progress.done else "; not finished"
    print(f"{inventory.where}: {checked}, {about_size(progress.bytes_checked)} checked{rate}{end}", file=out)
    print(f"  {progress.chunks[GOOD]:,} good", file=out)
    for kind, words in _SAID.items():
        if progress.chunks[kind] or kind == BAD:
            print(f"  {progress.chunks[kind]:,} {words}", file=out)
    if progress.deleted or progress.left:
        print(f"  {progress.deleted:,} deleted, {progress.left:,} bad ones left", file=out)
    if progress.failures:
        namespaces = plural(progress.failures, "namespace")
        print(f"  {namespaces} whose chunks cannot be listed; nixl-offload ls says why", file=out)


def totals(inventory: Inventory, progress: TierProgress, elapsed_s: float, bytes_read: int) -> dict[str, Any]:
    """Return the same as plain data."""
    return {
        "tier": inventory.kind,
        "where": inventory.where,
        "finished": progress.done,
        "chunks": dict(progress.chunks),
        "bytes_checked": progress.bytes_checked,
        "deleted": progress.deleted,
        "left": progress.left,
        "unlisted_namespaces": progress.failures,
        "seconds": round(elapsed_s, 3),
        "bytes_read": bytes_read,
    }


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    if seconds < 5400:
        return f"{seconds / 60:.0f}m"
    return f"{seconds / 3600:.1f}h"
