"""What is measured with: a scratch file in the tier's directory, and images of chunks in device and host memory.

Threading: one thread, the one that measures. Files are called ``.mover-choice-<random>.scratch``: a tree does not list
them, and slabs count them as small files of their own (``tiers.slab.other_namespaces``).
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from nixl_offload.engine.autotune.candidates import Shape
from nixl_offload.engine.streams import Device, Stream
from nixl_offload.errors import NixlOffloadError
from nixl_offload.movers.base import Extents, MemoryKind, MemoryRegion
from nixl_offload.movers.select import SCRATCH_BYTES
from nixl_offload.tiers.slab.other_namespaces import MOVER_CHOICE_PREFIX
from nixl_offload.types import PAGE_BYTES

_LEFT_S: Final = 300.0
"""Scratch files that still have a name after so long were left by a process that was killed."""
_LEFTOVER: Final = re.compile(
    re.escape(MOVER_CHOICE_PREFIX) + r"-[0-9a-f-]+\.(?:scratch|tmp)|\.mover-probe-[a-z0-9_]{8}"
)
_TILE_BYTES: Final = 1 << 20


class NoRoomError(NixlOffloadError):
    """There is not the memory or the disk space to measure with."""


def new_scratch_path(directory: str) -> str:
    """Return a name that nobody uses."""
    return os.path.join(directory, f"{MOVER_CHOICE_PREFIX}-{secrets.token_hex(8)}.scratch")


@contextlib.contextmanager
def scratch_file(directory: str) -> Iterator[tuple[int, str]]:
    """A private, empty file: its descriptor, which is not for direct I/O, and its name. Raises OSError."""
    path = new_scratch_path(directory)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd, path
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_leftovers(directory: str) -> None:
    """Remove scratch files of processes that were killed. Several ranks may do so at once."""
    now_s = time.time()
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if _LEFTOVER.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if now_s - entry.stat(follow_symlinks=False).st_mtime > _LEFT_S:
                        os.unlink(entry.path)


class TrialMemory:
    """``images`` of ``image_bytes`` each, on the device, and in host memory as well where ``host``; a header page each.

    Device memory is given back when the last reference goes.
    """

    def __init__(self, device: Device, shape: Shape, images: int, image_bytes: int, *, host: bool = True) -> None:
        """Take half as many images as long as memory is short. Raises NoRoomError when not even one finds room."""
        self.device = device
        self.image_bytes = image_bytes
        payload_bytes = image_bytes - PAGE_BYTES
        self.piece_bytes = min(shape.piece_bytes, payload_bytes)
        self._pieces = -(-payload_bytes // self.piece_bytes) if self.piece_bytes else 0
        while True:
            try:
                self._allocate(images, host=host)
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

    def copy(self, stream: Stream, number: int, *, to_host: bool) -> None:
        """Copy an image over the bus, in the order of ``stream``."""
        begin, end = number * self.image_bytes, (number + 1) * self.image_bytes
        ends = self.on_host[begin:end], self.on_device[begin:end]
        target, source = ends if to_host else ends[::-1]
        stream.run(lambda: _copy(target, source))

    def pieces_of(self, number: int) -> tuple[Extents, Extents]:
        """Return where an image's pieces lie in device memory, far from one another, and where they go in the file."""
        begin, end = number * self.image_bytes + PAGE_BYTES, (number + 1) * self.image_bytes
        in_file = np.arange(begin, end, self.piece_bytes, dtype=np.int64)
        lengths = np.minimum(end - in_file, self.piece_bytes)
        cells = np.array(self._cells[number * self._pieces : (number + 1) * self._pieces], dtype=np.int64)
        return np.stack([cells * self.piece_bytes, lengths], axis=1), np.stack([in_file, lengths], axis=1)

    def _allocate(self, images: int, *, host: bool) -> None:
        device, cpu = self.device.torch_device, torch.device("cpu")
        page_locked = device.type == "cuda"
        device_bytes = images * max(self.image_bytes, self._pieces * self.piece_bytes)
        self.on_device = aligned_tensor(max(device_bytes, SCRATCH_BYTES), device)
        self.on_host = aligned_tensor((images if host else 1) * self.image_bytes, cpu, page_locked=page_locked)
        self.headers = aligned_tensor(images * PAGE_BYTES, cpu, page_locked=page_locked)

    def _fill(self) -> None:
        """Put something there that does not compress, for some filesystems do, and have all pages present."""
        tile = torch.frombuffer(bytearray(os.urandom(min(_TILE_BYTES, len(self.on_host)))), dtype=torch.uint8)
        for target in torch.split(self.on_host, len(tile)):
            target.copy_(tile[: len(target)])
        self.headers.zero_()

        def fill_device() -> None:
            for target in torch.split(self.on_device, len(tile)):
                _copy(target, self.on_host[: len(target)])

        stream = self.device.streams.new()
        stream.run(fill_device)
        stream.synchronize()


def aligned_tensor(length_bytes: int, device: torch.device, *, page_locked: bool = False) -> torch.Tensor:
    """Return ``length_bytes`` that begin at a page. Raises NoRoomError."""
    try:
        tensor = torch.empty(length_bytes + PAGE_BYTES, dtype=torch.uint8, device=device, pin_memory=page_locked)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        why = str(error).partition("\n")[0]
        raise NoRoomError(f"no {length_bytes >> 20} MiB of memory on {device}: {why}") from error
    start = -tensor.data_ptr() % PAGE_BYTES
    return tensor[start : start + length_bytes]


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
