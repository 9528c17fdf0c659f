"""One picture of a benchmark: how long a long prompt takes to come back from each tier, and how fast the tiers are.

Threading: one thread. matplotlib is imported here alone, and only when a picture is wanted.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any, Final

from nixl_offload.cli.bench.report import PROMPT_TOKENS, BenchReport
from nixl_offload.cli.terminal import about_size
from nixl_offload.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOAD: Final = "#2a6f97"
_STORE: Final = "#a9d6e5"
_COMPUTE: Final = "#c44536"
_GREY: Final = "#555555"


def check_plot(path: str) -> None:
    """Raise ConfigError, before anything is measured, when a picture could not be written to ``path``."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot: matplotlib is not installed: pip install matplotlib")
    directory = os.path.dirname(os.path.abspath(path))
    if not path.endswith(".png"):
        raise ConfigError(f"--plot: {path!r} does not end in .png")
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"--plot: {directory} is not there, or cannot be written to")


def draw(report: BenchReport, path: str) -> None:
    """Write the picture. Raises ConfigError when that fails."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tiers = [tier for tier in report.tiers if tier.of("load")]
    figure = Figure(figsize=(9, 3.2 + 0.75 * len(tiers)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    prompt, speed = figure.subplots(2, 1)
    names = [f"{tier.kind} ({tier.mover})" for tier in tiers]
    _draw_prompt(prompt, names, [report.prompt_load_s(tier) or 0.0 for tier in tiers], report.prompt_compute_s)
    loads, stores = ([_mb_s(tier.of(name)) for tier in tiers] for name in ("load", "store"))
    _draw_speed(speed, names, loads, stores)
    shape = report.shape
    figure.suptitle(
        f"{shape.name}, {shape.kv_dtype}, one rank of TP {shape.tp}: chunks of {report.chunk_tokens} tokens, "
        f"{about_size(shape.chunk_bytes(report.chunk_tokens))}",
        fontsize=11,
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: {path} cannot be written: {error.strerror or error}") from error


def _draw_prompt(axes: Axes, names: list[str], loads_s: list[float], compute_s: float | None) -> None:
    rows = list(zip(names, loads_s, [_LOAD] * len(names), strict=True))
    if compute_s is not None:
        rows.append(("computed again", compute_s, _COMPUTE))
    most = max((seconds for _, seconds, _ in rows), default=1.0)
    for at, (_, seconds, colour) in enumerate(rows):
        axes.barh(at, seconds, color=colour, height=0.6)
        axes.text(seconds + most * 0.01, at, _words(seconds), va="center", fontsize=9)
    axes.set_title(f"Until the KV of {PROMPT_TOKENS:,} tokens is there (shorter is better)", loc="left", fontsize=10)
    _dress(axes, [name for name, _, _ in rows], most, "seconds")


def _draw_speed(axes: Axes, names: list[str], loads: list[float], stores: list[float]) -> None:
    most = max([*loads, *stores], default=1.0)
    for at, (load, store) in enumerate(zip(loads, stores, strict=True)):
        for offset, value, colour in ((-0.2, load, _LOAD), (0.2, store, _STORE)):
            axes.barh(at + offset, value, color=colour, height=0.36)
            axes.text(value + most * 0.01, at + offset, f"{value:,.0f}", va="center", fontsize=9)
    axes.set_title("Speed, MB/s (longer is better): dark loads, light stores", loc="left", fontsize=10)
    _dress(axes, names, most, "MB/s")


def _dress(axes: Axes, names: list[str], most: float, unit: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.15)
    axes.set_xlabel(unit, fontsize=9, color=_GREY)
    axes.tick_params(axis="x", labelsize=8, colors=_GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _words(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def _mb_s(measured: Any) -> float:
    return 0.0 if measured is None else float(measured.bytes_s) / 1e6
