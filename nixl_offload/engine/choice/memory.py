"""Memory to measure with: images of chunks in device memory and in host memory, and a header page for each.

Threading: none; belongs to the one thread that measures.
"""

from __future__ import annotations

import os
import random
from typing import Final

import numpy as np
import torch

from nixl_offload.engine.choice.base import Shape
from nixl_offload.engine.streams import Device, Stream
from nixl_offload.errors import NixlOffloadError
from nixl_offload.movers.base import Extents, MemoryKind, MemoryRegion
from nixl_offload.movers.select import SCRATCH_BYTES
from nixl_offload.types import PAGE_BYTES

_TILE_BYTES: Final = 1 << 20


class NoRoomError(NixlOffloadError):
    """There is not the memory or the disk space to measure with."""


class TrialMemory:
    """``images`` of ``image_bytes`` each. Device memory is given back when the last reference goes."""

    def __init__(self, device: Device, shape: Shape, images: int, image_bytes: int, *, host: bool = True) -> None:
        """Take half as many images as long as memory is short. Raises NoRoomError when not even one finds room.

        ``host``: whether images go by host memory as well; else there is room for one there.
        """
        self._host = host
        self.device = device
        self.image_bytes = image_bytes
        payload_bytes = image_bytes - PAGE_BYTES
        self.piece_bytes = min(shape.piece_bytes, payload_bytes)
        self._pieces = -(-payload_bytes // self.piece_bytes) if self.piece_bytes else 0
        while True:
            try:
                self._allocate(images)
                break
            except NoRoomError:
                if images == 1:
                    raise
                images //= 2
        self.images = images
        self._cells = list(range(images * self._pieces))
        random.Random(0).shuffle(self._cells)
        self._fill()

    @property
    def device_region(self) -> MemoryRegion:
        """Where images are packed, and pieces lie scattered."""
        return MemoryRegion(self.on_device.data_ptr(), self.on_device.numel(), self.device.kind, self.device.number)

    @property
    def host_region(self) -> MemoryRegion:
        """Page-locked where the device has a bus."""
        return MemoryRegion(self.on_host.data_ptr(), self.on_host.numel(), MemoryKind.DRAM)

    @property
    def header_region(self) -> MemoryRegion:
        """A page for each image."""
        return MemoryRegion(self.headers.data_ptr(), self.headers.numel(), MemoryKind.DRAM)

    def image_of(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """Return an image's place in ``on_device`` or ``on_host``."""
        return tensor[number * self.image_bytes : (number + 1) * self.image_bytes]

    def pieces_of(self, number: int) -> tuple[Extents, Extents]:
        """Return where an image's pieces lie in device memory, far from one another, and where they go in the file."""
        begin, end = number * self.image_bytes + PAGE_BYTES, (number + 1) * self.image_bytes
        in_file = np.arange(begin, end, self.piece_bytes, dtype=np.int64)
        lengths = np.minimum(end - in_file, self.piece_bytes)
        cells = np.array(self._cells[number * self._pieces : (number + 1) * self._pieces], dtype=np.int64)
        return np.stack([cells * self.piece_bytes, lengths], axis=1), np.stack([in_file, lengths], axis=1)

    def _allocate(self, images: int) -> None:
        device, host = self.device.torch_device, torch.device("cpu")
        page_locked = device.type == "cuda"
        device_bytes = images * max(self.image_bytes, self._pieces * self.piece_bytes)
        self.on_device = aligned_tensor(max(device_bytes, SCRATCH_BYTES), device)
        self.on_host = aligned_tensor((images if self._host else 1) * self.image_bytes, host, page_locked=page_locked)
        self.headers = aligned_tensor(images * PAGE_BYTES, host, page_locked=page_locked)

    def _fill(self) -> None:
        """Put something there that does not compress, for some filesystems do, and have all pages present."""
        tile = torch.frombuffer(bytearray(os.urandom(min(_TILE_BYTES, len(self.on_host)))), dtype=torch.uint8)
        for target in self.on_host.split_with_sizes(_pieces(len(self.on_host), len(tile))):
            target.copy_(tile[: len(target)])
        self.headers.zero_()
        source = self.on_host[: len(tile)]
        stream = self.device.streams.new()
        for target in self.on_device.split_with_sizes(_pieces(len(self.on_device), len(tile))):
            queue_copy(stream, target, source[: len(target)])
        stream.synchronize()


def _pieces(whole: int, piece: int) -> list[int]:
    return [min(piece, whole - begin) for begin in range(0, whole, piece)]


def queue_copy(stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in the order of ``stream``."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    stream.run(copy)


def aligned_tensor(length_bytes: int, device: torch.device, *, page_locked: bool = False) -> torch.Tensor:
    """Return ``length_bytes`` that begin at a page. Raises NoRoomError."""
    try:
        tensor = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, device=device, pin_memory=page_locked)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        why = str(error).partition("\n")[0]
        raise NoRoomError(f"no {length_bytes >> 20} MiB of memory on {device}: {why}") from error
    start = -tensor.data_ptr() % PAGE_BYTES
    return tensor[start : start + length_bytes]
