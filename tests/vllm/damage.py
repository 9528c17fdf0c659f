"""What fault tests need: answers of a vLLM without us, a look into a tier's files, and ways to damage them.

Threading: one test at a time. The files are read and written behind the engine's back, through descriptors of our own;
where a chunk lies is learned from the durable index and believed only if the slot's header agrees.

Prompts here are cut for faults: one prefill step is one chunk. Wherever the good prefix of a damaged prompt ends, the
rest is computed in the steps in which it was computed without a cache, so answers may be compared bit by bit.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.model import TINY, random_prompts
from nixl_offload.chunk.header import HEADER_BYTES, ShardHeader, decode_header
from nixl_offload.errors import FormatError, TierError
from nixl_offload.tiers.slab.index_reader import IndexReader
from tests.vllm.harness import (
    CHUNK_TOKENS,
    TAIL_TOKENS,
    Answer,
    Engine,
    Workshop,
    assert_same,
)

CHUNK_BYTES = CHUNK_TOKENS * 2 * TINY.layers * TINY.kv_heads * TINY.head_size * 4
PROMPT_CHUNKS = 4
FULL_TOKENS = PROMPT_CHUNKS * CHUNK_TOKENS
ENGINE_OPTIONS: dict[str, Any] = {"max_num_batched_tokens": CHUNK_TOKENS}

Prompt = list[int]


def chunk_prompts(count: int, *, seed: int) -> list[Prompt]:
    """Random prompts of ``PROMPT_CHUNKS`` chunks and a short tail."""
    return random_prompts(TINY, [FULL_TOKENS + TAIL_TOKENS] * count, seed=seed)


class Reference:
    """A running vLLM without a connector; each prompt is computed once, from nothing."""

    def __init__(self, workshop: Workshop) -> None:
        self._engine = workshop.start_engine(**ENGINE_OPTIONS)
        self._known: dict[tuple[int, ...], Answer] = {}

    def answers(self, prompts: list[Prompt]) -> list[Answer]:
        """What the prompts are to be answered with."""
        new = [prompt for prompt in prompts if tuple(prompt) not in self._known]
        if new:
            for prompt, answer in zip(new, self._engine.generate(new), strict=True):
                self._known[tuple(prompt)] = answer
        return [self._known[tuple(prompt)] for prompt in prompts]

    def check(self, engine: Engine, prompts: list[Prompt]) -> list[Answer]:
        """Let ``engine`` answer, without what the GPU remembers; assert that tokens and logprobs are right."""
        assert engine.reset_prefix_cache()
        answers = engine.generate(prompts)
        assert_same(answers, self.answers(prompts))
        return answers

    def check_healed(self, engine: Engine, prompts: list[Prompt]) -> None:
        """Assert right answers, and that afterwards every full chunk is stored again."""
        self.check(engine, prompts)
        assert engine.settle()
        refused = loads_refused(engine)
        answers = self.check(engine, prompts)
        assert [answer.external_hit_tokens for answer in answers] == [FULL_TOKENS] * len(prompts)
        assert loads_refused(engine) == refused, "still damaged"


def loads_refused(engine: Engine) -> int:
    """How often the engine's log says that a load was refused and recomputed."""
    return engine.log.read_text(errors="replace").count("not usable")


@dataclass(frozen=True)
class Chunk:
    """A stored chunk: where its slot lies, and what its header says."""

    offset: int
    slot_bytes: int
    header: ShardHeader


class TierFiles:
    """The files of the one namespace in a tier's directory."""

    def __init__(self, base: Path) -> None:
        self.base = base

    @functools.cached_property
    def directory(self) -> Path:
        """The namespace's directory, as it was found the first time."""
        [manifest] = self.base.glob("*/manifest.json")
        return manifest.parent

    @property
    def slab(self) -> Path:
        """The slab of the only rank."""
        return self.directory / "rank-00000.slab"

    @property
    def index(self) -> Path:
        """The durable index; ``index.sqlite-journal`` lies beside it."""
        return self.directory / "index.sqlite"

    def chunks(self, expected: int, *, deadline_s: float = 20.0) -> list[Chunk]:
        """Wait until the index names ``expected`` chunks whose headers agree; return them in the order of offsets."""
        deadline = time.monotonic() + deadline_s
        while True:
            found = self._agreed()
            if len(found) >= expected:
                return found
            assert time.monotonic() < deadline, f"{len(found)} chunks found, {expected} expected"
            time.sleep(0.02)

    def flip(self, path: Path, position: int, mask: int = 0x01) -> None:
        """Change bits of the byte at ``position``, on the disk."""
        with path.open("r+b", buffering=0) as file:
            [byte] = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([byte ^ mask]), position)
            os.fsync(file.fileno())

    def exchange(self, one: int, other: int, length_bytes: int) -> None:
        """Swap two ranges of the slab."""
        with self.slab.open("r+b", buffering=0) as file:
            first = os.pread(file.fileno(), length_bytes, one)
            second = os.pread(file.fileno(), length_bytes, other)
            assert len(first) == len(second) == length_bytes
            os.pwrite(file.fileno(), second, one)
            os.pwrite(file.fileno(), first, other)
            os.fsync(file.fileno())

    def real_bytes(self) -> int:
        """Space that all that lies in the directory takes on the disk."""
        inside = (os.path.join(root, name) for root, names, files in os.walk(self.base) for name in [*names, *files])
        return sum(os.lstat(path).st_blocks * 512 for path in inside if os.path.lexists(path))

    def _agreed(self) -> list[Chunk]:
        found = []
        try:
            rows = sorted(IndexReader(self.index).rows(), key=lambda row: row.offset)
        except TierError:
            rows = []  # not there yet, or being replaced
        with self.slab.open("rb", buffering=0) as file:
            for _, key, offset, slot_bytes in rows:
                try:
                    header = decode_header(os.pread(file.fileno(), HEADER_BYTES, offset))
                except FormatError:
                    continue
                if header.key == key:
                    found.append(Chunk(offset, slot_bytes, header))
        return found


def until(holds: Callable[[], Any], what: str, *, deadline_s: float = 60.0) -> None:
    """Call ``holds`` until it is true; fail, saying ``what`` did not happen, at the deadline."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s:.0f} s"
        time.sleep(0.05)
