"""``nixl-offload bucket init CONFIG``: shows the changes that a bucket needs, asks, and applies them.

Threading: one thread. ``stores.lifecycle`` plans the changes.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace

from nixl_offload.cli.common import set_up
from nixl_offload.config import load_config
from nixl_offload.errors import ConfigError, NotSupportedError, StoreError

_DESCRIPTION = """\
Shows what the bucket of CONFIG lacks: the bucket itself, a lifecycle rule that removes objects older than the ttl, a
rule that aborts unfinished uploads. Asks, then applies the changes:

    nixl-offload bucket init kv.yaml             # shows, asks
    nixl-offload bucket init kv.yaml --yes       # for scripts; does nothing if the bucket lacks nothing
    nixl-offload bucket init kv.yaml --json      # only shows

Other rules of the bucket stay as they are. Lifecycle rules count whole days: a ttl of 36h becomes 2 days. Run this
again when the ttl changes. It needs s3:GetLifecycleConfiguration, s3:PutLifecycleConfiguration, s3:ListBucket, and
s3:CreateBucket if the bucket is missing. Servers need only s3:ListBucket of these.
"""


def add_bucket(parser: ArgumentParser) -> None:
    """Add the command ``init`` to ``parser``."""
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    summary = "show what the bucket lacks, ask, apply it"
    init = actions.add_parser("init", help=summary, formatter_class=parser.formatter_class)
    set_up(init, run_init, _DESCRIPTION, json="print JSON; applies only with --yes")
    init.add_argument("--yes", action="store_true", help="apply without asking")


def run_init(arguments: Namespace) -> int:
    """Show the plan, ask, apply it. Raises ConfigError, StoreError, NotSupportedError."""
    tier = load_config(arguments.file).s3
    if tier is None:
        raise ConfigError(f"{arguments.file}: tiers: none of them has kind: s3, so there is no bucket")
    try:
        from nixl_offload.stores.lifecycle import apply_lifecycle, plan_lifecycle
    except ImportError as exc:
        raise NotSupportedError(f"bucket init needs boto3 ({exc}); pip install boto3") from exc
    plan, applied = plan_lifecycle(tier), False
    if not arguments.json:
        print(f"{plan.where}: {'to change:' if plan.changes else 'nothing to do.'}")
        for change in plan.changes:
            print(f"  - {change}")
        sys.stdout.flush()
    if plan.changes and (arguments.yes or (not arguments.json and _asked())):
        try:
            apply_lifecycle(plan)
            left = plan_lifecycle(tier).changes
        except NotSupportedError as exc:
            made = "the bucket was made, but " if plan.create_bucket else ""
            raise NotSupportedError(
                f"{plan.where}: {made}this server has no lifecycle rules, so nothing there expires by itself; run "
                f"nixl-offload gc {arguments.file} --tier s3 --delete by a timer"
            ) from exc
        if left:
            raise StoreError(
                f"{plan.where}: the server accepted the changes, but does not show them: {'; '.join(left)}",
                cause="server",
            )
        applied = True
    if arguments.json:
        shown = {"where": plan.where, "changes": plan.changes, "applied": applied}
        print(json.dumps(shown, indent=2))
        return 0
    if plan.changes:
        print("Done." if applied else "Nothing was changed; --yes applies it without asking.")
    return 1 if plan.changes and not applied else 0


def _asked() -> bool:
    """Ask for a yes on the terminal; False without a terminal."""
    if not sys.stdin.isatty():
        return False
    print("Apply? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
