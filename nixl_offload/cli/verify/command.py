"""``nixl-offload verify CONFIG``: reads everything that is stored and checks it, beside servers or without.

Threading: one thread here; ``tier_run`` has threads that read and check.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, TextIO

from nixl_offload.cli.common import (
    MEMORY_NOTE,
    Commands,
    TierFailure,
    add_command,
    add_selection,
    keys_of,
    opened,
    report_nothing_found,
    visit,
)
from nixl_offload.cli.terminal import rate_argument
from nixl_offload.cli.verify.tier_run import TierRun
from nixl_offload.config import load_config

_DESCRIPTION = """\
Reads every chunk that the tiers of CONFIG hold and checks it as a server would before using it: header, key, lengths,
the checksum of each block, MACs, and that the shards of all ranks are there. A server that loads a bad chunk finds that
out itself and computes it anew; verify finds it earlier, and says where it lies.

    nixl-offload verify kv.yaml                        # everything
    nixl-offload verify kv.yaml --rate 200MiB/s        # beside a busy server
    nixl-offload verify kv.yaml --tier s3 --delete-bad
    nixl-offload verify kv.yaml --json                 # a line per chunk that is not good, and a last one with totals

Servers go on meanwhile: what they change while it is read counts as changed, not as bad. --delete-bad removes all
shards of a bad chunk. In a slab that an engine has open, bad chunks are reported and left.

Exit code 0: all is good. 1: bad chunks were found (deleted or not), the namespace is not there, or the storage failed.
2: CONFIG or the options are wrong. 130: interrupted.
"""


def add_verify(commands: Commands) -> None:
    """Add ``verify`` to the command line."""
    parser = add_command(commands, "verify", run, description=_DESCRIPTION, json="print JSON lines")
    add_selection(parser, tenant=False)
    parser.add_argument("--delete-bad", action="store_true", help="delete bad chunks, all their shards")
    parser.add_argument("--rate", metavar="SIZE/s", type=rate_argument, help="read no faster, such as 200MiB/s")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. A tier that fails is reported, and the others go on. Raises ConfigError, KeyboardInterrupt."""
    config = load_config(arguments.file)
    keys, results, runs, failed = keys_of(config), list[dict[str, Any]](), list[TierRun](), False
    with opened(arguments, config) as tiers:
        if config.memory is not None and not arguments.json:
            print(f"Left out: {MEMORY_NOTE}.", file=out)
        for tier in tiers:
            if not isinstance(tier, TierFailure):
                runs.append(TierRun(arguments, tier, out, keys))
            found = visit(tier, lambda _: runs[-1].run())
            if isinstance(found, TierFailure):
                failed = True
                found = {"tier": found.kind, "where": found.where, "failure": found.words}
            results.append(found)
    if arguments.json:
        print(json.dumps({"tiers": results}), file=out)
    if arguments.namespace is not None and not any(each.found for each in runs) and not failed:
        report_nothing_found(arguments)
        return 1
    return 1 if failed or any(each.is_bad for each in runs) else 0
