"""Checksums computed by torch on a GPU are the library's."""

from __future__ import annotations

import pytest

from tests.unit.checksum_rig import assert_agreement_at_every_length, assert_agreement_on_rows_not_packed

pytestmark = pytest.mark.gpu


def test_torch_and_library_agree() -> None:
    """Whatever the length."""
    assert_agreement_at_every_length("cuda")


def test_torch_reads_rows_that_are_not_packed() -> None:
    """Unaligned, apart from each other, or slices of wider rows."""
    assert_agreement_on_rows_not_packed("cuda")
