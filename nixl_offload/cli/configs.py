"""``nixl-offload configs [NAME]``: lists the sample configs that the package brings, or prints one.

Threading: one thread; reads and writes nothing but its output.
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from typing import Final, TextIO

from nixl_offload.cli.common import Commands, add_command
from nixl_offload.errors import ConfigError

_DESCRIPTION = """\
Lists the sample configs, or prints one, with comments that say what each line is for. Start from the nearest:

    nixl-offload configs                                # which there are
    nixl-offload configs local-nvme > kv.yaml           # then change path and capacity
    nixl-offload configs cufile.json > cufile.json      # settings of cuFile, for GPUDirect Storage
"""
SAMPLES: Final = {
    "local-nvme": "one server with NVMe",
    "gds": "one server with NVMe that must not start without GPUDirect Storage",
    "several-engines": "one server with NVMe and several engines: data parallel, or a server for each GPU",
    "nvme-with-memory": "one server with NVMe, and host memory to spare",
    "memory": "host memory only",
    "s3-shared": "many servers and a bucket",
    "memory-nvme-s3": "many servers and a bucket, each with memory and NVMe",
    "shared-filesystem": "many servers and a shared filesystem",
    "cpu-dev": "a laptop",
    "cufile.json": "no config: settings of cuFile",
}


def add_parser(commands: Commands) -> None:
    """Add ``configs`` to the command line."""
    parser = add_command(
        commands,
        "configs",
        run,
        description=_DESCRIPTION,
        config=False,
        json="print JSON: names and purposes, or name and text",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this one, as the list names it")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError: there is none of that name."""
    if arguments.name is None and arguments.json:
        print(json.dumps(SAMPLES, indent=2), file=out)
    elif arguments.name is None:
        width = max(map(len, SAMPLES))
        for name, purpose in SAMPLES.items():
            print(f"{name:<{width}}  {purpose}", file=out)
    else:
        name = arguments.name.removesuffix(".yaml")
        if name not in SAMPLES:
            raise ConfigError(f"NAME: there is no {arguments.name!r}; allowed: {', '.join(SAMPLES)}")
        file = name if "." in name else f"{name}.yaml"
        text = files("nixl_offload").joinpath("configs", file).read_text(encoding="utf-8")
        out.write(json.dumps({"name": name, "text": text}, indent=2) + "\n" if arguments.json else text)
    return 0
