"""Real vLLM engines for tests: tiny models, quick starts, hard deadlines, and a way to poison the KV cache.

Threading: one test at a time, which may start engines on threads of its own. Ownership: ``Workshop`` owns engines and a
scratch directory; ``close`` ends them all.

``in_process`` engines (the default) are one process, forked from a zygote where there is one: a start takes 1 to 2 s,
and a kill takes all of it. ``in_process=False`` is what ``vllm serve`` runs, scheduler and worker in processes of their
own; they are forked, too. ``forked=False`` lets those two import all by themselves, as for a user: 10 s each.

Bit-identical answers: the KV of a prompt does not depend on how often it was computed, but the last bits of the answer
depend on the shape of the last prefill step. A prompt from ``prompts`` is a whole number of prefill steps, each a whole
number of chunks, and a tail shorter than a block. So its last step has the same shape whether the rest was computed,
taken from vLLM's prefix cache or loaded, and ``Answer.same_as`` may compare bit by bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from examples.demo.engine import Answer, Engine, quick_environment
from examples.demo.model import TINY, ModelShape, random_prompts, write_model
from tests.vllm.zygote import ForkedEngine, Zygote

ANSWER_TOKENS = 4
"""So many show any damaged block. Each takes as long as 100 tokens of a prompt."""
BLOCK_TOKENS = 64
CHUNK_TOKENS = 256
MAX_BATCHED_TOKENS = 512
TAIL_TOKENS = 50
OPTIONS: Final[Mapping[str, Any]] = {
    "dtype": "float32",
    "block_size": BLOCK_TOKENS,
    "max_num_batched_tokens": MAX_BATCHED_TOKENS,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
}
"""Of each engine. Its KV cache has 256 blocks of TINY."""
ONE_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Tiny models gain nothing from a second thread, and on a busy machine OpenMP's threads spend minutes spinning."""


class Workshop:
    """Makes models and engines in a scratch directory of its own, and ends and removes everything at ``close``."""

    def __init__(self, zygote: Zygote | None = None) -> None:
        self._zygote = zygote
        self.scratch = Path(tempfile.mkdtemp(prefix="nixl-offload-tests-"))
        self._engines: list[Engine] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def start_engine(
        self,
        shape: ModelShape = TINY,
        connector: Mapping[str, Any] | str | None = None,
        *,
        model: Path | str | None = None,
        in_process: bool = True,
        forked: bool = True,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Engine:
        """Start a float32 engine on ``shape``'s model. ``connector`` is our config (mapping or path); None means none.

        ``model`` is another model, by its directory or name; then ``shape`` only says how long prompts may be.
        ``options`` are ``vllm.LLM``'s and override ``OPTIONS``.
        """
        if model is None:
            with self._lock:
                model = write_model(self.scratch / f"model-{abs(hash(shape)):x}", shape)
        extension = "tests.vllm.poison.PoisonExtension"
        options = {**OPTIONS, "max_model_len": shape.max_tokens, "worker_extension_cls": extension, **options}
        make = functools.partial(ForkedEngine, self._zygote, forks_all=forked) if self._zygote is not None else Engine
        engine = make(
            model,
            connector=connector,
            log=self.scratch / f"engine-{next(self._numbers)}.log",
            environment={
                **quick_environment(scratch=self.scratch, in_process=in_process),
                **ONE_CORE,
                **(environment or {}),
            },
            **options,
        )
        engine.answer_tokens = ANSWER_TOKENS
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """Kill what still runs and remove the scratch directory. Idempotent."""
        for engine in self._engines:
            engine.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def start_zygote(scratch: Path, **environment: str) -> Zygote:
    """Start what engines are forked from; the caller closes it. ``scratch``: for its log and what engines write."""
    quick = quick_environment(scratch=scratch, in_process=True)
    return Zygote(scratch / "zygote.log", {**quick, **ONE_CORE, **environment})


@contextlib.contextmanager
def forked_workshop(scratch: Path, **environment: str) -> Iterator[Workshop]:
    """Yield a workshop with a zygote of its own, as ``start_zygote``."""
    zygote = start_zygote(scratch, **environment)
    with contextlib.closing(zygote), contextlib.closing(Workshop(zygote)) as workshop:
        yield workshop


def file_tier(path: Path, *, capacity: str = "256MiB", **fields: Any) -> dict[str, Any]:
    """Our config with one file tier at ``path``; ``fields`` are further top-level fields of the config."""
    return chain_config(slab_tier(path, capacity), **fields)


def chain_config(*tiers: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Our config with these tiers. Hits are taken however slow, for a tiny model computes faster than most load."""
    return {"chunk_tokens": CHUNK_TOKENS, "slow_hits": "take", "tiers": [dict(tier) for tier in tiers], **fields}


def slab_tier(path: Path, capacity: str = "256MiB") -> dict[str, Any]:
    """A slab."""
    return {"kind": "slab", "path": str(path), "capacity": capacity}


def tree_tier(path: Path, **fields: Any) -> dict[str, Any]:
    """A tier in a directory that engines share; ``fields`` are further fields of the tier."""
    return {"kind": "shared_dir", "path": str(path), "capacity": "1GiB", **fields}


def prompts(count: int, *, steps: int = 3, seed: int, shape: ModelShape = TINY) -> list[list[int]]:
    """Random prompts: ``steps`` full prefill steps (two chunks each) and a short tail. Each test takes its own seed."""
    return random_prompts(shape, [steps * MAX_BATCHED_TOKENS + TAIL_TOKENS] * count, seed=seed)


def several(*connectors: Mapping[str, Any], policy: str = "recompute") -> dict[str, Any]:
    """Return vLLM's transfer config of several connectors, in this order. ``policy``: for failed loads."""
    both = {"kv_role": "kv_both"}
    return {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [both | dict(connector) for connector in connectors]},
        **both,
    }


def ask_anew(engine: Engine, asked: list[list[int]], **options: Any) -> list[Answer]:
    """Return answers to prompts of which vLLM remembers nothing. What is to be stored before is stored."""
    assert engine.settle(), "something is still waiting"
    assert engine.reset_prefix_cache()
    engine.worker("clear_kv")
    return engine.generate(asked, **options)


def same(answers: Sequence[Answer], others: Sequence[Answer]) -> bool:
    """Whether tokens and logprobs are the same, to the last bit."""
    return all(answer.same_as(other) for answer, other in zip(answers, others, strict=True))


def assert_same(answers: Sequence[Answer], right: Sequence[Answer]) -> None:
    """Assert that tokens and logprobs are the same, to the last bit."""
    assert [(each.tokens, each.logprobs) for each in answers] == [(each.tokens, each.logprobs) for each in right]


def close(answer: Answer, right: Answer, *, logprob_tolerance: float = 1e-3) -> bool:
    """Whether tokens are the same and logprobs nearly: for answers out of batches, whose shapes differ.

    Float32 noise is some 1e-5 here; a damaged block of KV moves logprobs by 0.1 and more.
    """
    return answer.tokens == right.tokens and all(
        abs(a - b) <= logprob_tolerance for a, b in zip(answer.logprobs, right.logprobs, strict=True)
    )


def assert_close(answers: Sequence[Answer], right: Sequence[Answer]) -> None:
    """Assert that tokens are the same and logprobs nearly, as ``close``."""
    assert all(close(answer, other) for answer, other in zip(answers, right, strict=True))
