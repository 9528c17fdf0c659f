"""``nixl-offload check [CONFIG]``: proves each tier on this machine, says what is right, what is wrong, what mends it.

Threading: one thread, a process for movers (``child``), a daemon thread per directory. A module per section:
``machine`` the environment, ``hashes``, ``servers``, ``memory``, ``slab``, ``shared_dir``, ``s3``, ``model``;
they return lines (``lines``), ``report`` prints them. All are imported late: some bring numpy along.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TextIO

from nixl_offload.config import Config, DirectoryConfig, MemoryConfig, S3Config, SlabConfig, load_config
from nixl_offload.errors import ConfigError

if TYPE_CHECKING:
    from nixl_offload.cli.check.child import Trials
    from nixl_offload.cli.check.hashes import ServerArguments
    from nixl_offload.cli.check.lines import Line, Section
    from nixl_offload.cli.check.report import Doing
    from nixl_offload.cli.model_shape import ModelShape

_PIECE_BYTES: Final = 2 << 20
_DESCRIPTION = """\
Tries every tier of CONFIG on this machine, from the libraries down to the bytes, and says of each thing whether it is
right, what follows if not, and the command or the line of CONFIG that mends it:

    nixl-offload check kv.yaml
    nixl-offload check kv.yaml --vllm-args "Qwen/Qwen3-8B --prefix-caching-hash-algo xxhash"
    nixl-offload check kv.yaml --vllm-args "Qwen/Qwen3-8B" --vllm-args "Qwen/Qwen3-8B --max-model-len 131072"
    nixl-offload check kv.yaml --model /models/llama/config.json --tp 2 --prefill 8000
    nixl-offload check --path /mnt/nvme/kv             # one directory, without a config
    nixl-offload check kv.yaml --json --no-io          # for a program, without measuring

Run it where the server runs: as the same user, in the same container, with the same environment. It may run beside
servers and before the first one: it takes no lock, makes no directory, and removes each scratch file and object that
it writes (some pages; up to 32 MiB per tier for the speeds, a fraction of a second).

--vllm-args takes what follows `vllm serve`, and NAME=VALUE before it for environment variables of that server alone.
Where it names a model, vLLM makes its final configuration of it, in a process of its own (ten seconds and more), and
you see what identifies what such a server stores; given twice, whether the two share, and if not, what differs.
No engine is started. Like a server, vLLM keeps the model's config in the Hub's cache.

    ok        as it should be
    warning   works, but slower, smaller or riskier than it could be
    wrong     something will not work; the mend stands below it
    unknown   could not be found out from here

Exit code 0: nothing is wrong (there may be warnings). 1: something is wrong. 2: CONFIG or the options are wrong.
130: interrupted.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``check`` to the command line."""
    parser = commands.add_parser(
        "check",
        help="try every tier here; say what is wrong and what mends it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="CONFIG", nargs="?", help="the YAML config")
    parser.add_argument("--path", metavar="DIR", help="look at this directory, without a config")
    parser.add_argument("--no-io", action="store_true", help="measure nothing; movers still move a page each")
    parser.add_argument(
        "--vllm-args",
        metavar="ARGS",
        action="append",
        default=[],
        help="the server's own arguments in quotes: will a restart find what was stored? Twice: do two servers share?",
    )
    parser.add_argument("--model", metavar="PATH", help="the model's directory or config.json: size up its KV")
    parser.add_argument("--tp", metavar="N", type=int, default=1, help="with --model: tensor parallel size; default 1")
    parser.add_argument("--kv-dtype", metavar="TYPE", default="auto", help="with --model: as vLLM's --kv-cache-dtype")
    parser.add_argument(
        "--prefill", metavar="TOKENS/s", type=float, help="with --model: how fast the server computes prompts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError when CONFIG or the options are wrong."""
    if (arguments.file is None) == (arguments.path is None):
        both = ", not both" if arguments.path is not None else ""
        raise ConfigError(f"check: say a config file, or --path DIR{both}")
    if arguments.path is not None:
        tier = SlabConfig(kind="slab", path=os.path.abspath(arguments.path), capacity=8192)
        config, file = Config(tiers=(tier,)), "kv.yaml"
    else:
        config, file = load_config(arguments.file), arguments.file
    from nixl_offload.cli.check.child import Trials
    from nixl_offload.cli.check.hashes import read_server_arguments
    from nixl_offload.cli.check.report import CheckReport, Doing
    from nixl_offload.cli.check.servers import read_command_lines, servers_section

    # What is wrong with arguments shows before anything is tried.
    command_lines = read_command_lines(arguments.vllm_args)
    first = command_lines[0] if command_lines else None
    server = read_server_arguments(None if first is None else first.words)
    environment = {**os.environ, **(first.variables if first is not None else {})}
    shape = _read_model(arguments)
    doing = Doing(sys.stderr)
    try:
        servers = servers_section(command_lines, config, doing)
        hashes = [_hashes(config, server, environment)] if arguments.path is None else []
        with Trials() as trials:
            sections = _sections(arguments, config, file, shape, trials, doing)
        report = CheckReport((sections[0], *hashes, *servers, *sections[1:]))
    finally:
        doing.clear()
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2), file=out)
    else:
        report.print_to(out)
    return 0 if report.works else 1


def _read_model(arguments: argparse.Namespace) -> ModelShape | None:
    if arguments.prefill is not None and not arguments.prefill > 0:
        raise ConfigError("--prefill: not a speed; allowed: tokens per second, more than 0")
    if arguments.model is None:
        if arguments.prefill is not None:
            raise ConfigError("--prefill: of which model? Say --model, its directory or config.json")
        if arguments.tp != 1 or arguments.kv_dtype != "auto":
            raise ConfigError("--tp, --kv-dtype: of which model? Say --model, its directory or config.json")
        return None
    from nixl_offload.cli.model_shape import read_model_shape

    return read_model_shape(arguments.model, kv_dtype=arguments.kv_dtype, tp=arguments.tp)


def _sections(
    arguments: argparse.Namespace, config: Config, file: str, shape: ModelShape | None, trials: Trials, doing: Doing
) -> list[Section]:
    from nixl_offload.cli.check import machine as check_machine
    from nixl_offload.cli.check.file import file_section
    from nixl_offload.cli.check.lines import Section
    from nixl_offload.hardware.gds_routes import find_driver

    driver = find_driver("/").fact
    gpu = bool(driver.ok)
    # NIXL takes seconds to start: it does so while we look at the rest.
    plugins = check_machine.begin_plugins(trials, config.tiers)
    piece_bytes = _PIECE_BYTES if shape is None else shape.chunk_bytes(config.chunk_tokens)
    sections = []
    for tier in config.tiers:
        if isinstance(tier, MemoryConfig):
            sections.append(_memory(tier, config, trials, doing, gpu=gpu))
        elif isinstance(tier, DirectoryConfig):
            capacity = tier.capacity_bytes if arguments.path is None else None
            sections.append(
                file_section(
                    tier, trials, doing, capacity_bytes=capacity, io=not arguments.no_io, piece_bytes=piece_bytes
                )
            )
            sections[-1].add(_pinning(config, gpu=gpu))
        elif isinstance(tier, S3Config):
            from nixl_offload.cli.check.s3 import s3_section

            sections.append(
                s3_section(tier, trials, doing, config_file=file, io=not arguments.no_io, piece_bytes=piece_bytes)
            )
    doing("looking at libraries and plugins")
    environment = Section("environment", "Environment")
    environment.add([check_machine.hardware_line(gpu=gpu, words=driver.words)])
    environment.add(check_machine.library_lines(config.tiers, gpu=gpu))
    environment.add(check_machine.plugin_lines(trials, plugins, config.tiers, gpu=gpu))
    if shape is None:
        return [environment, *sections]
    from nixl_offload.cli.check.model import model_section

    with_capacity = arguments.path is None
    model = model_section(shape, config, sections, with_capacity=with_capacity, prefill_tokens_s=arguments.prefill)
    return [environment, *sections, model]


def _hashes(config: Config, server: ServerArguments, environment: Mapping[str, str]) -> Section:
    from nixl_offload.cli.check.hashes import hash_lines
    from nixl_offload.cli.check.lines import Section

    section = Section("hashes", "Block hashes")
    section.add(hash_lines(config, server, environment))
    return section


def _memory(tier: MemoryConfig, config: Config, trials: Trials, doing: Doing, *, gpu: bool) -> Section:
    from nixl_offload.cli.check.lines import Section
    from nixl_offload.cli.check.memory import memory_lines
    from nixl_offload.units import format_size

    doing("reckoning what memory there is", long="the engine brings torch along")
    section = Section("memory", f"Memory tier of {format_size(tier.capacity_bytes)}")
    room = trials.run("memory")
    section.facts = {"capacity_bytes": tier.capacity_bytes, "room": room}
    section.add(memory_lines(tier, room, gpu=gpu, staging_bytes=config.staging_bytes))
    return section


def _pinning(config: Config, *, gpu: bool) -> list[Line]:
    """Say whether ``staging`` can be registered with cuFile: NIXL would only warn, and bounce."""
    if not gpu:
        return []
    from nixl_offload.cli.check.lines import ok, wrong
    from nixl_offload.errors import MoverError
    from nixl_offload.movers.base import MemoryKind, MemoryRegion
    from nixl_offload.movers.pinning import check_pinning
    from nixl_offload.units import format_size

    name = f"staging of {format_size(config.staging_bytes)}"
    try:
        check_pinning(name, MemoryRegion(0, config.staging_bytes, MemoryKind.VRAM), 0)
    except MoverError as error:
        return [wrong("staging", str(error), "staging: 64MiB")]
    return [ok("staging", f"{name} can be registered with cuFile")]
