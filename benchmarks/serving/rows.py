"""The rows of the race, as a table: what is asked, of which sides, with how much memory.

KV of the model is an eighth of an 8B model's, so that this machine's memory and disk stand to it as those of a server
with a GPU to the whole. Threading: frozen values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.serving.model import BLOCK_TOKENS, Pace, Shape
from benchmarks.serving.sides import Room
from benchmarks.serving.workloads import Spec, longest_tokens, make, unique_tokens

EIGHTH, THIRTY_SECOND = Shape(4, 8, 128), Shape(1, 8, 128)
MEMORY = ("prefix", "free", "memory", "vllm-cpu", "vllm-cpu-256", "simple", "simple-lazy")
FILES = ("prefix", "memory+slab", "memory+tree", "vllm-fs", "vllm-fs-256")
BUCKET = ("prefix", "memory+s3", "vllm-obj", "vllm-obj-256")


@dataclass(frozen=True)
class Plan:
    """All that a run depends on, but the side."""

    workload: Spec
    sides: tuple[str, ...] = MEMORY
    gpu_share: float = 0.2
    """Of the working set, what the GPU's cache holds."""
    memory: float = 1.0
    """Host memory, in GPU caches."""
    is_filled: bool = False
    """Another engine has answered the same before, and has ended: only files and objects are left."""
    at_a_time: int = 64
    """The most requests under way."""
    shape: Shape = EIGHTH
    pace: Pace = field(default_factory=Pace)
    batched_tokens: int = 2048
    """The most in a step."""

    @property
    def working_set_bytes(self) -> int:
        return unique_tokens(make(self.workload)) * self.shape.token_bytes

    @property
    def longest_tokens(self) -> int:
        """Room for one request, in whole blocks."""
        return -(-(longest_tokens(make(self.workload)) + 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    def room(self) -> Room:
        """Return how many bytes there are. The GPU's cache holds the longest request at least."""
        least = (self.longest_tokens + 2 * BLOCK_TOKENS) * self.shape.token_bytes
        gpu = max(least, round(self.working_set_bytes * self.gpu_share))
        return Room(gpu, max(64 << 20, round(gpu * self.memory)), 2 * self.working_set_bytes + (256 << 20))


CHAT = Plan(Spec())
DOCUMENTS = Spec(40, 4, 50, document_tokens=2000)
LONG = Plan(Spec(8, 2, 50, document_tokens=32_000, think_s=10.0), MEMORY, 0.4, 3.0, shape=THIRTY_SECOND)
ROWS = {
    "memory-half": replace(CHAT, memory=0.5),
    "memory-same": CHAT,
    "memory-double": replace(CHAT, memory=2.0),
    "memory-all": replace(CHAT, memory=6.0),
    "documents": Plan(DOCUMENTS, gpu_share=8 / 40, memory=30 / 8),
    "32k": LONG,
    "128k": replace(LONG, workload=Spec(4, 2, 50, document_tokens=128_000, think_s=30.0)),
    "restart": replace(CHAT, sides=FILES, is_filled=True),
    "queue": Plan(Spec(64, 1, 50, 2000, think_s=0.0), (*FILES, *BUCKET[1:]), is_filled=True, at_a_time=32),
    "second-server": replace(CHAT, sides=BUCKET, is_filled=True),
    "no-hits": Plan(Spec(192, 1, think_s=0.0), (*MEMORY, *FILES[1:], "s3"), at_a_time=8),
}
"""Described in docs/benchmarks.md."""
