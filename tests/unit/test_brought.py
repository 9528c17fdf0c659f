"""Proves of payloads that are summed by the host or by a device: what is known of them when, which rows are whose, and
from where they can be scattered.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nixl_offload.chunk.checksum import block_checksums
from nixl_offload.engine.brought import Checksums, DeviceRows, OnDevice, Payload, SummedByHost

WIDTH = 64
COUNTS = (3, 1, 4)


class Gate:
    """A fence that is passed when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed


def payloads(*counts: int) -> list[Payload]:
    rng = np.random.default_rng(len(counts))
    return [rng.integers(0, 256, (count, WIDTH), dtype=np.uint8) for count in counts]


def sums_of(each: list[Payload]) -> list[Checksums]:
    return [block_checksums(payload) for payload in each]


def same(found: list[Checksums], wanted: list[Checksums]) -> bool:
    return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))


def test_the_host_sums_what_is_there_when_it_is_asked() -> None:
    """Until then bytes may change: a device may be copying them."""
    fence, given = Gate(), payloads(*COUNTS)
    summed = SummedByHost(fence, given)
    assert not summed.by_device
    assert not summed.done()
    with pytest.raises(RuntimeError, match="before their bytes were there"):
        summed.values()
    given[1][:] = 7
    fence.passed = True
    assert summed.done()
    assert same(summed.values(), sums_of(given))
    assert [row is payload for row, payload in zip(summed.rows(), given, strict=True)] == [True] * 3


@pytest.mark.parametrize("counts", [COUNTS, (5,), ()])
def test_a_devices_sums_are_each_payloads_own_once_they_are_there(counts: tuple[int, ...]) -> None:
    given = payloads(*counts)
    summed = OnDevice(given, torch.zeros(sum(counts), dtype=torch.int64))
    assert summed.by_device
    assert summed.bytes == sum(counts) * WIDTH
    fence = Gate()
    for sets_fence in (False, True):
        if sets_fence:
            summed.fence = fence
        assert not summed.done()
        with pytest.raises(RuntimeError, match="before the device had them"):
            summed.values()
    wanted = sums_of(given)
    summed.host.numpy().view(np.uint64)[:] = np.concatenate([np.empty(0, np.uint64), *wanted])
    fence.passed = True
    assert summed.done()
    assert same(summed.values(), wanted)


def test_rows_are_scattered_from_the_device_if_it_keeps_them_else_from_the_host() -> None:
    given = payloads(*COUNTS)
    summed = OnDevice(given, torch.zeros(8, dtype=torch.int64))
    assert [row is payload for row, payload in zip(summed.rows(), given, strict=True)] == [True] * 3
    summed.memory = torch.from_numpy(np.concatenate(given))
    rows = summed.rows()
    assert len(rows) == 3
    for row, payload in zip(rows, given, strict=True):
        assert isinstance(row, DeviceRows)
        assert np.array_equal(row.tensor().numpy(), payload)


@pytest.mark.parametrize(
    "part", [slice(None), slice(1, 3), slice(2, None), slice(None, -1), slice(2, 2), slice(3, 1), slice(0, 99)]
)
def test_rows_on_a_device_are_sliced_as_an_array_is(part: slice) -> None:
    given = payloads(*COUNTS)
    summed = OnDevice(given, torch.zeros(8, dtype=torch.int64))
    summed.memory = torch.from_numpy(np.concatenate(given))
    last = summed.rows()[2]
    assert isinstance(last, DeviceRows)
    assert np.array_equal(last[part].tensor().numpy(), given[2][part])
    assert np.array_equal(last[1:][part].tensor().numpy(), given[2][1:][part]), "of a part, too"
    assert np.array_equal(last[part][0:1].tensor().numpy(), given[2][part][0:1])
