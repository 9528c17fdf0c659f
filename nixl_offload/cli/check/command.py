"""``nixl-offload check CONFIG``: tries each tier on this machine; says what is right, what is wrong, and the fix.

Threading: one thread, a child process for libraries that may crash, a daemon thread per directory. Each section is a
generator of findings, in a module per kind of tier.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from contextlib import closing
from typing import TextIO

from nixl_offload.cli.check import machine
from nixl_offload.cli.check.child import ChildProcess, memory_room
from nixl_offload.cli.check.directory import look_at_directory
from nixl_offload.cli.check.findings import Section, report
from nixl_offload.cli.check.s3 import look_at_bucket
from nixl_offload.cli.common import Commands, add_command
from nixl_offload.config import Config, load_config
from nixl_offload.hardware.gds import find_driver
from nixl_offload.units import format_size

_DESCRIPTION = """\
Tries every tier of CONFIG on this machine, from the libraries down to the bytes. Each finding says what is so, what
follows if it is not right, and the fix: a command or a line of CONFIG.

    nixl-offload check kv.yaml
    nixl-offload check kv.yaml --json --no-io          # for a program, without measuring

Run it where the server runs: as the same user, in the same container, with the same environment. It may run beside
servers. It removes what it writes: some pages, and up to 256 MiB per mover for the speeds.

    ok        as it should be
    warning   works, but slower, smaller or riskier than it could be
    wrong     does not work; the fix stands below it
    unknown   cannot be found out here

Exit code 0: nothing is wrong (there may be warnings). 1: something is wrong. 2: CONFIG or the options are wrong.
"""


def add_check(commands: Commands) -> None:
    """Add ``check`` to the command line."""
    parser = add_command(commands, "check", run, description=_DESCRIPTION)
    parser.add_argument("--no-io", action="store_true", help="measure nothing; movers still move a page each")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError."""
    config = load_config(arguments.file)
    with closing(ChildProcess()) as child:
        works = report(_sections(arguments, config, child), out, as_json=arguments.json)
    return 0 if works else 1


def _sections(arguments: argparse.Namespace, config: Config, child: ChildProcess) -> Iterator[Section]:
    """Yield the environment's section, and one for each tier. Here each kind of tier gets its own checks."""
    gpu, io = find_driver(), not arguments.no_io
    yield Section("environment", "Environment", machine.environment(config, gpu))
    for number, tier in enumerate(config.tiers):
        if tier.kind == "memory":
            room = (machine.memory_finding(tier.capacity_bytes, child.run(memory_room), config.staging_bytes),)
            yield Section("memory", f"Tier memory of {format_size(tier.capacity_bytes)}", room)
        elif tier.kind == "s3":
            found = look_at_bucket(tier, child, config_file=shlex.quote(arguments.file), io=io)
            yield Section("s3", f"Tier s3 {tier.where} (mover: {tier.mover})", found)
        else:
            directory = look_at_directory(
                tier,
                child,
                gpu=bool(gpu.ok),
                io=io,
                nearer=config.tiers[:number],
                staging_bytes=config.staging_bytes,
            )
            yield Section(tier.kind, f"Tier {tier.kind} {tier.path} (mover: {tier.mover})", directory)
