"""The contenders of ``benchmarks.long_documents``: what each is configured with, and the engines that they run in.

Threading: one thread drives an engine; ``start`` starts several side by side. Ownership: whoever starts engines closes
them; configs, logs and KV files lie in the caller's scratch directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from examples.demo.engine import Engine, EngineError, quick_environment
from examples.demo.model import ModelShape

BLOCK_TOKENS = 64
CHUNK_TOKENS = 256
STEP_TOKENS = 512
"""Tokens per prefill step. A document is whole steps and a question shorter than a block: the last step then has the
same shape whether the document was computed, cached or loaded."""
QUESTION_TOKENS = 50
_PAGE_BYTES = 4096

NOTES = {
    "none": "prefix caching off",
    "GPU": "vLLM's prefix cache",
    "memory": "ours: kind memory",
    "memory + file": "ours: kinds memory and slab",
    "file": "ours: kind slab",
    "vLLM spec": "OffloadingConnector with CPUOffloadingSpec",
    "vLLM simple": "SimpleCPUOffloadConnector",
}
"""By name, in the order in which they are shown. The first is the reference of all answers."""


@dataclass(frozen=True)
class Sizes:
    """What fits where, in documents."""

    shape: ModelShape
    dtype: str
    document_tokens: int
    answer_tokens: int
    gpu_documents: int
    memory_documents: int
    file_documents: int

    @property
    def token_bytes(self) -> int:
        """KV bytes of a token."""
        item_bytes = 4 if self.dtype == "float32" else 2
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_size * item_bytes

    @property
    def gpu_bytes(self) -> int:
        """The KV cache: so many documents with their questions and answers, in blocks, and vLLM's null block."""
        request = self.document_tokens + QUESTION_TOKENS + self.answer_tokens
        blocks = self.gpu_documents * -(-request // BLOCK_TOKENS) + 1
        return blocks * BLOCK_TOKENS * self.token_bytes

    @property
    def memory_bytes(self) -> int:
        return self._stored_bytes(self.memory_documents)

    @property
    def file_bytes(self) -> int:
        return self._stored_bytes(self.file_documents)

    def engine_bytes(self, name: str) -> int:
        """Roughly what an engine takes of this machine's memory: torch and vLLM, the model, its caches."""
        host = self.memory_bytes if name in ("memory", "memory + file", "vLLM spec", "vLLM simple") else 0
        return (1 << 30) + 4 * self.shape.parameters() + self.gpu_bytes + host

    def _stored_bytes(self, documents: int) -> int:
        chunk_bytes = CHUNK_TOKENS * self.token_bytes + _PAGE_BYTES
        return documents * self.document_tokens // CHUNK_TOKENS * chunk_bytes


class Contender:
    """One way of keeping KV, in a running engine."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    def forget(self) -> None:
        """Empty all its caches."""
        self.engine.settle()
        if self.name != "none":
            self.engine.reset_prefix_cache(connector=self.name != "GPU")
            self.engine.settle()


def our_config(name: str, sizes: Sizes, directory: Path) -> dict[str, Any]:
    """The config of one of ours, as its YAML says it."""
    memory = {"kind": "memory", "capacity": sizes.memory_bytes}
    file = {"kind": "slab", "path": str(directory), "capacity": sizes.file_bytes}
    tiers = {"memory": [memory], "file": [file], "memory + file": [memory, file]}[name]
    return {"chunk_tokens": CHUNK_TOKENS, "tiers": tiers}


def peer_options(name: str, sizes: Sizes) -> dict[str, Any]:
    """``vllm.LLM``'s options that make one of vLLM's."""
    if name == "none":
        return {"enable_prefix_caching": False}
    if name == "GPU":
        return {}
    extra: dict[str, Any] = {"cpu_bytes_to_use": sizes.memory_bytes}
    if name == "vLLM spec":
        spec = {"spec_name": "MeasuredCPUOffloadingSpec", "spec_module_path": "benchmarks.long_documents_peers"}
        extra = {**extra, **spec, "block_size": CHUNK_TOKENS}
    connector = "OffloadingConnector" if name == "vLLM spec" else "SimpleCPUOffloadConnector"
    return {"kv_transfer_config": {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}}


@contextlib.contextmanager
def start(
    names: Sequence[str], sizes: Sizes, model: Path, scratch: Path, kv: Path
) -> Iterator[tuple[list[Contender], dict[str, str]]]:
    """Start an engine for each name, side by side. Gives those that run, and of the others the reason.

    ``scratch`` needs a short path; files of KV go to ``kv``.
    """
    engines: list[Contender] = []
    absent: dict[str, str] = {}
    environment = {
        **quick_environment(scratch=scratch, in_process=True),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the threads of our tiers would share the first core
        "OMP_WAIT_POLICY": "passive",  # spinning threads take the cores from whose turn it is, and from other work
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(4) as pool:
            futures = {name: pool.submit(_engine, name, sizes, model, scratch, kv, environment) for name in names}
            for name, future in futures.items():
                try:
                    engines.append(Contender(name, stack.enter_context(future.result())))
                except EngineError as error:  # noqa: PERF203
                    absent[name] = _reason(error)
        yield engines, absent
        for contender in engines:
            contender.engine.stop()


def _engine(name: str, sizes: Sizes, model: Path, scratch: Path, kv: Path, environment: Mapping[str, str]) -> Engine:
    label = name.replace(" ", "")
    connector: str | None = None
    options: dict[str, Any] = {}
    if NOTES[name].startswith("ours"):
        directory, config = kv / label, scratch / f"{label}.yaml"
        config.write_text(yaml.safe_dump(our_config(name, sizes, directory), sort_keys=False))
        connector = str(config)
    else:
        options = peer_options(name, sizes)
    return Engine(
        model,
        connector=connector,
        log=scratch / f"{label}.log",
        environment=environment,
        dtype=sizes.dtype,
        block_size=BLOCK_TOKENS,
        max_model_len=sizes.document_tokens + QUESTION_TOKENS + sizes.answer_tokens,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=4,
        kv_cache_memory_bytes=sizes.gpu_bytes,
        **options,
    )


def _reason(error: EngineError) -> str:
    """The sentence of an engine that did not start, without its log."""
    reason = str(error).partition("\n")[0].removeprefix("start: ")
    return f"it copies by CUDA streams and driver calls ({reason})" if "StreamPlaceholder" in reason else reason
