"""Payloads in host memory whose checksums are wanted: summed by the device, on the way to it, or else by the host.

What comes from storage through host memory has to cross the bus anyway, so it is brought to scratch memory of the
device, summed there, compared by the host, and scattered from there: it crosses once, and no core reads it.

Threading: the pump's thread; on a device the sums are queued and answered by a fence. Ownership: scratch lives as long
as anybody refers to ``DeviceRows`` of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from nixl_offload.chunk.checksum import payload_checksums
from nixl_offload.engine.streams import Fence

Payload = npt.NDArray[np.uint8]
"""Shape (blocks, block_bytes); contiguous."""
BlockIds = npt.NDArray[np.int32]
Parts = Sequence[tuple[BlockIds, Payload]]
"""The chunks of one call: which KV blocks, and where their bytes lie."""
Checksums = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Blocks of one payload in the device's scratch; slices like an array of rows."""

    scratch: OnDevice
    begin: int
    count: int

    def __getitem__(self, rows: slice) -> DeviceRows:
        """Return some of the rows, one after the other."""
        begin, end, _ = rows.indices(self.count)
        return DeviceRows(self.scratch, self.begin + begin, max(0, end - begin))

    def tensor(self) -> torch.Tensor:
        """Return the rows; the scratch must be done."""
        memory = self.scratch.memory
        assert memory is not None
        return memory[self.begin : self.begin + self.count]


ScatterSource = Payload | DeviceRows
"""Where blocks can be scattered from."""
ScatterParts = Sequence[tuple[BlockIds, ScatterSource]]
"""``Parts`` of a scatter, of which some may be on the device already."""


class Summed(Fence, Protocol):
    """Payloads that are, or will be, summed. Until ``done`` nothing may change them."""

    by_device: bool
    """The checksums are made by the time that it is ``done``, whether they are asked for or not."""

    def values(self) -> list[Checksums]:
        """Return the checksums of each payload's blocks. Takes the host's time where the host sums, for it does so now.

        Raises RuntimeError before ``done``.
        """

    def rows(self) -> list[ScatterSource]:
        """Return each payload, where it can be scattered from once it is ``done``."""


class SummedByHost:
    """Implements ``Summed``: the host sums when asked, once ``fence`` is passed."""

    by_device = False

    def __init__(self, fence: Fence, payloads: Sequence[Payload]) -> None:
        self._fence = fence
        self._payloads = payloads

    def done(self) -> bool:
        return self._fence.done()

    def values(self) -> list[Checksums]:
        if not self._fence.done():
            raise RuntimeError("checksums were asked for before their bytes were there")
        return payload_checksums(self._payloads)

    def rows(self) -> list[ScatterSource]:
        return list(self._payloads)


class OnDevice:
    """Implements ``Summed``. Whoever makes it queues the work that fills ``memory``, and ``host`` with the sums, and
    sets ``fence``.
    """

    by_device = True

    def __init__(self, payloads: Sequence[Payload], host: torch.Tensor) -> None:
        self.bytes = sum(payload.nbytes for payload in payloads)
        self.host = host
        """int64, one for each block."""
        self.memory: torch.Tensor | None = None
        """The rows, shape (blocks, block_bytes); None where they are not kept."""
        self.fence: Fence | None = None
        self._payloads = payloads

    def done(self) -> bool:
        return self.fence is not None and self.fence.done()

    def values(self) -> list[Checksums]:
        if not self.done():
            raise RuntimeError("checksums were asked for before the device had them")
        words: npt.NDArray[np.int64] = self.host.numpy()
        ends = np.cumsum([len(payload) for payload in self._payloads])
        return np.split(words.view(np.uint64), ends[:-1]) if len(ends) else []

    def rows(self) -> list[ScatterSource]:
        if self.memory is None:
            return list(self._payloads)
        found: list[ScatterSource] = []
        begin = 0
        for payload in self._payloads:
            found.append(DeviceRows(self, begin, len(payload)))
            begin += len(payload)
        return found
