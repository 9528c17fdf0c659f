"""``nixl-offload bench CONFIG``: how fast the tiers of a config are here, with the shapes of a model.

Threading: the main thread; the engines have threads of their own. Imports torch and the movers only when it measures.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Final, TextIO

from nixl_offload.cli.bench.report import BenchReport, TierFigures
from nixl_offload.cli.common import Commands, add_command
from nixl_offload.cli.model_config import LLAMA_3_1_8B, model_shape, read_model_shape
from nixl_offload.cli.model_shape import ModelShape
from nixl_offload.cli.terminal import Progress, about_size, size_argument
from nixl_offload.config import Config, TierConfig, load_config
from nixl_offload.config.schema import TIER_KINDS
from nixl_offload.errors import ConfigError, NixlOffloadError, NotSupportedError

if TYPE_CHECKING:
    from nixl_offload.cli.bench.memory import KVCache

_SECONDS: Final = 5.0
_SIZE_BYTES: Final = 1 << 30
_DESCRIPTION = """\
Stores and loads chunks of a model's shape in every tier of CONFIG, as a server would: the same engine, the mover that
the config and this machine lead to, as many chunks in flight. Every load is verified.

    nixl-offload bench kv.yaml                                    # with the shape of Llama-3.1-8B
    nixl-offload bench kv.yaml --model /models/qwen --tp 2 --prefill 12000
    nixl-offload bench kv.yaml --tier s3 --seconds 20 --size 8GiB

The KV cache lies on the GPU where there is one, else in host memory. bench works in scratch space of its own, beside a
running server too: it never touches the server's chunks, and shares its bandwidth. The scratch space is an unnamed file
in a slab's directory, or a namespace of its own in a bucket or shared directory. It takes at most half of what is free,
and is removed at the end, also after an interruption. --prefill is what a server computes per second (vLLM logs "Avg
prompt throughput").

Exit code 0: done. 1: a tier could not be measured, or a chunk failed; the others are measured. 2: CONFIG, the model or
the options are wrong. 130: interrupted.
"""


def add_parser(commands: Commands) -> None:
    """Add ``bench`` to the command line."""
    parser = add_command(commands, "bench", run, description=_DESCRIPTION)
    parser.add_argument("--model", metavar="PATH", help="the model's directory or config.json; default: Llama-3.1-8B")
    parser.add_argument("--kv-dtype", default="auto", metavar="TYPE", help="as vLLM's --kv-cache-dtype; default: auto")
    parser.add_argument(
        "--tp", type=_positive, default=1, metavar="N", help="tensor parallel size; one rank is measured"
    )
    parser.add_argument("--tier", action="append", choices=TIER_KINDS, help="only this one; repeatable")
    parser.add_argument(
        "--seconds", type=_seconds, default=_SECONDS, metavar="S", help=f"per operation; default: {_SECONDS:g}"
    )
    parser.add_argument(
        "--size",
        type=size_argument,
        default=_SIZE_BYTES,
        metavar="SIZE",
        help=f"what is stored in each tier; default: {about_size(_SIZE_BYTES)}",
    )
    parser.add_argument("--prefill", type=_seconds, metavar="TOKENS/s", help="compare with computing at this rate")


def run(arguments: argparse.Namespace, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, NotSupportedError, KeyboardInterrupt; trouble with one tier is told beside
    the others.
    """
    config = load_config(arguments.file)
    shape = _shape(arguments)
    tiers = [tier for tier in config.tiers if not arguments.tier or tier.kind in arguments.tier]
    missing = set(arguments.tier or ()) - {tier.kind for tier in config.tiers}
    if missing:
        raise ConfigError(f"--tier: {', '.join(sorted(missing))} is not among the tiers of {arguments.file}")
    try:
        from nixl_offload.cli.bench.memory import make_kv_cache
        from nixl_offload.cli.bench.tiers import in_flight_of
    except ModuleNotFoundError:
        raise
    except ImportError as error:
        raise NotSupportedError(f"torch, which comes with vLLM, cannot be used: {error}") from error
    progress = Progress(sys.stderr)
    try:
        largest = max(shape.chunk_bytes(config.chunk_tokens) // len(shape.groups), 1)
        cache = make_kv_cache(
            shape,
            chunk_tokens=config.chunk_tokens,
            chunks=in_flight_of(config, largest),
            block_outermost=config.block_outermost,
        )
        report = BenchReport(shape, config.chunk_tokens, cache.describe(), config.verify, arguments.prefill)
        for tier in tiers:
            report.tiers.append(_measure(config, tier, cache, arguments, progress))
    finally:
        progress.clear()
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2), file=out)
    else:
        report.print_to(out)
    return 0 if report.works else 1


def _measure(
    config: Config, tier: TierConfig, cache: KVCache, arguments: argparse.Namespace, progress: Progress
) -> TierFigures:
    """Measure one tier; what goes wrong there is part of the figures."""
    from nixl_offload.cli.bench.drive import TierBench
    from nixl_offload.cli.bench.tiers import open_tier

    figures = TierFigures(tier.kind, tier.where)
    try:
        with open_tier(config, tier, cache, arguments.size) as opened:
            figures.where, figures.mover, figures.path = opened.where, opened.mover, opened.path
            figures.size_bytes = opened.chunks * cache.slot_bytes
            bench = TierBench(opened, cache, lambda text: progress(f"{tier.kind}: {text}"))
            figures.measured.append(bench.store(arguments.seconds))
            figures.measured.append(bench.load(arguments.seconds))
    except NixlOffloadError as error:
        figures.trouble = str(error)
    except OSError as error:
        figures.trouble = f"{figures.where}: {error.strerror or error}"
    return figures


def _shape(arguments: argparse.Namespace) -> ModelShape:
    if arguments.model is None:
        return model_shape(LLAMA_3_1_8B, name="Llama-3.1-8B", kv_dtype=arguments.kv_dtype, tp=arguments.tp)
    return read_model_shape(arguments.model, kv_dtype=arguments.kv_dtype, tp=arguments.tp)


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
