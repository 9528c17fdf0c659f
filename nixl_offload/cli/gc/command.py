"""``nixl-offload gc CONFIG``: brings a bucket or a shared directory down to a size and an age, oldest first.

Threading: one thread. ``cli.gc.shared`` does the work, ``tiers.shared.sweep`` decides; ``cli.gc.slab`` is for slabs.
"""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from typing import TextIO

from nixl_offload.cli.common import Commands, add_command, add_selection, stored_tiers
from nixl_offload.cli.gc.shared import collect
from nixl_offload.cli.gc.slab import remove_namespaces
from nixl_offload.cli.terminal import duration_argument, size_argument
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError
from nixl_offload.tiers.kinds import open_inspector

_DESCRIPTION = """\
Deletes the oldest chunks of the shared tier of CONFIG (a bucket or a shared directory) until at most --max-size is
left, and every chunk older than --older-than. Without --delete it only says what it would delete. Run it every hour or
so, from one machine:

    nixl-offload gc kv.yaml                              # look
    nixl-offload gc kv.yaml --delete                     # keep to the capacity and ttl of kv.yaml
    nixl-offload gc kv.yaml --tenant blue --max-size 2TiB --delete
    nixl-offload gc kv.yaml --namespace 0f3a... --older-than 0s --delete      # all of a model that is no longer served

Servers go on meanwhile: one whose chunk is deleted computes it anew. Nothing younger than ten minutes is deleted, and
nothing that is not named like a chunk of ours. A chunk is as old as its last write. In a bucket with a ttl servers
refresh what they use once it is older than half the ttl, so a smaller --older-than may delete what is in use.

Of a slab, which keeps to its capacity by itself, gc removes whole namespaces, while no engine has the directory open:

    nixl-offload gc kv.yaml --tier slab                  # lists them, with their last use
    nixl-offload gc kv.yaml --older-than 30d --delete    # not opened by an engine for so long

Exit code 0: done. 1: the storage failed or not all could be deleted (run again), or the tenant has nothing. 2: CONFIG
or the options are wrong. 130: interrupted; run again to go on.
"""


def add_gc(commands: Commands) -> None:
    """Add ``gc`` to the command line."""
    parser = add_command(commands, "gc", run, description=_DESCRIPTION)
    add_selection(parser, tenant=True)
    size, age = "leave at most so much, such as 20TiB; default: the capacity", "delete what is older, such as 7d"
    parser.add_argument("--max-size", metavar="SIZE", type=size_argument, help=size)
    parser.add_argument("--older-than", metavar="DURATION", type=duration_argument, help=f"{age}; default: the ttl")
    parser.add_argument("--delete", action="store_true", help="do it, instead of saying what would be done")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError, TierError (nothing was deleted yet), KeyboardInterrupt."""
    stored = stored_tiers(load_config(arguments.file), arguments)
    shared = [tier for tier in stored if tier.is_shared]
    if len(shared) > 1:
        kinds = [tier.kind for tier in shared]
        raise ConfigError(
            f"{arguments.file}: tiers: {' and '.join(kinds)} are both shared, and gc looks after one at a time; say "
            f"--tier {' or --tier '.join(kinds)}"
        )
    tier = (shared or stored)[0]
    max_bytes = tier.capacity_bytes if arguments.max_size is None else arguments.max_size
    older_than_s = tier.ttl_s if arguments.older_than is None else arguments.older_than
    if arguments.delete and max_bytes is None and older_than_s is None:
        raise ConfigError(
            f"--delete: down to what? Say --max-size or --older-than, or capacity or ttl in {arguments.file}"
        )
    with closing(open_inspector(tier)) as inspector:
        if inspector.store is None:
            return remove_namespaces(arguments, inspector, out)
        return collect(arguments, inspector.store, out, max_bytes=max_bytes, older_than_s=older_than_s, now_s=_now_s())


def _now_s() -> float:
    return time.time()
