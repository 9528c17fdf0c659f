"""``nixl-offload schema``: prints the config's JSON Schema, for editors and for checks without this package.

Threading: one thread; reads and writes nothing but its output.
"""

from __future__ import annotations

import argparse
import json
from typing import TextIO

from nixl_offload.cli.common import Commands, add_command

_DESCRIPTION = """\
Prints the JSON Schema (draft 2020-12) of the config file. With it an editor completes fields, explains them, and marks
what is wrong while it is typed. For editors that use yaml-language-server (VS Code's YAML extension, Neovim, Helix):

    nixl-offload schema > kv.schema.json     # beside kv.yaml

and as the first line of kv.yaml

    # yaml-language-server: $schema=kv.schema.json

The schema knows fields and values. `nixl-offload show CONFIG` also checks what depends on several fields, such as the
order of tiers, and names the line.
"""


def add_parser(commands: Commands) -> None:
    """Add ``schema`` to the command line."""
    add_command(commands, "schema", run, description=_DESCRIPTION, config=False, json=None)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``."""
    from nixl_offload.config.schema import Config

    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    print(json.dumps(schema | {"title": "nixl-offload config"}, indent=2), file=out)
    return 0
