"""Proves that what a stream runs may write to tensors that vLLM made in torch's inference mode, from any thread."""

from __future__ import annotations

import threading

import pytest
import torch

from nixl_offload.engine.streams import CudaStreams, HostStreams, Stream
from tests.unit.device_rig import ThreadedStreams


def _written_from_elsewhere(stream: Stream) -> torch.Tensor:
    with torch.inference_mode():
        cache = torch.zeros(8)
    errors: list[BaseException] = []

    def update() -> None:
        cache.index_copy_(0, torch.tensor([2]), torch.ones(1))

    def write() -> None:
        try:
            stream.run(update)
            stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return cache


def test_a_host_stream() -> None:
    """Outside of it torch refuses: in-place updates of such tensors, from a thread that is not in the mode."""
    with torch.inference_mode():
        cache = torch.zeros(8)
    with pytest.raises(RuntimeError, match="outside InferenceMode"):
        cache.add_(1)
    assert _written_from_elsewhere(HostStreams().new())[2] == 1


def test_an_emulated_stream() -> None:
    """As the real ones do, or the emulation would prove nothing."""
    with ThreadedStreams() as streams:
        assert _written_from_elsewhere(streams.new())[2] == 1


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
