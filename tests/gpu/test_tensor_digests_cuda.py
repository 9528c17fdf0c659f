"""Proves on a GPU: weights are summed as on the host, and every byte counts."""

from __future__ import annotations

import pytest
import torch

from nixl_offload.vllm.rank_identity import make_factors, piece_sums, weights_digest

pytestmark = pytest.mark.gpu


def test_sums_on_a_device_are_those_of_the_host() -> None:
    """Several pieces, the last one not a whole number of words, and a tensor at an unaligned address."""
    factors = make_factors(1024)
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    for tensor in (values, values[1:]):
        on_device = [int(each) for each in piece_sums(tensor.cuda(), factors.cuda())]
        assert on_device == [int(each) for each in piece_sums(tensor, factors)]


def test_any_value_on_a_device_counts() -> None:
    layer = torch.nn.Linear(4096, 1030, dtype=torch.bfloat16, device="cuda")
    right = weights_digest([layer])
    assert weights_digest([layer]) == right
    for row, column in ((0, 0), (513, 2048), (1029, 4095)):
        with torch.no_grad():
            kept = layer.weight[row, column].clone()
            layer.weight[row, column] = 2.0
            assert weights_digest([layer]) != right
            layer.weight[row, column] = kept
    assert weights_digest([layer]) == right
