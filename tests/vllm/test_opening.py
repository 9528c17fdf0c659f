"""After the handshake every rank is told once to open its tiers, opens them in the background, and reports it.

First the scheduler's half alone; the test reports for the ranks (``test_rank_worker`` has their side). No error on the
way ends the engine.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

from examples.demo.model import ModelShape, write_model
from nixl_offload.errors import ConfigError
from nixl_offload.vllm import background, rank_tiers, serving_tiers
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import RankStatus, StepMetadata
from tests.faults.conftest import SmallFilesystem
from tests.vllm import manager_rig
from tests.vllm.manager_rig import Matching, Rig
from tests.vllm.media import memory
from tests.vllm.pipeline_rig import CHUNK_TOKENS, PlayedEngine, played, vllm_config_of

OPEN = RankStatus(frozenset({0}))
DEADLINE_S = 60.0
HIT = (4 * manager_rig.CHUNK_TOKENS, True)


@pytest.fixture
def restarted(tmp_path: Path, keep: Callable[[Matching], Matching]) -> Callable[[], Matching]:
    """A scheduler's half over a slab in which an earlier one has stored four chunks of a request's five."""

    def make() -> Matching:
        Matching(tmp_path, 4, memory=False).close()
        return keep(Matching(tmp_path, 0, memory=False, is_open=False))

    return make


@pytest.fixture
def hanging_slab(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The opening of a slab hangs in the scheduler's half until the test ends."""
    works, open_tier = threading.Event(), serving_tiers.open_tier

    def opening(tier: Any, *arguments: Any) -> Any:
        if tier.kind == "slab":
            works.wait(DEADLINE_S)
        return open_tier(tier, *arguments)

    monkeypatch.setattr(serving_tiers, "CLOSE_S", 0.1)
    monkeypatch.setattr(serving_tiers, "open_tier", opening)
    yield
    works.set()
    for thread in threading.enumerate():
        if thread.name.startswith("nixl-offload-open"):
            thread.join(DEADLINE_S)


def test_a_tier_that_does_not_fit_the_model_is_left_out_where_the_engine_already_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, keep: Callable[[Rig], Rig]
) -> None:
    """In a handshake such a tier ends the start. But a report arrives in a step, which must not end the engine."""
    config = manager_rig.config_of(manager_rig.slab_tier(tmp_path, capacity="8KiB"))
    rig = keep(Rig(config, is_begun=False, is_open=False))
    rig.hear(geometries=dict(enumerate(manager_rig.ranks())))
    until_s = time.monotonic() + DEADLINE_S
    while "capacity" not in caplog.text:
        assert time.monotonic() < until_s
        assert not isinstance(rig.step(), StepMetadata)
        time.sleep(0.01)
    output = rig.manager.prepare_store([manager_rig.key(1)], manager_rig.request())
    assert output is not None
    assert output.keys_to_store == []


def test_a_request_waits_only_so_long(restarted: Callable[[], Matching], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is computed and stores nothing. Later requests hit."""
    asked = restarted()
    assert asked.question() == (None, False)
    asked.step()
    monkeypatch.setattr(serving_tiers, "OPENING_WAIT_S", 0.0)
    assert asked.question() == (0, False)
    output = asked.manager.prepare_store(asked.chunks[4:], manager_rig.request())
    assert output is not None
    assert output.keys_to_store == []
    asked.scheduler.take_geometries({0: manager_rig.ranks()[0]}, is_start=True)  # vLLM wakes up
    asked.hear(ranks={0: OPEN})
    assert asked.question() == HIT


def test_once_a_tier_serves_only_requests_that_another_has_chunks_of_wait(tmp_path: Path) -> None:
    """Here memory does, and ranks are still to open the slab."""
    first = Matching(tmp_path, 4)
    first.write_through()
    first.manager.shutdown()
    asked = Matching(tmp_path, 0, is_open=False)
    asked.arrive("new", range(1000, 1000 + 2 * manager_rig.CHUNK_TOKENS))
    assert [asked.question(), asked.ask("new")] == [(None, False)] * 2, "nothing could be stored yet"
    asked.step()
    asked.hear(ranks={0: OPEN})
    assert [asked.question(), asked.ask("new")] == [(None, False), (0, False)]
    asked.hear(ranks={0: RankStatus(frozenset({0, 1}))})
    assert asked.question() == HIT
    asked.manager.shutdown()


@pytest.mark.parametrize("which", ["nixl-offload-open", "nixl-offload-open-0"])
def test_a_start_survives_a_machine_without_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The handshake raises nothing and waits for nothing; a later step opens the tier."""
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.05)
    start, has_threads = threading.Thread.start, threading.Event()

    def started(thread: threading.Thread) -> None:
        if thread.name == which and not has_threads.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    config = manager_rig.config_of(manager_rig.slab_tier(tmp_path))
    manager = NixlOffloadManager(manager_rig.offloading_config(1), config, manager_rig.vllm_config(1))
    began_s = time.monotonic()
    manager.open(manager_rig.ranks(1))
    assert time.monotonic() - began_s < 5.0
    assert manager.serving.take_places() == {}
    has_threads.set()
    deadline = time.monotonic() + DEADLINE_S
    while not (places := manager.serving.take_places()):
        assert time.monotonic() < deadline
        manager.on_new_request(manager_rig.request())
        time.sleep(0.01)
    assert list(places) == [0]
    manager.shutdown()


def test_a_reset_while_ranks_open_forgets_what_was_stored(restarted: Callable[[], Matching]) -> None:
    asked = restarted()
    asked.manager.reset_cache()
    asked.step()
    asked.hear(ranks={0: OPEN})
    assert asked.question() == (0, False)


# A start does not wait for a large local model to be read


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, no file of a model is read."""
    may_read, read = threading.Event(), serving_tiers.digest_files

    def reading(*arguments: Any, **options: Any) -> Any:
        may_read.wait(DEADLINE_S)
        return read(*arguments, **options)

    monkeypatch.setattr(serving_tiers, "digest_files", reading)
    monkeypatch.setattr(serving_tiers, "NAMING_WAIT_S", 0.1)
    yield may_read
    may_read.set()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def start(model: Path, tmp_path: Path, keep: Callable[[Rig], Rig]) -> Callable[..., Rig]:
    """Starts the scheduler's half of an engine of ``model`` over a slab; its ranks are still to open it."""

    def made(*, tier: dict[str, Any] | None = None, **settings: Any) -> Rig:
        """``settings``: further fields of vLLM's configuration."""
        vllm = manager_rig.vllm_config()
        vars(vllm).update(settings)
        vllm.model_config.model = str(model)
        config = manager_rig.config_of(tier or manager_rig.slab_tier(tmp_path / "kv"))
        return keep(Rig(config, is_open=False, vllm=vllm))

    return made


def ask(rig: Rig) -> None:
    """A request comes, and a step is scheduled. The ranks have nothing more to open."""
    rig.manager.on_new_request(manager_rig.request("new"))
    rig.manager.on_schedule_end(ScheduleEndContext([], []))
    manager_rig.ranks_open(rig.manager)


def lookup(rig: Rig) -> LookupResult:
    return rig.manager.lookup(manager_rig.key(1), manager_rig.request())


def wait_for_readers(*, are_there: bool) -> None:
    """Wait until threads read files for a digest, or none does."""
    until_s = time.monotonic() + DEADLINE_S
    while any(thread.name == "weights-read" for thread in threading.enumerate()) != are_there:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_tiers_open_once_the_weights_are_known(
    start: Callable[..., Rig], tmp_path: Path, unread: threading.Event
) -> None:
    rig = start()
    ask(rig)
    assert rig.offer(1).keys == ()
    assert lookup(rig) is LookupResult.MISS
    assert not list(tmp_path.glob("kv/*/index.table"))
    unread.set()
    manager_rig.wait_for_tiers(rig.manager)
    ask(rig)
    rig.store(1)


@pytest.mark.parametrize("after", ["while the model is read", "before the first request"])
def test_a_reset_before_the_tiers_are_taken_over_holds(
    start: Callable[..., Rig], unread: threading.Event, after: str
) -> None:
    """The weights may have changed while the engine started: chunks of earlier engines must not be served."""
    unread.set()
    rig = start()
    manager_rig.wait_for_tiers(rig.manager)
    manager_rig.ranks_open(rig.manager)
    rig.store(1)
    assert lookup(rig) is LookupResult.HIT
    rig.close()

    unread.clear()
    rig = start()
    if after == "before the first request":
        unread.set()
        manager_rig.wait_for_tiers(rig.manager)
    rig.manager.reset_cache()
    unread.set()
    manager_rig.wait_for_tiers(rig.manager)
    ask(rig)
    assert lookup(rig) is LookupResult.MISS


def test_weights_that_cannot_be_read_turn_offloading_off(
    start: Callable[..., Rig], model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At start, and later."""
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(tmp_path / "gone")
    rig = start()
    ask(rig)
    assert rig.offer(1).keys == ()
    assert "Offloading is off until the engine restarts" in caplog.text
    assert "model.safetensors" in caplog.text


def test_a_capacity_that_does_not_fit_the_model_ends_the_start(start: Callable[..., Rig]) -> None:
    """It is the config that is wrong, and nothing would ever mend it."""
    with pytest.raises(ConfigError, match="too small for this model"):
        start(tier=manager_rig.memory_tier(1))


def test_a_shutdown_ends_the_reading_of_a_file_that_a_setting_names(start: Callable[..., Rig], tmp_path: Path) -> None:
    """And does not wait for it: it would take minutes."""
    with (tmp_path / "scales").open("wb") as scales:
        scales.truncate(1 << 40)
    rig = start(additional_config={"scales": scales.name})
    wait_for_readers(are_there=True)
    rig.close()
    wait_for_readers(are_there=False)


# vLLM's engine core with two ranks, whose opening is slow


PROMPTS = [random.Random(seed).choices(range(512), k=3 * CHUNK_TOKENS + 20) for seed in range(2)]
FULL_TOKENS = [3 * CHUNK_TOKENS] * len(PROMPTS)


class SlowEngine(PlayedEngine):
    """Two ranks, each with some layers. Measures how long its longest step took."""

    longest_step_s = 0.0

    def __init__(self, directory: Path, *nearer: dict[str, Any], last: dict[str, Any] | None = None) -> None:
        shape = ModelShape(layers=12, hidden=64, heads=2, kv_heads=1, intermediate=64, vocab=512, max_tokens=2048)
        model = write_model(directory / "model", shape)
        tiers = [*nearer, last or {"kind": "slab", "path": str(directory / "slab"), "capacity": "64MiB"}]
        stages = ("FFF", "FF")
        config = vllm_config_of(model, stages, {"staging": "8MiB", "tiers": tiers})
        super().__init__(config, stages, is_open=False)
        step = self.core.step_fn

        def measured() -> Any:
            began_s = time.monotonic()
            try:
                return step()
            finally:
                self.longest_step_s = max(self.longest_step_s, time.monotonic() - began_s)

        self.core.step_fn = measured


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, no rank gets its tiers open."""
    gate, open_tier_engine = threading.Event(), rank_tiers.open_tier_engine

    def opening(*arguments: Any) -> Any:
        assert gate.wait(DEADLINE_S)
        return open_tier_engine(*arguments)

    monkeypatch.setattr(rank_tiers, "open_tier_engine", opening)
    with played():
        yield gate
    gate.set()


def test_a_slow_opening_holds_no_step_and_costs_no_hit(tmp_path: Path, gate: threading.Event) -> None:
    gate.set()
    first = SlowEngine(tmp_path)
    first.settle()
    assert first.generate(PROMPTS) == [0, 0]
    first.close()
    gate.clear()
    second = SlowEngine(tmp_path)
    threading.Timer(2.0, gate.set).start()
    assert second.generate(PROMPTS) == FULL_TOKENS
    assert second.longest_step_s < 1.9
    assert second.wrong() == []
    second.close()


def test_an_opening_that_hangs_costs_hits_and_no_more(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered, the engine comes to rest and shuts down, and its slab can be opened again."""
    with monkeypatch.context() as impatient:
        impatient.setattr(serving_tiers, "OPENING_WAIT_S", 0.2)
        impatient.setattr(rank_tiers, "CLOSE_S", 0.1)
        engine = SlowEngine(tmp_path)
        for _ in range(2):
            assert engine.generate(PROMPTS) == [0, 0]
            assert engine.core.reset_prefix_cache()
        assert engine.longest_step_s < 5.0
        assert engine.moved("store") == [0, 0]
        engine.close()
    gate.set()
    again = SlowEngine(tmp_path)
    again.settle()
    assert again.generate(PROMPTS) == [0, 0]
    assert all(again.moved("store"))
    again.close()


@pytest.mark.parametrize("kind", ["slab", "shared_dir"])
@pytest.mark.parametrize(
    ("trouble", "mend"), [("make_read_only", "make_writable"), ("fill", "drain"), ("take_away", "bring_back")]
)
@pytest.mark.parametrize("small_filesystem", [192 << 20], indirect=True)
def test_a_directory_in_trouble_at_start_joins_a_running_engine(
    tmp_path: Path,
    gate: threading.Event,
    small_filesystem: SmallFilesystem,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
    mend: str,
    kind: str,
) -> None:
    """Its filesystem is read-only, full, or not mounted: the engine computes, says so once, and stores and hits when
    that is over.
    """
    gate.set()
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(background, "LONGEST_PAUSE_S", 0.05)
    ours = logging.getLogger("nixl_offload")
    ours.addHandler(caplog.handler)  # so that our plugin leaves the logger as it is
    ours.propagate = False
    drive = tmp_path / "drive"  # points nowhere while the filesystem is not mounted
    drive.symlink_to(small_filesystem.path / "drive")
    drive.readlink().mkdir()
    path = drive / "kv"
    getattr(small_filesystem, trouble)()
    engine = SlowEngine(tmp_path, last={"kind": kind, "path": str(path), "capacity": "64MiB"})
    for _ in range(2):
        assert engine.generate(PROMPTS) == [0, 0]
        engine.reset_prefix_cache()
    getattr(small_filesystem, mend)()
    deadline = time.monotonic() + DEADLINE_S
    while engine.generate(PROMPTS) != FULL_TOKENS:
        assert time.monotonic() < deadline
        engine.reset_prefix_cache()
    assert engine.wrong() == []
    engine.close()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    about_it = [line for line in said if str(path) in line]
    assert about_it
    assert len(about_it) == len(set(about_it)), "each once"


@pytest.mark.usefixtures("hanging_slab")
def test_a_tier_that_hangs_while_it_is_opened_delays_no_other(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the start for longer than ``START_WAIT_S``."""
    gate.set()
    monkeypatch.setattr(serving_tiers, "START_WAIT_S", 0.2)
    engine = SlowEngine(tmp_path, memory("64MiB").tier)
    engine.settle()
    assert engine.generate(PROMPTS) == [0, 0]
    engine.reset_prefix_cache()
    assert engine.generate(PROMPTS) == FULL_TOKENS
    engine.close()
