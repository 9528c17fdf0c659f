"""The page of plots of ``bench-scale``. Threading: plain functions; matplotlib is imported when something is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLUE, GREEN, ORANGE = "#4c78a8", "#54a24b", "#f58518"


def draw(report: dict[str, Any], path: Path) -> None:
    """Write a PNG of six plots. OSError: ``path`` cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, ((lookup, chunk, request), (ranks, calls, gc)) = pyplot.subplots(
        2, 3, figsize=(13, 7.2), layout="constrained"
    )
    keys = report["by_keys"]
    _line(lookup, keys, "lookup_memory_per_key", "memory tier", BLUE)
    _line(lookup, keys, "lookup_bucket_per_key", "bucket, believed present", GREEN)
    _line(chunk, keys, "store_per_chunk", "reserve + settle, evicting", BLUE)
    _line(request, keys, "per_request", "by keys, one at a time", BLUE)
    for axis, title in ((lookup, "lookup, µs per key"), (chunk, "store, µs per chunk"), (request, "µs per request")):
        axis.set(title=title, xscale="log", xlabel="keys known")
    at_once = request.twiny()
    _line(at_once, report["by_requests"], "per_request", "by requests at a time", ORANGE)
    at_once.set(xscale="log", xlabel="requests at a time, 100,000 keys")
    request.legend(handles=[*request.get_lines(), *at_once.get_lines()], fontsize=7)
    _line(ranks, report["by_ranks"], "settle_per_chunk", "all well", BLUE)
    _line(ranks, report["by_ranks"], "settle_per_chunk_one_failed", "one of 16 failed on each rank", ORANGE)
    ranks.set(title="merge ranks' reports and settle, µs per chunk", xlabel="ranks")
    for kind, color in (("head", BLUE), ("get", GREEN), ("put", ORANGE)):
        points = {fleet["servers"]: fleet["calls"].get(kind, 0.0) for fleet in report["fleets"]}
        calls.plot(list(points), list(points.values()), marker="o", color=color, label=kind.upper())
    calls.set(title="requests to the bucket per request served", xscale="log", xlabel="servers, one request/s each")
    shapes = list(report["gc"])
    for offset, (way, color) in enumerate((("one_at_a_time", ORANGE), ("now", BLUE))):
        places = [place + 0.4 * offset for place in range(len(shapes))]
        gc.bar(places, [report["gc"][shape][way]["hours"] for shape in shapes], 0.38, color=color, label=way)
    gc.set_xticks([place + 0.2 for place in range(len(shapes))], shapes)
    gc.axhline(3000 / 3600, color="#888888", linestyle=":", label="end of the Kubernetes job")
    gc.set(title="gc over 1 PB, hours (modelled)")
    for axis in (lookup, chunk, ranks, calls, gc):
        axis.legend(fontsize=7)
    for axis in (lookup, chunk, request, ranks, calls, gc, at_once):
        axis.title.set_fontsize(9)
        axis.xaxis.label.set_fontsize(8)
        axis.tick_params(labelsize=8)
        axis.set_ylim(bottom=0)
    figure.supxlabel(report["machine"], fontsize=7, color="#555555")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _line(axis: Any, figures: dict[str, dict[str, float]], name: str, label: str, color: str) -> None:
    axis.plot([int(x) for x in figures], [of[name] for of in figures.values()], marker="o", color=color, label=label)
