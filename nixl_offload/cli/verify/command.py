"""``nixl-offload verify CONFIG``: reads everything that is stored and checks it, beside servers or without.

Threading: one thread here; ``cli.verify.run`` has those that read. ``cli.verify.judge`` decides what is bad.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, TextIO

from nixl_offload.cli.common import (
    MEMORY_TOLD,
    TierFailure,
    attempt,
    check_namespace,
    open_inventories,
    stored_tiers,
    tell_of_nothing,
)
from nixl_offload.cli.terminal import rate_argument
from nixl_offload.config import MemoryConfig, load_config

if TYPE_CHECKING:
    from nixl_offload.cli.inventory.base import Held, Inventory
    from nixl_offload.cli.verify.delete import Deleted
    from nixl_offload.cli.verify.judge import Verdict
    from nixl_offload.cli.verify.state import State, TierProgress

_SAVE_EACH_S: Final = 5.0
_DESCRIPTION = """\
Reads every chunk that the tiers of CONFIG hold and checks it as a server would before using it: header, namespace, key,
lengths, the checksum of each block, and that the shards of all ranks are there. Tells each bad one, where it lies and
what is wrong. A server finds a bad chunk itself when it loads it, and computes it anew: nothing wrong is ever served;
verify tells you before, and tells you about the drive.

    nixl-offload verify kv.yaml                        # everything
    nixl-offload verify kv.yaml --rate 200MiB/s        # beside a busy server
    nixl-offload verify kv.yaml --tier s3 --delete-bad
    nixl-offload verify kv.yaml --resume               # go on where an interrupted run was
    nixl-offload verify kv.yaml --json                 # a line per chunk that is not good, and a last one with totals

Servers go on meanwhile. What they evict, rewrite or refresh while it is read is read again, and counts as changed, not
as bad. --delete-bad removes all shards of a bad chunk, if it is still the same bad one: of a slab only while no engine
has the directory open, as the engine alone may change the index then; it is told which are left.

A run that was interrupted, or that the storage failed, leaves a small file in ~/.cache/nixl-offload (or under
XDG_CACHE_HOME); --resume with the same config, selection and --delete-bad goes on from it, a finished run removes it.

Exit code 0: all is good. 1: bad chunks were found (deleted or not), nothing is there of the namespace, or the storage
failed. 2: CONFIG or the options are wrong. 130: interrupted; --resume goes on.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``verify`` to the command line."""
    parser = commands.add_parser(
        "verify",
        help="read and check everything that is stored",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="CONFIG", help="the YAML config")
    parser.add_argument("--tier", choices=("slab", "shared_dir", "s3"), help="only this tier of CONFIG")
    parser.add_argument("--namespace", metavar="NAME", help="only this namespace, 32 hex digits as ls prints them")
    parser.add_argument("--delete-bad", action="store_true", help="delete bad chunks, all their shards")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run was")
    parser.add_argument("--rate", metavar="SIZE/s", type=rate_argument, help="read no faster, such as 200MiB/s")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError, TierError, KeyboardInterrupt."""
    from nixl_offload.cli.verify.state import State

    config = load_config(arguments.file)
    check_namespace(arguments.namespace)
    tiers = stored_tiers(config, arguments.file, arguments.tier)
    if any(isinstance(tier, MemoryConfig) for tier in config.tiers) and not arguments.json:
        print(f"Left out: {MEMORY_TOLD}.", file=out)
    with ExitStack() as opened:
        inventories, failures = open_inventories(tiers, opened)
        wheres = [inventory.where for inventory in inventories]
        selection = {"tiers": wheres, "namespace": arguments.namespace, "delete_bad": arguments.delete_bad}
        state = State(selection)
        return _Run(arguments, out, state).run(inventories, failures)


class _Run:
    """All tiers, one after the other."""

    def __init__(self, arguments: argparse.Namespace, out: TextIO, state: State) -> None:
        from nixl_offload.cli.verify.report import VerifyBar
        from nixl_offload.cli.verify.state import TierProgress

        self._arguments = arguments
        self._out = out
        self._state = state
        self._bar = VerifyBar(sys.stderr)
        self._next_save_s = time.monotonic() + _SAVE_EACH_S
        self._all: dict[str, TierProgress] = {}
        self._new = TierProgress
        self._found = 0
        """Namespaces to look at."""

    def run(self, inventories: list[Inventory], failures: list[TierFailure]) -> int:
        stored = self._state.load() if self._arguments.resume else None
        if self._arguments.resume:
            words = "going on where the last run was" if stored else "there is no interrupted run; from the start"
            print(f"nixl-offload: {words}", file=sys.stderr)
        self._all = stored or {}
        results: list[dict[str, object]] = [failure.to_dict() for failure in failures]
        try:
            for inventory in inventories:
                found = attempt(inventory.kind, inventory.where, partial(self._verify, inventory))
                if isinstance(found, TierFailure):
                    failures.append(found)
                results.append(found.to_dict() if isinstance(found, TierFailure) else found)
        except BaseException:
            self._bar.clear()
            if self._state.save(self._all):
                print("nixl-offload: not finished; --resume goes on from here", file=sys.stderr)
            raise
        if not failures:
            self._state.remove()
        elif any(sum(progress.chunks.values()) for progress in self._all.values()) and self._state.save(self._all):
            print("nixl-offload: not finished; --resume goes on from here", file=sys.stderr)
        if self._arguments.json:
            print(json.dumps({"tiers": results}), file=self._out)
        progress = self._all.values()
        if self._arguments.namespace is not None and not self._found and not stored and not failures:
            tell_of_nothing(self._arguments.namespace, None)
            return 1
        bad = any(p.chunks["bad"] or p.chunks["unreadable"] or p.failures for p in progress)
        return 1 if bad or failures else 0

    def _verify(self, inventory: Inventory) -> dict[str, object]:
        from nixl_offload.cli.verify.report import print_totals, print_verdict, totals, verdict_line
        from nixl_offload.cli.verify.run import TierRun

        arguments, out = self._arguments, self._out
        progress = self._all.setdefault(inventory.where, self._new())
        total_bytes = 0
        if not progress.done:
            selected = [held for held in inventory.namespaces() if arguments.namespace in (None, held.name)]
            total_bytes = sum(inventory.measure(held).size_bytes for held in selected)
            self._found += len(selected)

        def tell(held: Held, verdict: Verdict, deleted: Deleted | None) -> None:
            self._bar.clear()
            if arguments.json:
                print(verdict_line(inventory, held, verdict, deleted), file=out, flush=True)
            else:
                print_verdict(inventory, held, verdict, deleted, out)

        def tick() -> None:
            self._bar(progress, tier_run.bytes_read, total_bytes)
            if time.monotonic() >= self._next_save_s:
                self._next_save_s = time.monotonic() + _SAVE_EACH_S
                self._state.save(self._all)

        tier_run = TierRun(
            inventory,
            progress,
            namespace=arguments.namespace,
            delete=arguments.delete_bad,
            bytes_per_s=arguments.rate,
            tell=tell,
            tick=tick,
        )
        began_s = time.monotonic()
        try:
            if not progress.done:
                tier_run.run()
        finally:
            self._bar.clear()
            elapsed_s = time.monotonic() - began_s
            if not arguments.json:
                print_totals(inventory, progress, elapsed_s, tier_run.bytes_read, out)
        return totals(inventory, progress, elapsed_s, tier_run.bytes_read)
