"""Tests on a GPU run as vLLM's model does: on a stream of their own, not on CUDA's default stream.

What other libraries put on streams of the common kind waits for the default stream, and that for them: KvikIO's copies
would wait for a busy model of themselves, and a gate that is missing would be missed by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_runtest_logfinish() -> None:
    """End the process when a test has left the device's context broken: in it nothing works any more."""
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
