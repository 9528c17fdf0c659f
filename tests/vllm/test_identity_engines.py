"""Two running vLLMs whose configurations compute different KV never answer from each other's bytes; equal ones do. In
every test the second engine would hit all of the first's chunks if they agreed on a namespace, and its logprobs would
not be those of an engine without a cache.

Prompts are cut as in ``damage``: one prefill step is one chunk, so answers are compared bit by bit.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from examples.demo.model import TINY, write_model
from tests.families.checkpoints import CPU_MLA, IMAGE_TOKENS, write_mla, write_vision
from tests.vllm import vision
from tests.vllm.damage import ENGINE_OPTIONS, chunk_prompts, hits, until_loaded
from tests.vllm.harness import Answer, Engine, Workshop, assert_same
from tests.vllm.hub_stand_in import SECOND_SOURCE, HubStandIn
from tests.vllm.media import Medium, tree

PROMPTS = chunk_prompts(2, seed=501)


class Engines:
    """Starts engines with the options of this module; ``options`` as in ``Workshop.start_engine``."""

    def __init__(self, workshop: Workshop) -> None:
        self.scratch = workshop.scratch
        self._workshop = workshop

    def start(self, medium: Medium | None = None, **options: Any) -> Engine:
        connector = None if medium is None else medium.config()
        return self._workshop.start_engine(**{"connector": connector, **ENGINE_OPTIONS, **options})

    def answers(self, medium: Medium | None = None, **options: Any) -> list[Answer]:
        """Return what a new engine answers to ``PROMPTS``. It is stopped when all is stored."""
        with self.start(medium, **options) as engine:
            answers = engine.generate(PROMPTS)
            assert engine.settle()
            engine.stop()
        return answers

    def assert_shares(self, right: list[Answer], medium: Medium, **options: Any) -> None:
        """Assert that a new engine takes every full chunk from the tier and answers ``right``."""
        with self.start(medium, **options) as engine:
            until_loaded(engine, PROMPTS, right)
            engine.stop()

    def assert_shares_nothing(self, right: list[Answer], medium: Medium, **options: Any) -> None:
        """Assert that a new engine takes nothing from the tier and answers ``right``."""
        answers = self.answers(medium, **options)
        assert hits(answers) == 0
        assert_same(answers, right)


@pytest.fixture(scope="module")
def engines(workshop: Workshop) -> Engines:
    return Engines(workshop)


@pytest.fixture
def shared(workshop: Workshop, request: pytest.FixtureRequest) -> Medium:
    """A directory of the test's own, shared by its engines."""
    return tree(workshop.scratch / f"kv-{request.node.name}")


@pytest.fixture(scope="module")
def base(engines: Engines) -> Path:
    return write_model(engines.scratch / "first" / "model", TINY)


def _change(checkpoint: Path, tensor: str, row: int | slice) -> None:
    """Turn the sign of some rows, in place: length and header of the file stay as they are."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    changed = {name: each.clone() for name, each in tensors.items()}
    changed[tensor][row] *= -1
    del tensors
    save_file(changed, checkpoint / "changed", metadata={"format": "pt"})
    data = (checkpoint / "changed").read_bytes()
    (checkpoint / "changed").unlink()
    assert len(data) == file.stat().st_size
    with file.open("r+b") as same:
        same.write(data)


def test_one_changed_tensor(engines: Engines, base: Path, shared: Medium) -> None:
    """A copy of the checkpoint in another place shares; changed in one tensor, under the same name, it does not."""
    stored = engines.answers(shared, model=base)
    copy = engines.scratch / "second" / base.name
    shutil.copytree(base, copy)
    engines.assert_shares(stored, shared, model=copy)
    for tensor, row in (
        ("model.embed_tokens.weight", PROMPTS[0][0]),
        ("model.layers.2.self_attn.k_proj.weight", slice(None)),
    ):
        _change(copy, tensor, row)
        right = engines.answers(model=copy)
        assert right != stored
        engines.assert_shares_nothing(right, shared, model=copy)


def test_mla_on_a_cpu(engines: Engines, shared: Medium) -> None:
    """Here vLLM turns prefix caching off, for its prefill ignores cached context: every hit is answered wrongly. So
    nothing is stored or loaded, and one line says so.
    """
    options = {"model": write_mla(engines.scratch / "mla"), **CPU_MLA}
    right = engines.answers(**options)
    with engines.start(shared, **options) as engine:
        for _ in range(2):
            answers = engine.generate(PROMPTS)
            assert hits(answers) == 0
            assert_same(answers, right)
            assert engine.settle()
        assert engine.stored_bytes() == 0
        assert not shared.shards()
        engine.stop()
        assert engine.log.read_text().count("serve_without_prefix_caching") == 1


RED, BLUE = "red", "blue"
TEXT = [prompt[IMAGE_TOKENS:] for prompt in PROMPTS]
"""With an image before them as long as ``PROMPTS``."""
SEEING: dict[str, Any] = {"skip_tokenizer_init": False, "environment": vision.ENVIRONMENT}


def _look(engine: Engine, colour: str, **more: Any) -> list[Answer]:
    """Return what the engine answers to ``TEXT`` about an image. It keeps nothing on its device afterwards."""
    engine.call("show", colour=colour, **more)
    answers = engine.generate(TEXT)
    assert engine.settle()
    assert engine.reset_prefix_cache()
    return answers


def test_images(engines: Engines, shared: Medium) -> None:
    """An image is known by its content: by another engine, too, but not where the model is shown it differently.

    Requests whose images have a user's uuid for a name neither store nor load: it may name anything.
    """
    options: dict[str, Any] = {"model": write_vision(engines.scratch / "vision"), **SEEING}
    with engines.start(**options) as engine:
        red, blue = (_look(engine, colour) for colour in (RED, BLUE))
    assert red != blue
    named = {"multi_modal_uuids": {"image": ["mine"]}}
    with engines.start(shared, **options) as engine:
        assert hits(_look(engine, RED)) == 0
        before = shared.shards()
        assert hits(_look(engine, RED, **named)) == 0
        assert before
        assert shared.shards() == before
        engine.stop()
    with engines.start(shared, **options) as engine:
        for more in (named, {}):
            answers = _look(engine, BLUE, **more)
            assert hits(answers) == 0
            assert_same(answers, blue)
        engine.call("show", colour=RED)
        until_loaded(engine, TEXT, red)
        engine.stop()

    options["mm_processor_kwargs"] = {"do_normalize": False}
    with engines.start(**options) as engine:
        right = _look(engine, RED)
    with engines.start(shared, **options) as engine:
        answers = _look(engine, RED)
        assert hits(answers) == 0
        assert_same(answers, right)
        engine.stop()


@pytest.fixture
def hub() -> Iterator[HubStandIn]:
    with HubStandIn() as started:
        yield started


def test_a_model_from_the_hub(hub: HubStandIn, engines: Engines, shared: Medium) -> None:
    """A model is its name and its commit, whether the Hub was asked or only its cache; a new commit is a new model."""
    name, cache = "org/tiny", engines.scratch / "hub"
    weights = [write_model(engines.scratch / f"published-{seed}", TINY, seed=seed) for seed in (1, 2)]
    first = hub.publish(name, weights[0])
    stored = engines.answers(shared, model=name, environment=hub.environment(cache))
    offline = hub.environment(cache, offline=True)
    engines.assert_shares(stored, shared, model=name, environment=offline)

    second = hub.publish(name, weights[1])
    right = engines.answers(model=weights[1])
    engines.assert_shares_nothing(right, shared, model=name, environment=hub.environment(cache))

    manifests = [json.loads(path.read_text()) for path in shared.directory.glob("*/manifest.json")]
    told = {(manifest["fields"]["model"], manifest["fields"]["revision"]) for manifest in manifests}
    assert told == {(name, first), (name, second)}


def test_a_second_source_of_weights(hub: HubStandIn, engines: Engines, shared: Medium, base: Path) -> None:
    """Ultravox's ``text_model_id`` names another model without a commit, and that model is replaced."""
    sources = [write_model(engines.scratch / f"source-{seed}", TINY, seed=seed) for seed in (1, 2)]
    environment = hub.environment(engines.scratch / "hub-sources") | {SECOND_SOURCE: "1"}
    options = {"model": base, "environment": environment, "hf_overrides": {"text_model_id": "org/language-model"}}
    hub.publish("org/language-model", sources[0])
    stored = engines.answers(shared, **options)
    hub.publish("org/language-model", sources[1])
    answers = engines.answers(shared, **options)
    assert hits(answers) == 0
    assert [each.tokens for each in answers] != [each.tokens for each in stored]
    hub.publish("org/language-model", sources[0])
    engines.assert_shares(stored, shared, **options)
