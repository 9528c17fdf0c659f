"""The memory that mover suites use on a GPU."""

from __future__ import annotations

import pytest

from tests.unit.test_gpu_script import assert_memory_is_read_back

pytestmark = pytest.mark.gpu


def test_memory_that_torch_allocates() -> None:
    """What is written is read back, whole and in part; it lies where the region says, on a GPU's page."""
    assert_memory_is_read_back("cuda")
