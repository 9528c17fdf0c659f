"""``nixl-offload show CONFIG``: the checked config with its defaults, and the exact ``--kv-transfer-config`` for vLLM.

Threading: pure but for reading the file and printing. Touches no storage and needs neither vLLM nor a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from typing import Any, TextIO

import yaml

from nixl_offload.cli.common import Commands, add_command
from nixl_offload.config import beside, kv_transfer_config, load_config

_OTHERS = {"nixl": "NixlConnector"}
"""What ``--with`` takes, and what vLLM calls it."""

_DESCRIPTION = """\
Checks CONFIG and prints it as nixl-offload understands it, defaults filled in, followed by the option to give to
`vllm serve`. The file is named by its absolute path there, so it must be readable under that path by every worker.
Exit code 2, with one line per problem, when CONFIG is wrong.
"""


def add_parser(commands: Commands) -> None:
    """Add ``show`` to the command line."""
    parser = add_command(
        commands,
        "show",
        run,
        description=_DESCRIPTION,
        json=None,
    )
    parser.add_argument(
        "--with",
        dest="others",
        action="append",
        choices=sorted(_OTHERS),
        default=[],
        help="put another connector before this one, in vLLM's MultiConnector: nixl hands the KV of a prompt from a "
        "prefill server to a decode server",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print {config, kv_transfer_config} as JSON")
    form.add_argument(
        "--kv-transfer-config", action="store_true", help='print only the JSON for vLLM, for "$(...)" in a shell'
    )


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError when the file is wrong."""
    config = load_config(arguments.file)
    transfer: dict[str, Any] = kv_transfer_config(config, os.path.abspath(arguments.file))
    if arguments.others:
        transfer = beside(transfer, [_OTHERS[name] for name in dict.fromkeys(arguments.others)])
    if arguments.json:
        print(json.dumps({"config": config.to_dict(), "kv_transfer_config": transfer}, indent=2), file=out)
    elif arguments.kv_transfer_config:
        print(json.dumps(transfer), file=out)
    else:
        print(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), file=out)
        print("# for vLLM:", file=out)
        print(f"--kv-transfer-config {shlex.quote(json.dumps(transfer))}", file=out)
    return 0
