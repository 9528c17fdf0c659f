"""Proves that streams of a GPU are our own and are reused, and that their threads work on that GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nixl_offload.engine import streams as streams_module
from nixl_offload.engine.streams import CudaDevice, model_on_default_stream


class Played:
    """The parts of torch.Stream, torch.cuda.ExternalStream and torch.Event that our streams use."""

    def __init__(self, first: Any, device: torch.device | None = None) -> None:
        self.handle, self.device = first, device

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def record(self, stream: object) -> None:
        return

    def wait_event(self, event: object) -> None:
        return

    def synchronize(self) -> None:
        """Wait for all work. Tests replace this."""


class Cuda:
    """The part of CUDA's runtime that makes streams. Each thread's device is the first until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self.error = 0, 0
        current = threading.local()
        monkeypatch.setattr(streams_module, "cuda_runtime", lambda: self)
        monkeypatch.setattr(streams_module, "_FREE", {})
        monkeypatch.setattr(torch, "Stream", Played)
        monkeypatch.setattr(torch, "Event", Played)
        monkeypatch.setattr(torch.cuda, "ExternalStream", Played)
        monkeypatch.setattr(torch.cuda, "current_stream", Played)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "index", device.index))

    def cudaStreamCreateWithFlags(self, stream: Any, flags: Any) -> int:  # noqa: N802 - its name
        assert flags.value == 1, "it must not wait for the default stream"
        self.made += 1
        stream._obj.value = 0x1000 + 16 * self.made
        return self.error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def handle_of(stream: Any) -> Any:
    return stream._stream.handle


@pytest.mark.usefixtures("cuda")
def test_a_thread_works_on_the_device_of_its_streams() -> None:
    """A new thread's current device is the first GPU: from there, torch's events make CUDA a context on it, which takes
    memory of the first GPU for every rank that works on another.
    """
    device = CudaDevice(torch.device("cuda", 3))
    stream, model = device.new_stream(), device.compute_fence()
    found: list[int] = []

    def drive() -> None:
        stream.run(lambda: found.append(torch.cuda.current_device()), model)
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join()
    assert set(found) == {3}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("broken", ["wait_event", "__enter__", "record"])
def test_when_a_call_fails_nothing_that_it_queued_is_under_way_any_more(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA may be out of memory after half the work. Slots and blocks then get new owners, and a late copy must not
    write to them.
    """
    device, order = CudaDevice(torch.device("cuda", 0)), list[str]()
    stream, model = device.new_stream(), device.compute_fence()

    def fails(*_: object) -> None:
        order.append("failed")
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Played, broken, fails)
    monkeypatch.setattr(Played, "synchronize", lambda _: order.append("waited"))
    with pytest.raises(RuntimeError, match="out of memory"):
        stream.run(lambda: None, model)
    assert order == ["failed", "waited"]


def test_streams_are_lent_again_and_never_destroyed(cuda: Cuda) -> None:
    """Reopening tiers takes no more streams than opening them once. Streams of another GPU are not reused."""
    for _ in range(50):
        devices = [CudaDevice(torch.device("cuda", number)) for number in (0, 1)]
        made = [device.new_stream() for device in devices for _ in range(3)]
        handles = [handle_of(stream) for stream in made]
        assert len(set(handles)) == 6
        assert not set(handles[:3]) & set(streams_module._FREE.get(1, ()))
        del made
    assert cuda.made == 6
    assert {number: len(handles) for number, handles in streams_module._FREE.items()} == {0: 3, 1: 3}


def test_without_streams_of_our_own_torchs_are_taken(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once. They may be slower, but nothing fails."""
    streams_module._complain.cache_clear()
    cuda.error = 2
    device = torch.device("cuda", 0)
    assert [handle_of(CudaDevice(device).new_stream()) for _ in range(3)] == [device] * 3
    assert caplog.text.count("No CUDA streams of our own (error 2") == 1


@pytest.mark.parametrize(("handle", "is_default"), [(0, True), (2, False), (0x7F00, False)])
def test_a_model_on_the_default_stream_is_noticed(
    monkeypatch: pytest.MonkeyPatch, handle: int, is_default: bool
) -> None:
    """CUDA's default stream is 0; 2 is the per-thread default stream."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=handle))
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    assert model_on_default_stream(tensor) is is_default  # type: ignore[arg-type]
    assert not model_on_default_stream(torch.empty(1))
