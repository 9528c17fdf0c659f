"""``nixl-offload check [FILE]``: whether GPUDirect Storage is real here, which movers start, what ``auto`` measured.

Threading: one thread. ``cli.check_tier`` looks, ``cli.check_report`` tells; both are imported late, for they bring
numpy along.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TextIO

from nixl_offload.config import FileTier, load_config
from nixl_offload.errors import ConfigError

_DESCRIPTION = """\
Looks at every file tier of FILE, or at one directory: whether cuFile would move bytes straight between the drive and
the GPU there or copy them through host memory, and why, with what would mend it; which movers start, each tried on a
page of a scratch file, and why the others do not; what `mover: auto` has measured and chosen.

    nixl-offload check kv.yaml
    nixl-offload check --path /mnt/nvme/kv
    nixl-offload check kv.yaml --json

Run it where the server runs: as the same user, in the same container, with the same environment.

Exit code 0: every tier has a mover that starts. That GPUDirect Storage is not real is told, and is no failure: it
costs speed. 1: a tier will not work (no mover that FILE allows starts, the directory is missing or cannot be written,
or `staging` cannot be registered). 2: FILE or the options are wrong. 130: interrupted.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check`` to the command line."""
    parser = commands.add_parser(
        "check",
        help="say whether GPUDirect Storage is real and which movers start",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="the YAML config")
    parser.add_argument("--path", metavar="DIR", help="look at this directory, without a config")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError when FILE or the options are wrong."""
    if (arguments.file is None) == (arguments.path is None):
        raise ConfigError("check: say a config file, or --path DIR")
    staging_bytes = None
    if arguments.path is not None:
        tiers = [FileTier(kind="file", path=os.path.abspath(arguments.path), capacity=8192)]
    else:
        config = load_config(arguments.file)
        tiers = [tier for tier in config.tiers if isinstance(tier, FileTier)]
        staging_bytes = config.staging_bytes
    from nixl_offload.cli.check_report import CheckReport
    from nixl_offload.cli.check_tier import look_at

    report = CheckReport(tuple(look_at(tier, staging_bytes) for tier in tiers))
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2), file=out)
    else:
        report.print_to(out)
    return 0 if report.works else 1
