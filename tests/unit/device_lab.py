"""The rig of tests of transfers with a device: makes engines over one emulated device, and ends them in order.

Threading: the test's thread. Ownership: the lab closes its rigs, then the streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nixl_offload.engine.device_packer import DevicePacker
from nixl_offload.engine.image import TransferPath
from nixl_offload.engine.staging import SlotPool
from nixl_offload.movers.base import Mover
from tests.contract.suites.faulty_mover import Fault, FaultyMover
from tests.unit.device_rig import ThreadedDevice, ThreadedStream
from tests.unit.kv_shapes import DeviceCopyMover, DeviceRig, KVShape, Way


class Lab:
    """Makes rigs over one emulated device."""

    def __init__(self, directory: Path, device: ThreadedDevice) -> None:
        self.directory = directory
        self.device = device
        self.rigs: list[DeviceRig] = []

    def make(
        self, mover: Mover | None = None, shape: str | KVShape = "lbhnc", way: Way = "device", **options: Any
    ) -> DeviceRig:
        """See ``DeviceRig.make``. The lab closes the mover; None makes one that takes any memory."""
        model = self.device.compute.run
        rig = DeviceRig.make(self.directory, self.device, model, mover or DeviceCopyMover(), shape, way, **options)
        self.rigs.append(rig)
        return rig

    def close(self) -> None:
        """Release everything that hangs, then close all."""
        for rig in self.rigs:
            if isinstance(rig.mover, FaultyMover):
                rig.mover.release()
        for stream in self.device.made:
            for gate in stream._gates:
                gate.set()
        for rig in self.rigs:
            rig.close()


@contextmanager
def open_lab(directory: Path) -> Iterator[Lab]:
    with ThreadedDevice() as device:
        lab = Lab(directory, device)
        try:
            yield lab
        finally:
            lab.close()


def faulty(*faults: Fault) -> FaultyMover:
    """A mover of any memory, with faults."""
    return FaultyMover(DeviceCopyMover(), faults)


def pools_of(rig: DeviceRig) -> Mapping[TransferPath, SlotPool[Any]]:
    """Staging slots and header pages."""
    pools: Mapping[TransferPath, SlotPool[Any]] = rig.engine.paths.link_memory.pools
    return pools


def packer_of(rig: DeviceRig) -> DevicePacker:
    packer = rig.engine.paths.packer
    assert isinstance(packer, DevicePacker)
    return packer


def beside(rig: DeviceRig) -> ThreadedStream:
    """The stream on which headers go to the device and come from it."""
    stream = packer_of(rig)._beside
    assert isinstance(stream, ThreadedStream)
    return stream
