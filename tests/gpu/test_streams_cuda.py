"""Proves on a machine with two GPUs that a rank on the second one takes no memory of the first."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

PUMP = """
import threading
import torch
from nixl_offload.engine.streams import device_of

torch.cuda.set_device(1)
device = device_of(torch.zeros(8, device="cuda:1"))
stream, model = device.streams.new(), device.streams.compute_fence()

def drive():
    stream.wait(model)
    stream.run(lambda: None)
    fence = stream.record()
    while not fence.done():
        pass

thread = threading.Thread(target=drive)
thread.start()
thread.join()
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0), "a context on the first GPU"
"""


def test_a_thread_of_the_second_gpu_makes_no_context_on_the_first() -> None:
    """Eight ranks would take some gigabytes of it, beside what vLLM has reckoned with."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    done = subprocess.run([sys.executable, "-c", PUMP], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
