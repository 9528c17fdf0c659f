"""Proves on a GPU that copy streams are our own and do not wait for the default stream; with two GPUs, that a rank on
the second takes no memory on the first.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from nixl_offload.engine.streams import Stream, device_of, model_on_default_stream
from tests.unit.device_rig import settled

pytestmark = pytest.mark.gpu

LONG_CYCLES = 1_500_000_000
"""Most of a second."""

PUMP = """
import threading
import torch
from nixl_offload.engine.streams import device_of

torch.cuda.set_device(1)
device = device_of(torch.zeros(8, device="cuda:1"))
stream, model = device.new_stream(), device.compute_fence()

def drive():
    fence = stream.run(lambda: None, model)
    while not fence.done():
        pass

thread = threading.Thread(target=drive)
thread.start()
thread.join()
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0), "a context on the first GPU"
"""


def test_a_thread_of_the_second_gpu_makes_no_context_on_the_first() -> None:
    """Contexts of eight ranks would take gigabytes there, which vLLM has not planned for."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    done = subprocess.run([sys.executable, "-c", PUMP], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def handle_of(stream: Any) -> int:
    handle: int = stream._stream.cuda_stream
    return handle


def test_streams_are_our_own() -> None:
    """They are not among the 32 that torch hands out in turn, and are reused after their release."""
    device = device_of(torch.empty(0, device="cuda"))
    torchs = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    made = [device.new_stream() for _ in range(40)]
    handles = {handle_of(stream) for stream in made}
    assert len(handles) == 40
    assert not handles & torchs
    del made
    gc.collect()
    again = [device.new_stream() for _ in range(40)]
    assert {handle_of(stream) for stream in again} == handles


def test_work_waits_for_its_fence_and_page_locked_memory_outlives_streams() -> None:
    """When page-locked memory is freed, torch records events on the streams that used it: they must still exist."""
    source, target = torch.arange(1 << 20, dtype=torch.int32).pin_memory(), torch.empty(1 << 20, dtype=torch.int32)
    target = target.pin_memory()
    device = device_of(torch.empty(0, device="cuda"))
    there, back = device.new_stream(), device.new_stream()
    on_device = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    uploaded = there.run(partial(on_device.copy_, source, non_blocking=True))
    settled(back.run(partial(target.copy_, on_device, non_blocking=True), uploaded))
    assert torch.equal(source, target)
    del there, back
    gc.collect()
    del source, target
    torch.empty(1 << 20, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()


def test_copy_streams_do_not_wait_for_the_default_stream() -> None:
    """If a model runs on the default stream (eager, on one rank), copies still run in parallel."""
    device = torch.device("cuda", torch.cuda.current_device())
    stream: Stream = device_of(torch.empty(0, device=device)).new_stream()
    buffer = torch.zeros(8, device=device)
    stream.run(lambda: buffer.add_(1))  # compiles or loads the kernel once
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        torch.cuda._sleep(LONG_CYCLES)
        model = torch.cuda.Event()
        model.record()
    settled(stream.run(lambda: buffer.add_(1)))
    assert not model.query(), "the copy waited for the default stream"


def test_a_model_on_the_default_stream_is_noticed() -> None:
    """Tests use another stream, as vLLM does with CUDA graphs or several ranks."""
    tensor = torch.empty(1, device="cuda")
    assert not model_on_default_stream(tensor)
    with torch.cuda.stream(torch.cuda.default_stream()):
        assert model_on_default_stream(tensor)
