"""``nixl-offload check [CONFIG]``: tries each tier on this machine; says what is right, what is wrong, and the fix.

Threading: one thread, a child process for libraries that may crash, a daemon thread per directory. A module per
section: ``machine`` (environment, memory), ``directory``, ``s3``; its probes are functions that return a finding. They
are imported late: some bring numpy along.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from typing import TYPE_CHECKING, Final, TextIO

from nixl_offload.cli.commands import COMMANDS
from nixl_offload.config import Config, load_config, parse_config
from nixl_offload.errors import ConfigError

if TYPE_CHECKING:
    from nixl_offload.cli.check.child import ChildProcess
    from nixl_offload.cli.check.report import CheckProgress, Section

_PIECE_BYTES: Final = 2 << 20
_DESCRIPTION = """\
Tries every tier of CONFIG on this machine, from the libraries down to the bytes. Each finding says what is so, what
follows if it is not right, and the fix: a command or a line of CONFIG.

    nixl-offload check kv.yaml
    nixl-offload check --path /mnt/nvme/kv             # one directory, without a config
    nixl-offload check kv.yaml --json --no-io          # for a program, without measuring

Run it where the server runs: as the same user, in the same container, with the same environment. It may run beside
servers and before the first one: it keeps no lock, makes no directory, and removes each scratch file and object that
it writes (some pages; up to 64 MiB per tier for the speeds, some two seconds).

    ok        as it should be
    warning   works, but slower, smaller or riskier than it could be
    wrong     does not work; the fix stands below it
    unknown   cannot be told from here

Exit code 0: nothing is wrong (there may be warnings). 1: something is wrong. 2: CONFIG or the options are wrong.
130: interrupted.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check`` to the command line."""
    parser = commands.add_parser(
        "check",
        help=COMMANDS["check"].summary,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="CONFIG", nargs="?", help="the YAML config")
    parser.add_argument("--path", metavar="DIR", help="look at this directory, without a config")
    parser.add_argument("--no-io", action="store_true", help="measure nothing; movers still move a page each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError when CONFIG or the options are wrong."""
    if (arguments.file is None) == (arguments.path is None):
        raise ConfigError(f"check: say a config file, or --path DIR{', not both' if arguments.path else ''}")
    if arguments.path is None:
        config = load_config(arguments.file)
    else:
        tier = {"kind": "slab", "path": os.path.abspath(arguments.path), "capacity": 8192}
        config = parse_config({"tiers": [tier]}, "--path")
    from nixl_offload.cli.check.child import ChildProcess
    from nixl_offload.cli.check.report import CheckProgress, CheckReport

    progress = CheckProgress(sys.stderr)
    try:
        with ChildProcess() as child:
            sections = _look(arguments, config, child, progress)
    finally:
        progress.clear()
    report = CheckReport(sections)
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2), file=out)
    else:
        report.print_to(out)
    return 0 if report.works else 1


def _look(
    arguments: argparse.Namespace,
    config: Config,
    child: ChildProcess,
    progress: CheckProgress,
) -> list[Section]:
    """Return the environment's section, and one for each tier. Here each kind of tier gets its own checks."""
    from nixl_offload.cli.check import machine
    from nixl_offload.cli.check.directory import DirectoryContext, directory_section
    from nixl_offload.hardware.gds import find_driver

    gpu = find_driver()
    has_capacity, io = arguments.path is None, not arguments.no_io
    progress("looking at libraries and plugins", why_long="NIXL imports torch")
    environment = machine.EnvironmentContext(config, gpu, machine.cuda_of_torch())
    sections = [machine.environment_section(environment, child)]
    sections[0].add("keys", machine.keys_finding(config))
    for tier in config.tiers:
        if tier.kind == "memory":
            progress("adding up the memory", why_long="the engine imports torch")
            section = machine.memory_section(tier.capacity_bytes, child.run("memory"), config.staging_bytes)
        elif tier.kind != "s3":
            context = DirectoryContext(tier, has_capacity, nearer=config.tiers[: config.tiers.index(tier)])
            section = directory_section(context, child, progress, gpu=bool(gpu.ok), io=io, piece_bytes=_PIECE_BYTES)
            section.add("staging", machine.staging_finding(config.staging_bytes) if gpu.ok else None)
        else:
            from nixl_offload.cli.check.s3 import s3_section

            file = shlex.quote(arguments.file)
            section = s3_section(tier, child, progress, config_file=file, io=io, piece_bytes=_PIECE_BYTES)
        sections.append(section)
    return sections
