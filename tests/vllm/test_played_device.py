"""Proves on vLLM's CUDA platform, both its model runners and asynchronous scheduling, played by host memory, that
answers with our connector equal answers of a vLLM without a cache to the last bit, also when requests are aborted or
files damaged.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.demo.model import random_prompts
from tests.prove.happenings import DAMAGES
from tests.s3.servers import RcloneServer
from tests.thinned import thinned
from tests.vllm import media
from tests.vllm.damage import loads_refused
from tests.vllm.harness import Answer, Engine, chain_config
from tests.vllm.played.engine import CHUNK_TOKENS, SHAPE, STEP_TOKENS, PlayedEngine, PlayedWorkshop

Tier = dict[str, Any]
PROMPTS = random_prompts(SHAPE, [700, 310, 520, 410], seed=28)
STORED_TOKENS = [len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS for prompt in PROMPTS]
ANSWER_TOKENS = 16
MEMORY: Tier = {"kind": "memory", "capacity": "64MiB", "lazy": False}


@dataclass(frozen=True)
class Trial:
    """What an event is tried on."""

    start: Callable[..., Engine]
    """Starts an engine on the medium; its arguments are ``start_played``'s."""
    right: list[Answer]
    survives: bool
    """Whether what rests in the medium survives a restart."""

    def check(self, engine: Engine, *, together: bool = False) -> list[Answer]:
        """Ask for all prompts; assert that the answers are right."""
        answers = engine.generate(PROMPTS, max_tokens=ANSWER_TOKENS, together=together)
        for answer, right in zip(answers, self.right, strict=True):
            assert answer.same_as(right)
        return answers

    def check_loaded(self, engine: Engine) -> None:
        """Assert that answers are right, and that every stored chunk was loaded."""
        assert engine.settle()
        assert engine.reset_prefix_cache()
        assert [answer.external_hit_tokens for answer in self.check(engine)] == STORED_TOKENS


def load(trial: Trial) -> None:
    """Computed, stored, forgotten by the GPU, loaded."""
    with trial.start() as engine:
        assert "BLHNC" in engine.log.read_text()
        assert not any(answer.cached_tokens for answer in trial.check(engine))
        trial.check_loaded(engine)
        trial.check(engine, together=True)
        engine.stop()


def restart(trial: Trial) -> None:
    """What rests in files is found by a new engine."""
    with trial.start() as engine:
        trial.check(engine, together=True)
        assert engine.settle()
        engine.stop()
    with trial.start() as engine:
        if not trial.survives:
            assert not any(answer.external_hit_tokens for answer in trial.check(engine))
        else:
            trial.check_loaded(engine)


def abort(trial: Trial) -> None:
    """Requests are given up at each early step of a store, then of a load."""
    with trial.start() as engine:
        for _ in range(2):
            for steps in (1, 2, 3, 5, 8):
                engine.reset_prefix_cache()  # refused while blocks of the last ones are being stored
                engine.abandon(PROMPTS, steps=steps)
            trial.check(engine)
            assert engine.settle(), "something still waits"
        trial.check_loaded(engine)


def preempt(trial: Trial) -> None:
    """The GPU's cache holds less than is asked for, cold and loaded."""
    with trial.start(kv_cache_blocks=66) as engine:
        for _ in range(2):
            trial.check(engine, together=True)
            assert engine.settle()
            assert engine.reset_prefix_cache()
        assert engine.metrics()["vllm:num_preemptions"] > 0


@pytest.fixture(scope="module")
def right(played: PlayedWorkshop) -> Callable[[str], list[Answer]]:
    """What a vLLM with this runner answers that has no cache."""

    @functools.cache
    def answers(runner: str) -> list[Answer]:
        with played.start_played(runner=runner, enable_prefix_caching=False) as engine:
            return engine.generate(PROMPTS, max_tokens=ANSWER_TOKENS)

    return answers


TRIALS = thinned(
    runner={"v1": "v1", "v2": "v2"},
    medium={name: name for name in ("s3", "memory", "memory and slab", "slab")},
    event={event.__name__: event for event in (load, restart, abort, preempt)},
)


@pytest.mark.parametrize(**TRIALS)
def test_answers_are_those_without_a_cache(
    played: PlayedWorkshop,
    server: RcloneServer,
    right: Callable[[str], list[Answer]],
    tmp_path: Path,
    runner: str,
    medium: str,
    event: Callable[[Trial], None],
) -> None:
    """Tokens and logprobs are the same bits."""
    slab = {"kind": "slab", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    tiers = {
        "memory": [MEMORY],
        "memory and slab": [MEMORY, slab],
        "slab": [slab],
        "s3": [server.tier(f"{runner}-{event.__name__}/", mover="obstore")],
    }[medium]

    def start(**options: Any) -> Engine:
        config = chain_config(*tiers, chunk_tokens=CHUNK_TOKENS)
        return played.start_played(config, runner=runner, environment=server.environment, **options)

    event(Trial(start, right(runner), medium != "memory"))


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_what_cannot_be_loaded_is_computed_and_stored_again(
    played: PlayedWorkshop, right: Callable[[str], list[Answer]], tmp_path: Path, runner: str
) -> None:
    """Steps that are scheduled before vLLM hears of the refused loads use nothing of them."""
    slab = media.slab(tmp_path / "kv", "64MiB")
    config = chain_config(slab.tier, chunk_tokens=CHUNK_TOKENS)
    trial = Trial(functools.partial(played.start_played, config, runner=runner), right(runner), survives=True)
    with trial.start() as engine:
        trial.check(engine)
        for together in (False, True):
            trial.check_loaded(engine)
            refused = loads_refused(engine)
            for shard in slab.stored():
                DAMAGES["flipped"](shard, shard, 0.5)
            assert engine.reset_prefix_cache()
            trial.check(engine, together=together)
            assert loads_refused(engine) > refused
        trial.check_loaded(engine)
        engine.stop()


def fuzz(
    prompts: list[list[int]], right: list[Any], config: dict[str, Any], model: str, runner: str, seed: int, answers: int
) -> dict[str, int]:
    """Hand in, step, abort, reset and settle at random; compare each answer. Runs in a process of its own."""
    source = random.Random(seed)
    engine = PlayedEngine(config, model=Path(model), runner=runner, kv_cache_blocks=96)
    asked: dict[str, int] = {}
    counts = {"answers": 0, "aborts": 0, "resets": 0, "loaded": 0, "preempted": 0}
    while counts["answers"] < answers:
        what = source.random()
        if what < 0.2 and len(asked) < 8:
            number = source.randrange(len(prompts))
            name = f"request-{sum(counts.values())}-{source.random()}"
            asked[name] = number
            engine.add(name, prompts[number], max_tokens=source.randint(1, ANSWER_TOKENS))
        elif what < 0.23 and asked:
            name = source.choice(sorted(asked))
            engine.abort(name)
            del asked[name]
            counts["aborts"] += 1
        elif what < 0.26:
            with contextlib.suppress(RuntimeError):  # vLLM refuses while a request waits for a load
                counts["resets"] += engine.engine.reset_prefix_cache(reset_running_requests=source.random() < 0.5)
        elif what < 0.3 and not asked:
            assert engine.settle()["idle"]
            counts["resets"] += engine.engine.reset_prefix_cache()
        for name, answer in engine.step().items():
            number, length = asked.pop(name), len(answer["tokens"])
            assert [answer["tokens"], answer["logprobs"]] == [each[:length] for each in right[number]], name
            counts["answers"] += 1
    engine.abort(*asked)
    assert engine.settle()["idle"], "something still waits"
    metrics = engine.metrics()["metrics"]
    counts["loaded"] = int(metrics["vllm:external_prefix_cache_hits"])
    counts["preempted"] = int(metrics["vllm:num_preemptions"])
    engine.shutdown()
    return counts


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("answers", [30, pytest.param(200, marks=pytest.mark.long)])
def test_fuzzed_requests_are_answered_right(played: PlayedWorkshop, tmp_path: Path, runner: str, answers: int) -> None:
    """Requests that share beginnings, in a GPU cache too small for them, before little memory and a slab."""
    heads = random_prompts(SHAPE, [STEP_TOKENS] * 4, seed=29)
    tails = random_prompts(SHAPE, [40, 130, 270, 400], seed=30)
    prompts = [head + tail for head in heads for tail in tails]
    with played.start_played(runner=runner, enable_prefix_caching=False) as engine:
        known = engine.generate(prompts, max_tokens=ANSWER_TOKENS, together=True)
    counts = played.call(
        fuzz,
        prompts=prompts,
        right=[[answer.tokens, answer.logprobs] for answer in known],
        config=chain_config(
            {"kind": "memory", "capacity": "1MiB"},
            {"kind": "slab", "path": str(tmp_path / "kv"), "capacity": "64MiB"},
            chunk_tokens=CHUNK_TOKENS,
        ),
        model=str(played.model()),
        runner=runner,
        seed=answers,
        answers=answers,
    )
    assert all(counts.values()), counts


def hold_stores() -> None:
    """Have stores begin only when vLLM waits for them, as where storage is slow."""
    from nixl_offload.vllm.worker import NixlOffloadingWorker

    submit, wait = NixlOffloadingWorker.submit_store, NixlOffloadingWorker.wait
    held: list[Any] = []

    def hold(worker: NixlOffloadingWorker, *job: Any) -> bool:
        held.append(functools.partial(submit, worker, *job))
        return True

    def release(worker: NixlOffloadingWorker, job_ids: set[int]) -> None:
        while held:
            held.pop(0)()
        wait(worker, job_ids)

    NixlOffloadingWorker.submit_store, NixlOffloadingWorker.wait = hold, release


def preempt_while_storing(model: str, runner: str, config: dict[str, Any] | None) -> list[Any]:
    """Return the answer to a prompt that is preempted right after its prefill, by requests that get its blocks. vLLM
    zeroes these, as it does for models with Mamba layers or a KV cache of mixed precision. Its stores are held back.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)
    hold_stores()
    first, *others = random_prompts(SHAPE, [250, 72, 72, 72, 72], seed=31)
    # The others hold 5 blocks each until their 81st token needs a sixth; then nothing is free but what is preempted.
    engine = PlayedEngine(
        config,
        model=Path(model),
        runner=runner,
        kv_cache_blocks=1 + 4 * 5 + 16,
        max_model_len=320,
        max_num_batched_tokens=320,
    )
    for number, prompt in enumerate(others):
        engine.add(f"other-{number}", prompt, max_tokens=20)
    while min(request.num_computed_tokens for request in engine.scheduler.requests.values()) < 79:
        engine.step()
    engine.add("first", first, max_tokens=4)
    answers: dict[str, Any] = {}
    while engine.is_busy:
        answers |= engine.step()
    metrics = engine.metrics()["metrics"]
    assert metrics["vllm:num_preemptions"] == 1
    assert config is None or metrics["vllm:kv_offload_load_bytes"] > 0
    engine.shutdown()
    return [answers["first"]["tokens"], answers["first"]["logprobs"]]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_blocks_are_stored_before_vllm_zeroes_them(played: PlayedWorkshop, runner: str) -> None:
    """The preempted request goes on with what was stored of it."""
    config = chain_config(MEMORY, chunk_tokens=16)
    right = played.call(preempt_while_storing, model=str(played.model()), runner=runner, config=None)
    assert played.call(preempt_while_storing, model=str(played.model()), runner=runner, config=config) == right
