"""Tests on a GPU run as vLLM's model does: on a stream of their own, not on CUDA's default stream.

What other libraries put on streams of the common kind waits for the default stream, and that for them: KvikIO's copies
would wait for a busy model of themselves, and a gate that is missing would be missed by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _model_stream() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
