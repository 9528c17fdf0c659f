"""Draws ``docs/ttft.svg``, the picture of the README: the time to first token by where a prompt's KV comes from.

    python -m docs.ttft    # runs the demo, about two minutes; draw on a quiet machine

Threading: a command; nothing is shared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PICTURE = Path(__file__).with_name("ttft.svg")
BARS = {
    "cold": ("computed", "#b8b8b8"),
    "files": ("from files, after a restart", "#4c78a8"),
    "gpu_prefix_cache": ("from vLLM's own prefix cache", "#54a24b"),
}


def main() -> int:
    """Run the demo and draw; returns the exit code."""
    command = [sys.executable, "-m", "examples.demo", "--json", "--prompts", "8"]
    result = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "ttft"
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 1.7), layout="constrained")
    for row, (name, (label, color)) in enumerate(BARS.items()):
        seconds = result["passes"][name]["ttft_median_s"]
        bar = axis.barh(row, seconds, color=color, height=0.65)
        axis.bar_label(bar, labels=[f" {label}: {seconds:.2f} s"], fontsize=9)
    axis.set_xlim(0, axis.get_xlim()[1] * 1.35)
    axis.invert_yaxis()
    axis.axis("off")
    about = f"{result['prompt_tokens']:,} tokens, model of {result['model_parameters'] / 1e6:.0f} M parameters"
    axis.set_title(
        f"Time to first token (median of 8): {about}, vLLM {result['vllm']} on {result['device'] or 'this machine'}",
        fontsize=9,
        loc="left",
    )
    figure.savefig(PICTURE, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
