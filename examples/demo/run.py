"""What the demo does: serve, stop, start again on the same directory, serve again, compare.

Threading: one thread. Ownership: ``run`` owns the engines and a scratch directory and leaves neither behind; the KV
directory is the caller's. ``handover.problems`` judges the result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from examples.demo.handover import Handover, Stage
from examples.demo.model import ModelShape


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All that was measured."""

    device: str
    vllm: str
    parameters: int
    handover: Handover
    directory_bytes: int
    """Disk space that the KV directory takes, header pages and index included."""


def run(
    shape: ModelShape, directory: Path, *, prompts: int, tokens: int, progress: Callable[[str], None]
) -> DemoResult:
    """Run the demo on ``directory``, which must be new or empty. Raises EngineError when an engine fails."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-demo-", ignore_cleanup_errors=True) as scratch:
        stage = Stage(shape, Path(scratch), prompts=prompts, tokens=tokens, progress=progress)
        tier = {"kind": "slab", "path": str(directory), "capacity": stage.capacity}
        with stage.start(1, tier) as engine:
            about = engine.about
            first = stage.compute(engine)
            progress(f"stopping engine 1, which has stored {first.stored_bytes / 1e6:.0f} MB")
            engine.stop()
        with stage.start(2, tier) as engine:
            handover = stage.take_over(engine, first, "files")
            engine.stop()
    return DemoResult(
        device=about["device"],
        vllm=about["vllm"],
        parameters=shape.parameters(),
        handover=handover,
        directory_bytes=sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file()),
    )
