"""A machine made of files, with GPUDirect Storage as it should be; tests take single things away from it."""

from __future__ import annotations

import shutil
from pathlib import Path

from nixl_offload.hardware.gds import Fact, GdsReport, gds_report

OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (root@host)\nGCC version: 12\n"
)


class Machine:
    """``root`` stands for ``/``; ``directory`` is a real directory that a mount of the fake machine holds."""

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.directory = base / "kv"
        self.directory.mkdir(parents=True)
        self.write("proc/driver/nvidia/version", OPEN_DRIVER.format("570.86.15"))
        self.write("proc/driver/nvidia/params", 'RegistryDwords: ""\n')
        self.write("proc/driver/nvidia/gpus/0000:4e:00.0/information", "Model: \t\t NVIDIA H100 80GB HBM3\n")
        self.write("proc/driver/nvidia-fs/version", "version: 2.24\n")
        self.write("proc/driver/nvidia-fs/modules", "nvme: 1.0\nrpcrdma: 1.0\n")
        self.write("proc/sys/kernel/osrelease", "6.8.0-51-generic\n")
        self.write("dev/nvidia-fs0", "")
        self.write("run/udev/data/b259:1", "")
        self.drive("nvme0n1", "259:0")
        self.mount("ext4", "/dev/nvme0n1", "259:0", "rw,data=ordered")

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def remove(self, path: str) -> None:
        found = self.root / path
        shutil.rmtree(found) if found.is_dir() else found.unlink()

    def mount(self, kind: str, source: str, device: str, options: str) -> None:
        point = str(self.directory).replace(" ", "\\040")
        lines = (
            "22 1 0:21 / / rw,relatime - overlay overlay rw,lowerdir=/l",
            f"30 22 {device} / {point} rw,relatime shared:1 - {kind} {source} {options}",
            f"31 22 0:50 / {point}-other rw - tmpfs tmpfs rw",
        )
        self.write("proc/self/mountinfo", "\n".join(lines) + "\n")

    def drive(self, name: str, number: str, transport: str = "pcie") -> Path:
        device = self.root / "sys/devices" / name
        device.mkdir(parents=True)
        if name.startswith("nvme"):
            self.write(f"sys/devices/{name}/device/transport", f"{transport}\n")
        self._number(number, device)
        return device

    def stack(self, name: str, number: str, members: list[Path], **files: str) -> Path:
        """A device over others: ``md0``, ``dm-0``."""
        device = self.root / "sys/devices" / name
        (device / "slaves").mkdir(parents=True)
        for member in members:
            (device / "slaves" / member.name).symlink_to(member)
        for path, text in files.items():
            self.write(f"sys/devices/{name}/{path.replace('__', '/')}", text)
        self._number(number, device)
        return device

    def partition(self, disk: Path, name: str, number: str) -> None:
        (disk / name).mkdir()
        (disk / name / "partition").write_text("1\n")
        self._number(number, disk / name)

    def p2pdma(self) -> None:
        """No nvidia-fs, but all that PCI P2PDMA wants."""
        self.remove("proc/driver/nvidia-fs")
        self.remove("dev/nvidia-fs0")
        registry = 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n'
        self.write("proc/driver/nvidia/params", registry)
        self.write("sys/module/nvme_core/parameters/multipath", "N\n")
        self.cufile('{"properties": {"use_pci_p2pdma": true}, "block": {"nvme": {"use_pci_p2pdma": true}}}')

    def cufile(self, text: str) -> Path:
        return self.write("etc/cufile.json", text)

    def report(self) -> GdsReport:
        return gds_report(str(self.directory), root=str(self.root))

    def fact(self, name: str) -> Fact:
        """Return the worst of that name."""
        return min((fact for fact in self.report().facts if fact.name == name), key=lambda fact: fact.ok is not False)

    def _number(self, number: str, device: Path) -> None:
        numbers = self.root / "sys/dev/block"
        numbers.mkdir(parents=True, exist_ok=True)
        (numbers / number).symlink_to(device)
