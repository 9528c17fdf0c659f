"""Proves that streams of a GPU are our own, lent and lent again, and that their threads work on that GPU."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nixl_offload.engine import streams as streams_module
from nixl_offload.engine.streams import CudaStreams, model_on_default_stream


class _Recorded:
    """As much of torch.Stream and torch.Event as a stream of ours uses."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> _Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def record(self, stream: object) -> None:
        return

    def wait_event(self, event: object) -> None:
        return


@pytest.mark.parametrize("first", ["run", "wait", "record"])
def test_a_thread_works_on_the_device_of_its_streams(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """A new thread's current device is the first GPU: from there, torch's events make CUDA a context on it, which takes
    memory of the first GPU for every rank that works on another.
    """
    current = threading.local()
    monkeypatch.setattr(torch, "Stream", _Recorded)
    monkeypatch.setattr(torch, "Event", _Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", _Recorded)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "index", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "index", device.index))
    streams = CudaStreams(torch.device("cuda", 3))
    stream, model = streams.new(), streams.compute_fence()
    found: list[int] = []

    def drive() -> None:
        if first == "run":
            stream.run(lambda: found.append(torch.cuda.current_device()))
        elif first == "wait":
            stream.wait(model)
        else:
            stream.record()
        found.append(torch.cuda.current_device())

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join()
    assert set(found) == {3}


class PlayedRuntime:
    """CUDA's runtime, as far as it makes streams."""

    def __init__(self, error: int = 0) -> None:
        self.flags: list[int] = []
        self._error = error

    def cudaStreamCreateWithFlags(self, stream: Any, flags: Any) -> int:  # noqa: N802 - its name
        self.flags.append(flags.value)
        stream._obj.value = 0x1000 + 16 * len(self.flags)
        return self._error


class _External(_Recorded):
    def __init__(self, handle: int, device: torch.device) -> None:
        super().__init__(device)
        self.handle = handle


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedRuntime:
    """As much of CUDA as makes streams; the calling thread's device is the one that is asked for."""
    runtime = PlayedRuntime()
    monkeypatch.setattr(streams_module, "cuda_runtime", lambda: runtime)
    monkeypatch.setattr(streams_module, "_FREE", {})
    monkeypatch.setattr(torch.cuda, "ExternalStream", _External)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "Stream", _Recorded)
    return runtime


def handle_of(stream: Any) -> int:
    handle: int = stream._stream.handle
    return handle


def test_streams_are_lent_again_and_never_destroyed(cuda: PlayedRuntime) -> None:
    """Tiers that are opened again and again take no more streams than at once; another GPU's are not theirs."""
    for _ in range(50):
        devices = [CudaStreams(torch.device("cuda", number)) for number in (0, 1)]
        made = [streams.new() for streams in devices for _ in range(3)]
        handles = [handle_of(stream) for stream in made]
        assert len(set(handles)) == 6
        assert not set(handles[:3]) & set(streams_module._FREE.get(1, ()))
        del made
    assert len(cuda.flags) == 6
    assert {number: len(handles) for number, handles in streams_module._FREE.items()} == {0: 3, 1: 3}


def test_without_streams_of_our_own_torchs_are_taken(
    cuda: PlayedRuntime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; slower, perhaps, but no reason to end anything."""
    streams_module._complain.cache_clear()
    cuda._error = 2
    streams = CudaStreams(torch.device("cuda", 0))
    assert all(type(streams.new()._stream) is _Recorded for _ in range(3))  # type: ignore[attr-defined]
    assert caplog.text.count("No CUDA streams of our own (error 2") == 1

    def missing() -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(streams_module, "cuda_runtime", missing)
    assert type(streams.new()._stream) is _Recorded  # type: ignore[attr-defined]
    assert caplog.text.count("cannot open shared object file") == 1


@pytest.mark.parametrize(("handle", "is_default"), [(0, True), (2, False), (0x7F00, False)])
def test_a_model_on_the_default_stream_is_noticed(
    monkeypatch: pytest.MonkeyPatch, handle: int, is_default: bool
) -> None:
    """CUDA's is 0; 2 is the one of its own that a thread may have as default."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=handle))
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    assert model_on_default_stream(tensor) is is_default  # type: ignore[arg-type]
    assert not model_on_default_stream(torch.empty(1))
