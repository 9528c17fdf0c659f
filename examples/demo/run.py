"""What the demo does: one engine computes and stores, another one answers the same prompts from the storage; compare.

With files the first engine ends before the second one starts: a restart. With a bucket it goes on running: two servers
share one bucket.

Threading: one thread. Ownership: ``run`` owns S3 server, engines and a scratch directory and leaves none behind; the
directory for files is the caller's. ``handover.problems`` judges the result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.handover import Handover, Stage
from examples.demo.model import ModelShape
from examples.s3_server import RcloneServer


@dataclass(frozen=True, slots=True)
class Result:
    """All that was measured."""

    about: dict[str, Any]
    """``device`` and ``vllm``: on what it ran."""
    parameters: int
    handover: Handover
    held_bytes: int
    """Disk space of all files or objects, header pages and index included."""


def run(
    shape: ModelShape,
    directory: Path | None,
    *,
    mover: str = "auto",
    prompts: int,
    tokens: int,
    progress: Callable[[str], None],
) -> Result:
    """Run the demo on files in ``directory``, which must be new or empty; None: in a bucket of a local S3 server.

    ``mover`` is the bucket's. Raises EngineError when an engine fails, RuntimeError when the S3 server does not start.
    """
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="nixl-offload-demo-", ignore_cleanup_errors=True))
        stage = Stage(shape, Path(name), prompts=prompts, tokens=tokens, progress=progress)
        if directory is None:
            server = stack.enter_context(RcloneServer(parent=Path(name)))
            progress(f"an S3 server listens at {server.endpoint}")
            tier, place, held = server.tier(mover=mover), "S3", server.directory
            environment = server.environment
        else:
            tier = {"kind": "slab", "path": str(directory), "capacity": stage.capacity}
            place, held, environment = "files", directory, {}
        with stage.start(1, tier, environment) as engine:
            first = stage.compute(engine)
            progress(f"engine 1 has stored {first.stored_bytes / 1e6:.0f} MB")
            if directory is not None:
                progress("stopping engine 1")
                engine.stop()
            with stage.start(2, tier, environment) as other:
                handover = stage.take_over(other, first, place)
                other.stop()
            if directory is None:
                engine.stop()
        held_bytes = sum(path.stat().st_blocks * 512 for path in held.rglob("*") if path.is_file())
        return Result(engine.about, shape.parameters(), handover, held_bytes)
