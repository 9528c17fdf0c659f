"""What the demo does: one engine computes, another one answers the same prompts from the bucket; then by a directory.

Threading: one thread, and those of the counting pass-through. Ownership: ``run`` owns server, engines and a scratch
directory and leaves none behind. ``problems`` is pure: it judges a result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo import handover
from examples.demo.handover import Handover, Stage
from examples.demo.model import ModelShape
from examples.s3_server import RcloneServer
from examples.s3_traffic import CountingProxy, Traffic

TREE_PROMPTS = 2
"""The directory is shown with fewer prompts: its point is the same."""


@dataclass(frozen=True, slots=True)
class DemoS3Result:
    """All that was measured."""

    device: str
    vllm: str
    parameters: int
    bucket: Handover
    tree: Handover
    first_traffic: Traffic
    """What the first engine and the S3 server said to each other while it served and stored."""
    second_traffic: Traffic
    """The same for the second engine, while it served."""
    bucket_bytes: int
    """What the objects in the bucket hold, their headers included."""


def run(shape: ModelShape, *, prompts: int, tokens: int, mover: str, progress: Callable[[str], None]) -> DemoS3Result:
    """Run the demo. Raises EngineError when an engine fails, RuntimeError when the S3 server does not start."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-demo-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        with RcloneServer(parent=scratch) as server, CountingProxy(server.port) as proxy:
            stage = Stage(shape, scratch, prompts=prompts, tokens=tokens, progress=progress)
            progress(f"an S3 server listens at {server.endpoint}")
            tier = server.tier(endpoint=proxy.endpoint, mover=mover)
            environment = server.environment
            # The first engine goes on running: two servers share one bucket.
            with stage.start(1, tier, environment) as first_engine:
                about, before = first_engine.about, proxy.traffic()
                first = stage.compute(first_engine)
                first_traffic = proxy.traffic().since(before)
                with stage.start(2, tier, environment) as second_engine:
                    before = proxy.traffic()
                    bucket = stage.take_over(second_engine, first, "S3")
                    second_traffic = proxy.traffic().since(before)
                    second_engine.stop()
                first_engine.stop()
            bucket_bytes = sum(path.stat().st_size for path in server.directory.rglob("*") if path.is_file())
        tree = _over_directory(stage, scratch / "shared")
    return DemoS3Result(
        device=about["device"],
        vllm=about["vllm"],
        parameters=shape.parameters(),
        bucket=bucket,
        tree=tree,
        first_traffic=first_traffic,
        second_traffic=second_traffic,
        bucket_bytes=bucket_bytes,
    )


def _over_directory(stage: Stage, directory: Path) -> Handover:
    """The same with two new engines, each of one process so that they start sooner, and a directory that both see."""
    tier: Mapping[str, Any] = {"kind": "shared_dir", "path": str(directory), "capacity": stage.capacity}
    with stage.start(3, tier, in_process=True) as engine:
        first = stage.compute(engine, prompts=TREE_PROMPTS)
        with stage.start(4, tier, in_process=True) as other:
            tree = stage.take_over(other, first, "a shared directory")
            other.stop()
        engine.stop()
    return tree


def problems(result: DemoS3Result) -> list[str]:
    """Say in a sentence each what is not as it should be; empty when all is well."""
    found = handover.problems(result.bucket) + handover.problems(result.tree)
    first, second, chunks = result.first_traffic, result.second_traffic, result.bucket.chunks
    if first.puts < chunks:
        found.append(f"The S3 server saw {first.puts} PUTs from the first engine; {chunks} chunks were to be stored.")
    if second.gets < chunks:
        found.append(f"The S3 server saw {second.gets} GETs from the second engine, for {chunks} chunks.")
    if second.bytes_from_server < result.bucket.loaded_bytes:
        found.append(
            f"The S3 server sent {second.bytes_from_server} bytes to the second engine, which says that it loaded"
            f" {result.bucket.loaded_bytes}."
        )
    if second.heads > chunks + 1:
        found.append(f"The second engine sent {second.heads} HEADs for {chunks} chunks and the manifest.")
    if second.puts:
        found.append(f"The second engine sent {second.puts} PUTs, and had nothing to store.")
    return found
