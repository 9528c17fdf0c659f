"""What requests can say besides a prompt, each with a slab.

Threading: one thread. Ownership: engines end with each case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from examples.demo.engine import Answer, Engine, _answer
from examples.demo.model import TINY, random_prompts, write_model
from tests.families.host import ENVIRONMENT
from tests.families.models import FAMILIES
from tests.families.trial import Cell, judge
from tests.vllm.harness import CHUNK_TOKENS, TAIL_TOKENS, Workshop, file_tier

LENGTH: Final = 4 * CHUNK_TOKENS + TAIL_TOKENS
Request = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """A feature: what is stored, and what then is asked for."""

    name: str
    first: Sequence[Request]
    then: Sequence[Request]
    finds: bool
    """Whether ``then`` is to find what ``first`` has left."""
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[Path], Path] = lambda directory: write_model(directory, TINY)
    together: bool = False
    answer_tokens: int = 4
    preempts: bool = False
    """Whether the engine must have preempted requests."""


_EMBEDS: Final = {"enable_prompt_embeds": True}
[_ONE] = random_prompts(TINY, [LENGTH], seed=51)
_MANY = random_prompts(TINY, [LENGTH] * 6, seed=52)

FEATURES: Final = {
    feature.name: feature
    for feature in (
        Feature("cache_salt: the same", [{"tokens": _ONE, "salt": "a"}], [{"tokens": _ONE, "salt": "a"}], finds=True),
        Feature("cache_salt: another", [{"tokens": _ONE, "salt": "a"}], [{"tokens": _ONE, "salt": "b"}], finds=False),
        Feature("cache_salt: none", [{"tokens": _ONE, "salt": "a"}], [{"tokens": _ONE}], finds=False),
        Feature("prompt_embeds: the same", [{"embeds": [1, LENGTH]}], [{"embeds": [1, LENGTH]}], True, _EMBEDS),
        Feature("prompt_embeds: others", [{"embeds": [1, LENGTH]}], [{"embeds": [2, LENGTH]}], False, _EMBEDS),
        Feature(
            "preemption with state",
            [{"tokens": prompt} for prompt in _MANY],
            [{"tokens": prompt} for prompt in _MANY],
            finds=True,
            options={"kv_cache_memory_bytes": 10 << 20, "max_num_batched_tokens": 200},  # a block of 192, and decodes
            model=FAMILIES["nemotron-h"].write,
            together=True,
            answer_tokens=200,
            preempts=True,
        ),
    )
}


def try_feature(workshop: Workshop, feature: Feature) -> Iterator[Cell]:
    """Yield a cell for what was computed and one for what was asked then. Raises EngineError."""
    model = feature.model(workshop.scratch / feature.name.replace(" ", "-").replace(":", ""))
    config = file_tier(workshop.scratch / f"kv-{feature.name.replace(' ', '-').replace(':', '')}")
    options = {"max_num_batched_tokens": CHUNK_TOKENS, **feature.options}
    with workshop.start_engine(model=model, environment=ENVIRONMENT, **options) as engine:
        right = [_ask(engine, feature, [request])[0] for request in (*feature.first, *feature.then)]
        engine.stop()
    with workshop.start_engine(model=model, environment=ENVIRONMENT, connector=config, **options) as engine:
        first = _ask(engine, feature, feature.first)
        assert engine.settle()
        yield judge("cold", first, right[: len(first)], hits=0)
        before = engine.metrics()
        then = _ask(engine, feature, feature.then)
        after = engine.metrics()
        hits = int(after["vllm:external_prefix_cache_hits"] - before["vllm:external_prefix_cache_hits"])
        preempted = int(after["vllm:num_preemptions"] - before["vllm:num_preemptions"])
        note = f"{preempted} preemptions" if preempted else "NOT PREEMPTED" if feature.preempts else ""
        cell = judge("hit", then, right[len(first) :], note, hits)
        if bool(hits) != feature.finds:
            verdict, note = ("MISS", note) if feature.finds else ("WRONG", "found what is another's")
            cell = Cell("hit", verdict, hits, cell.delta, note)
        yield cell
        assert engine.settle(), "something is still waiting"
        engine.stop()


def _ask(engine: Engine, feature: Feature, requests: Sequence[Request]) -> list[Answer]:
    """Ask without what the GPU remembers, in one batch or one by one."""
    batches = [requests] if feature.together else [[request] for request in requests]
    assert engine.reset_prefix_cache()
    answers = []
    for batch in batches:
        reply = engine.call(
            "ask", requests=[dict(request) for request in batch], max_tokens=feature.answer_tokens, timeout_s=120.0
        )
        answers += [_answer(told) for told in reply["answers"]]
    return answers
