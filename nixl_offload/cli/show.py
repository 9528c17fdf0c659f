"""``nixl-offload show CONFIG``, ``configs`` and ``schema``: check and print config files without accessing storage.

Threading: one thread. Needs neither vLLM nor a GPU.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from argparse import ArgumentParser, Namespace
from importlib.resources import files
from typing import Any, Final

import yaml

from nixl_offload.cli.common import set_up
from nixl_offload.config import Config, beside, kv_transfer_config, load_config
from nixl_offload.errors import ConfigError

_OTHERS: Final = {"nixl": "NixlConnector"}
"""The values of ``--with``, and vLLM's names of these connectors."""
_SHOW = """\
Checks CONFIG and prints it as nixl-offload understands it, defaults filled in, followed by the option to give to
`vllm serve`. The file is named by its absolute path there, so it must be readable under that path by every worker.
Exit code 2, with one line per problem, when CONFIG is wrong.
"""
_CONFIGS = """\
Lists the sample configs, or prints one, with comments that say what each line is for. Start from the nearest:

    nixl-offload configs                                # which there are
    nixl-offload configs local-nvme > kv.yaml           # then change path and capacity
    nixl-offload configs cufile.json > cufile.json      # settings of cuFile, for GPUDirect Storage
"""
_SCHEMA = """\
Prints the JSON Schema (draft 2020-12) of the config file. With it an editor completes fields, explains them, and marks
what is wrong while it is typed. For editors that use yaml-language-server (VS Code's YAML extension, Neovim, Helix):

    nixl-offload schema > kv.schema.json     # beside kv.yaml

and as the first line of kv.yaml

    # yaml-language-server: $schema=kv.schema.json

The schema knows fields and values. `nixl-offload show CONFIG` also checks what depends on several fields, such as the
order of tiers, and names the line.
"""


def add_show(parser: ArgumentParser) -> None:
    """Add the arguments of ``show`` to ``parser``."""
    set_up(parser, run_show, _SHOW, json="")
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


def add_configs(parser: ArgumentParser) -> None:
    """Add the arguments of ``configs`` to ``parser``."""
    set_up(parser, run_configs, _CONFIGS, config=False, json="")
    parser.add_argument("name", metavar="NAME", nargs="?", help="print this one, as the list names it")


def add_schema(parser: ArgumentParser) -> None:
    """Add the arguments of ``schema`` to ``parser``."""
    set_up(parser, run_schema, _SCHEMA, config=False, json="")


def run_show(arguments: Namespace) -> int:
    """Print the config with defaults filled in. Raises ConfigError if the file is wrong."""
    config = load_config(arguments.file)
    transfer: dict[str, Any] = kv_transfer_config(config, os.path.abspath(arguments.file))
    if arguments.others:
        transfer = beside(transfer, [_OTHERS[name] for name in dict.fromkeys(arguments.others)])
    if arguments.json:
        print(json.dumps({"config": config.to_dict(), "kv_transfer_config": transfer}, indent=2))
    elif arguments.kv_transfer_config:
        print(json.dumps(transfer))
    else:
        print(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))
        print(f"# for vLLM:\n--kv-transfer-config {shlex.quote(json.dumps(transfer))}")
    return 0


def run_configs(arguments: Namespace) -> int:
    """List the samples, or print one. Raises ConfigError if there is no sample of that name."""
    samples = {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in sorted(files("nixl_offload").joinpath("configs").iterdir(), key=lambda file: file.name)
    }
    if arguments.name is None:
        for name, text in samples.items():
            purpose = re.search(r"(?:#|//) ([^.\n]*)", text)  # the start of its first comment
            print(f"{name:<{max(map(len, samples))}}  {purpose and purpose[1]}")
        return 0
    name = arguments.name.removesuffix(".yaml")
    if name not in samples:
        raise ConfigError(f"NAME: there is no {arguments.name!r}; allowed: {', '.join(samples)}")
    print(samples[name], end="")
    return 0


def run_schema(_: Namespace) -> int:
    """Print the schema."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    print(json.dumps(schema | {"title": "nixl-offload config"}, indent=2))
    return 0
