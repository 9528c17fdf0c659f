"""A start does not wait for a large local model to be read: the tiers open in a later step, and until then every
lookup is a miss. No error on the way ends the engine. A tier that cannot be opened is tried again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

from nixl_offload.errors import ConfigError
from nixl_offload.vllm import serving_tiers
from nixl_offload.vllm.manager import NixlOffloadManager
from nixl_offload.vllm.messages import TicketReport, TicketSpec
from tests.vllm import manager_rig

DEADLINE_S = 30.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, nothing is read of any model."""
    gate, real = threading.Event(), serving_tiers.digest_files

    def gated(*arguments: Any, **options: Any) -> Any:
        gate.wait(DEADLINE_S)
        return real(*arguments, **options)

    monkeypatch.setattr(serving_tiers, "digest_files", gated)
    monkeypatch.setattr(serving_tiers, "NAMING_WAIT_S", 0.1)
    yield gate
    gate.set()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def manager_of(model: Path, path: Path, **settings: Any) -> NixlOffloadManager:
    """``settings``: further fields of vLLM's configuration."""
    vllm_config: Any = manager_rig.vllm_config()
    vars(vllm_config).update(settings)
    vllm_config.model_config.model = str(model)
    config = manager_rig.config_of(manager_rig.slab_tier(path))
    return NixlOffloadManager(manager_rig.offloading_config(), config, vllm_config)


def ask(manager: NixlOffloadManager) -> None:
    """A request comes, and a step is scheduled."""
    manager.on_new_request(manager_rig.request("new"))
    manager.on_schedule_end(ScheduleEndContext([], []))


def stored(manager: NixlOffloadManager, *numbers: int) -> tuple[bytes, ...]:
    """Offer chunks; return those that are taken. The ranks have nothing to open."""
    manager_rig.ranks_open(manager)
    output = manager.prepare_store(manager_rig.keys(*numbers), manager_rig.request())
    assert output is not None
    assert isinstance(output.store_spec, TicketSpec)
    return output.store_spec.ticket.keys


def wait_for_readers(*, are_there: bool) -> None:
    """Wait until threads read files for a digest, or none does."""
    until_s = time.monotonic() + DEADLINE_S
    while any(thread.name.startswith("weights-read-") for thread in threading.enumerate()) != are_there:
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_tiers_open_once_the_weights_are_known(model: Path, tmp_path: Path, gate: threading.Event) -> None:
    manager = manager_of(model, tmp_path / "kv")
    manager.open(manager_rig.ranks())
    ask(manager)
    assert stored(manager, 1) == ()
    assert manager.lookup(manager_rig.key(1), manager_rig.request()) is LookupResult.MISS
    assert not list(tmp_path.glob("kv/*/index.sqlite"))
    manager.open(manager_rig.ranks())  # vLLM wakes up, meanwhile

    gate.set()
    manager_rig.wait_for_tiers(manager)
    ask(manager)
    assert stored(manager, 1) == tuple(manager_rig.keys(1))
    manager.shutdown()


@pytest.mark.parametrize("after", ["while the model is read", "before the first request"])
def test_a_reset_before_the_tiers_are_taken_over_holds(
    model: Path, tmp_path: Path, gate: threading.Event, after: str
) -> None:
    """The weights may have changed while the engine started: chunks of earlier engines must not be served."""
    key, request = manager_rig.key(1), manager_rig.request()
    gate.set()
    manager = manager_of(model, tmp_path / "kv")
    manager.open(manager_rig.ranks())
    manager_rig.wait_for_tiers(manager)
    manager_rig.ranks_open(manager)
    output = manager.prepare_store([key], request)
    assert output is not None
    assert isinstance(output.store_spec, TicketSpec)
    manager.settle({output.store_spec.ticket.ticket: TicketReport(1, {})})
    assert manager.lookup(key, request) is LookupResult.HIT
    manager.shutdown()

    gate.clear()
    manager = manager_of(model, tmp_path / "kv")
    manager.open(manager_rig.ranks())
    if after == "before the first request":
        gate.set()
        manager_rig.wait_for_tiers(manager)
    manager.reset_cache()
    gate.set()
    manager_rig.wait_for_tiers(manager)
    ask(manager)
    manager_rig.ranks_open(manager)
    assert manager.lookup(key, request) is LookupResult.MISS
    manager.shutdown()


def test_weights_that_cannot_be_read_turn_offloading_off(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At start, and later."""
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(tmp_path / "gone")
    manager = manager_of(model, tmp_path / "kv")
    manager.open(manager_rig.ranks())
    ask(manager)
    assert stored(manager, 1) == ()
    assert "Offloading is off until the engine restarts" in caplog.text
    assert "model.safetensors" in caplog.text
    manager.shutdown()


def test_a_capacity_that_does_not_fit_the_model_ends_the_start(model: Path) -> None:
    """It is the config that is wrong, and nothing would ever mend it."""
    vllm_config: Any = manager_rig.vllm_config()
    vllm_config.model_config.model = str(model)
    config = manager_rig.config_of(manager_rig.memory_tier(1))
    manager = NixlOffloadManager(manager_rig.offloading_config(), config, vllm_config)
    with pytest.raises(ConfigError, match="too small for this model"):
        manager.open(manager_rig.ranks())
    manager.shutdown()


def test_a_shutdown_does_not_wait_for_weights(model: Path, tmp_path: Path, gate: threading.Event) -> None:
    manager = manager_of(model, tmp_path / "kv")
    manager.open(manager_rig.ranks())
    manager.shutdown()
    assert not gate.is_set()


def test_a_shutdown_ends_the_reading_of_a_file_that_a_setting_names(model: Path, tmp_path: Path) -> None:
    """It would take minutes."""
    with (tmp_path / "scales").open("wb") as scales:
        scales.truncate(1 << 40)
    manager = manager_of(model, tmp_path / "kv", additional_config={"scales": scales.name})
    manager.open(manager_rig.ranks())
    wait_for_readers(are_there=True)
    manager.shutdown()
    wait_for_readers(are_there=False)
