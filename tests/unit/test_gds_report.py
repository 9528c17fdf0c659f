"""GPUDirect Storage is called real only where everything says so; each single thing that is missing is named. Device
memory that cuFile's settings forbid is refused before it is registered.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_offload.errors import MoverError
from nixl_offload.hardware.gds import (
    COMPAT_VARIABLE,
    P2PDMA_VARIABLE,
    PATH_VARIABLE,
    GdsReport,
    gds_report,
    settings_of,
)
from nixl_offload.movers.pinning import pinning_limit

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@host)\n"
FILES = {
    "proc/driver/nvidia/version": OPEN_DRIVER,
    "proc/driver/nvidia-fs/version": "version: 2.24\n",
    "proc/driver/nvidia-fs/modules": "nvme: 1.0\n",
    "proc/sys/kernel/osrelease": "6.8.0-51-generic\n",
    "dev/nvidia-fs0": "",
    "run/udev/data/b259:1": "",
}


class Machine:
    """A machine made of files, with GPUDirect Storage as it should be; tests take single things away from it.

    ``root`` stands for ``/``; ``directory`` is a real directory that a mount of the fake machine holds.
    """

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.directory = base / "kv"
        self.directory.mkdir(parents=True)
        for path, text in FILES.items():
            self.write(path, text)
        self.drive("nvme0n1", "259:0", "pcie")
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
        lines = (
            "22 1 0:21 / / rw,relatime - overlay overlay rw,lowerdir=/l",
            f"30 22 {device} / {self.directory} rw,relatime shared:1 - {kind} {source} {options}",
            f"31 22 0:50 / {self.directory}-other rw - tmpfs tmpfs rw",
        )
        self.write("proc/self/mountinfo", "\n".join(lines) + "\n")

    def drive(self, name: str, number: str, transport: str = "") -> None:
        """A block device with this number; ``name`` may be the path of a partition below its drive."""
        device = self.root / "sys/devices" / name
        device.mkdir(parents=True)
        if transport:
            self.write(f"sys/devices/{name}/device/transport", f"{transport}\n")
        if "/" in name:
            (device / "partition").write_text("1\n")
        numbers = self.root / "sys/dev/block"
        numbers.mkdir(parents=True, exist_ok=True)
        (numbers / number).symlink_to(device)

    def p2pdma(self, path: str = "", text: str = "") -> None:
        """No nvidia-fs, but what PCI P2PDMA wants, except for the file ``path``."""
        self.remove("proc/driver/nvidia-fs")
        self.remove("dev/nvidia-fs0")
        self.cufile((ROOT / "nixl_offload/configs/cufile.json").read_text())
        if path:
            self.write(path, text)

    def cufile(self, text: str) -> Path:
        return self.write("etc/cufile.json", text)

    def report(self) -> GdsReport:
        return gds_report(str(self.directory), root=str(self.root))

    def refusal(self, size_bytes: int, registered_bytes: int = 0) -> str:
        """Return why this much device memory is refused; empty if it is not."""
        try:
            pinning_limit("gds_mt", size_bytes, registered_bytes, root=str(self.root))
        except MoverError as error:
            return str(error)
        return ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in (PATH_VARIABLE, COMPAT_VARIABLE, P2PDMA_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return Machine(tmp_path)


def test_real_with_nvidia_fs(machine: Machine) -> None:
    report = machine.report()
    assert report.real
    where = f"ext4 at {machine.directory}; nvme0n1; O_DIRECT reads and writes"
    assert report.verdict == f"GPUDirect Storage: real (nvidia-fs 2.24; {where})"
    assert not list(machine.directory.iterdir()), "the scratch file is gone"


def test_p2pdma_is_never_certain(machine: Machine) -> None:
    """With the file that we ship, comments and all; without it, it is off."""
    machine.p2pdma()
    verdict = "GPUDirect Storage: not certain, because PCI P2PDMA is turned on, but only cuFile knows whether it works"
    assert machine.report().verdict.startswith(verdict)
    assert machine.report().real is None
    assert settings_of("max_device_pinned_mem_size_kb", str(machine.root)) == [str(256 << 20)]


JOURNAL = "rw,data=journal"
PLAIN = ("/dev/nvme0n1", "259:0")
TWICE_BUT_NOT_THERE = '{"fs": {"use_pci_p2pdma": true}, "properties": {"a": 1, "use_pci_p2pdma": true}}'
MISSING: list[tuple[Callable[[Machine], object], str, str]] = [
    (lambda m: m.remove("proc/driver/nvidia"), "no NVIDIA driver here", "--gpus all"),
    (lambda m: m.remove("run/udev"), "has no data", "-v /run/udev:/run/udev:ro"),
    (lambda m: m.remove("proc/driver/nvidia-fs"), "nvidia-fs is not loaded, and no PCI P2PDMA", "modprobe nvidia-fs"),
    (lambda m: m.remove("dev/nvidia-fs0"), "no /dev/nvidia-fs*", "NVIDIA_GDS=enabled"),
    (lambda m: m.write("proc/driver/nvidia-fs/modules", "rpcrdma: 1\n"), "nvme driver", "MLNX_OFED"),
    (lambda m: m.cufile('{"dir": "/mnt//x", "properties": {"force_compat_mode": true}}'), "compat_mode is on", "off"),
    (lambda m: m.mount("ext4", *PLAIN, "rw"), "does not say data=ordered", "remount"),
    (lambda m: m.mount("ext4", *PLAIN, JOURNAL), "has data=journal", "remount"),
    (lambda m: m.mount("overlay", "overlay", "0:40", "rw,lowerdir=/a"), "overlay at", "NVMe"),
    (lambda m: m.mount("btrfs", *PLAIN, "rw"), "btrfs at", "on ext4"),
    (lambda m: m.directory.rmdir(), "O_DIRECT does not work in", "on ext4"),
    # What PCI P2PDMA lacks, where there is no nvidia-fs.
    (lambda m: m.p2pdma("etc/cufile.json", "{}"), "does not say use_pci_p2pdma", "configs cufile.json"),
    (lambda m: m.p2pdma("etc/cufile.json", TWICE_BUT_NOT_THERE), "does not say use_pci_p2pdma", "configs cufile.json"),
    (lambda m: m.p2pdma("proc/sys/kernel/osrelease", "5.15.0\n"), "older than 6.2", "boot a kernel"),
    (lambda m: m.p2pdma("proc/driver/nvidia/version", OPEN_DRIVER.replace("Open ", "")), "proprietary", "open kernel"),
]


@pytest.mark.parametrize(("spoil", "words", "fix"), MISSING)
def test_each_single_thing_that_is_missing_is_named(
    machine: Machine, spoil: Callable[[Machine], object], words: str, fix: str
) -> None:
    """Some missing things force copies through the host, others prevent any transfer."""
    spoil(machine)
    report = machine.report()
    assert report.real is False
    kind = "no GPUDirect Storage: cuFile cannot run" if "driver here" in words else "compatibility mode: cuFile copies"
    assert report.verdict.startswith(kind)
    reasons, _, fixes = report.verdict.partition("; fix: ")
    assert words in reasons
    assert fix in fixes


@pytest.mark.parametrize(
    ("name", "transport", "real", "words"),
    [
        ("nvme1n1/nvme1n1p2", "pcie", True, "; nvme1n1p2;"),
        ("nvme1n1", "rdma", None, "nvme1n1 is not known to be"),
        ("nvme1n1", "", None, "nvme1n1 is not known to be"),  # many paths to a drive: its transport is not said
        ("md0", "", None, "md0 is not known to be"),
        ("dm-0", "", False, "dm-0 is no NVMe drive; fix: put"),
        ("vda", "", False, "vda is no NVMe drive; fix: put"),
        (None, "", None, "8:77 is not known to be"),
    ],
)
def test_only_an_nvme_drive_of_this_machine_is_certain(
    machine: Machine, name: str | None, transport: str, real: bool | None, words: str
) -> None:
    if name:
        machine.drive(name, "8:77")
        if transport:
            machine.write(f"sys/devices/{name.partition('/')[0]}/device/transport", f"{transport}\n")
    machine.mount("xfs", "/dev/some", "8:77", "rw,attr2")
    assert machine.report().real is real
    assert words in machine.report().verdict


def test_of_other_filesystems_nothing_is_said(machine: Machine) -> None:
    """Network filesystems may have GPUDirect clients of their own; nvidia-fs then need not know NVMe drives."""
    machine.write("proc/driver/nvidia-fs/modules", "rpcrdma: 1\n")
    machine.mount("nfs4", "h:/x", "0:44", "rw,proto=rdma")
    verdict = f"GPUDirect Storage: not certain, because nfs4 at {machine.directory}; `gdscheck"
    assert machine.report().verdict.startswith(verdict)
    machine.remove("proc/self/mountinfo")
    assert "because the filesystem is not known" in machine.report().verdict


def test_the_file_in_force_and_what_wins_over_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.cufile('{"properties": {"force_compat_mode": true}}')
    machine.write("opt/mine.json", '{"properties": {/* "force_compat_mode": true */}} // "force_compat_mode": true')
    monkeypatch.setenv(PATH_VARIABLE, "/opt/mine.json")
    assert machine.report().real
    monkeypatch.setenv(COMPAT_VARIABLE, "true")
    assert f"force_compat_mode is on (in /opt/mine.json or by {COMPAT_VARIABLE})" in machine.report().verdict


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[" * 100_000, b'{"properties": {"force_compat_mode": "x"}}'])
def test_odd_files_raise_nothing(machine: Machine, content: bytes) -> None:
    machine.cufile("").write_bytes(content)
    assert machine.report().real, "the defaults hold"
    for path in machine.root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(content)
    assert not machine.report().real


def test_the_limit_of_registered_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 GiB by default, cuFile's own 128 MiB and what is registered already included; none where nothing is pinned."""
    assert not machine.refusal(32 * GIB - (128 << 20))
    assert machine.refusal(32 * GIB) == (
        "gds_mt: cannot register 32GiB of device memory: with 128MiB of cuFile's own this is over "
        "max_device_pinned_mem_size_kb = 33554432 (32GiB); set it to 33685504 or more under `properties` in "
        "/etc/cufile.json, or turn `block_outermost` off, so that chunks are packed and only `staging` bytes are "
        "registered"
    )
    assert "beside the 30GiB that are: with" in machine.refusal(2 * GIB, 30 * GIB)
    machine.cufile('{"properties": {"max_device_pinned_mem_size_kb": 33685504}}')
    assert not machine.refusal(32 * GIB)
    machine.cufile('{"properties": {"max_device_pinned_mem_size_kb": "much"}}')
    assert "= 33554432 (32GiB)" in machine.refusal(32 * GIB), "cuFile's default stands for what is no number"
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "1")
    assert not machine.refusal(500 * GIB)
    monkeypatch.delenv("CUFILE_FORCE_COMPAT_MODE")
    machine.write("proc/driver/nvidia-fs/modules", "rpcrdma: 1\n")
    assert machine.refusal(500 * GIB), "it pins for other drives and filesystems"
    machine.p2pdma()
    assert machine.refusal(500 * GIB), "PCI P2PDMA pins as well"
    machine.write("proc/sys/kernel/osrelease", "5.15.0\n")
    assert not machine.refusal(500 * GIB)
