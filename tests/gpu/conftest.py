"""GPU tests run on their own stream, as vLLM's model does, not on CUDA's default stream.

Ordinary streams of other libraries and the default stream wait for each other. So on the default stream KvikIO's copies
would wait for a busy model by themselves, and no test would notice a missing fence.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_runtest_logfinish() -> None:
    """End the process if a test has broken the device's context, in which nothing works any more."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"the device's context is broken: {error}", returncode=70)


@pytest.fixture(autouse=True)
def _model_stream() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
