"""Proves that what a stream runs may write to tensors that vLLM made in torch's inference mode, from any thread."""

from __future__ import annotations

import threading

import pytest
import torch

from nixl_offload.engine.streams import HostStreams, Stream
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
