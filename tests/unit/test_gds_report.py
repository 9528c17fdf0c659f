"""GPUDirect Storage is called real only where everything says so; each single thing that is missing is named. Device
memory that cuFile's settings forbid is refused before it is registered.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_offload.errors import MoverError
from nixl_offload.hardware.gds import VARIABLES, Fact, GdsReport, gds_report, read_settings
from nixl_offload.movers.pinning import pinning_limit

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@host)\n"
FILES = {
    "proc/driver/nvidia/version": OPEN_DRIVER,
    "proc/driver/nvidia-fs/version": "version: 2.24\n",
    "proc/driver/nvidia-fs/modules": "nvme: 1.0\nrpcrdma: 1.0\n",
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
        lines = (
            "22 1 0:21 / / rw,relatime - overlay overlay rw,lowerdir=/l",
            f"30 22 {device} / {self.directory} rw,relatime shared:1 - {kind} {source} {options}",
            f"31 22 0:50 / {self.directory}-other rw - tmpfs tmpfs rw",
        )
        self.write("proc/self/mountinfo", "\n".join(lines) + "\n")

    def drive(self, name: str, number: str, transport: str = "pcie") -> Path:
        device = self.root / "sys/devices" / name
        device.mkdir(parents=True)
        if name.startswith("nvme"):
            self.write(f"sys/devices/{name}/device/transport", f"{transport}\n")
        return self._number(number, device)

    def stack(self, name: str, number: str, members: list[Path], level: str = "") -> None:
        """A device over others: ``md0``, ``dm-0``."""
        device = self.root / "sys/devices" / name
        (device / "slaves").mkdir(parents=True)
        for member in members:
            (device / "slaves" / member.name).symlink_to(member)
        if level:
            self.write(f"sys/devices/{name}/md/level", f"{level}\n")
        self._number(number, device)

    def p2pdma(self) -> None:
        """No nvidia-fs, but what PCI P2PDMA wants."""
        self.remove("proc/driver/nvidia-fs")
        self.cufile((ROOT / "nixl_offload/configs/cufile.json").read_text())

    def cufile(self, text: str) -> Path:
        return self.write("etc/cufile.json", text)

    def report(self) -> GdsReport:
        return gds_report(str(self.directory), root=str(self.root))

    def fact(self, name: str) -> Fact:
        """Return the worst fact of that name."""
        return min((fact for fact in self.report().facts if fact.name == name), key=lambda fact: fact.ok is not False)

    def refusal(self, size_bytes: int, registered_bytes: int = 0) -> str:
        """Return why this much device memory is refused; empty if it is not."""
        try:
            pinning_limit("gds_mt", size_bytes, registered_bytes, root=str(self.root))
        except MoverError as error:
            return str(error)
        return ""

    def _number(self, number: str, device: Path) -> Path:
        numbers = self.root / "sys/dev/block"
        numbers.mkdir(parents=True, exist_ok=True)
        (numbers / number).symlink_to(device)
        return device


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("CUFILE_ENV_PATH_JSON", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return Machine(tmp_path)


def test_real_with_nvidia_fs(machine: Machine) -> None:
    report = machine.report()
    assert (report.real, report.verdict) == (True, "GPUDirect Storage: real (nvidia-fs 2.24, ext4 on nvme0n1)")
    assert machine.fact("PCI P2PDMA").ok is False, "one of the two is enough"
    assert not list(machine.directory.iterdir()), "the scratch file is gone"


def test_p2pdma_is_never_certain(machine: Machine) -> None:
    """With the file that we ship, comments and all; without it, it is off."""
    machine.p2pdma()
    verdict = "GPUDirect Storage: not certain, because PCI P2PDMA is turned on, but only cuFile knows whether it works"
    assert machine.report().verdict.startswith(verdict)
    assert not machine.report().real
    settings = read_settings(str(machine.root))
    assert settings.error is None
    assert settings.values["properties.max_device_pinned_mem_size_kb"] == 256 << 20
    for path, text, words in (
        ("proc/driver/nvidia/version", OPEN_DRIVER.replace("Open ", ""), "proprietary"),
        ("proc/sys/kernel/osrelease", "5.15.0\n", "older than 6.2"),
        ("etc/cufile.json", "{}", "use_pci_p2pdma in properties and block.nvme"),
    ):
        machine.write(path, text)
        assert words in machine.report().verdict
        machine.write(path, FILES.get(path, ""))
        assert machine.report().verdict.startswith("compatibility mode") == (path == "etc/cufile.json")


PLAIN = ("/dev/nvme0n1", "259:0")
MISSING: list[tuple[str, Callable[[Machine], object], str, str]] = [
    ("GPU driver", lambda m: m.remove("proc/driver/nvidia"), "no NVIDIA driver here", "--gpus all"),
    ("udev", lambda m: m.remove("run/udev"), "has no data", "-v /run/udev:/run/udev:ro"),
    ("nvidia-fs", lambda m: m.remove("proc/driver/nvidia-fs"), "not loaded", "modprobe nvidia-fs"),
    ("nvidia-fs", lambda m: m.remove("dev/nvidia-fs0"), "no /dev/nvidia-fs*", "NVIDIA_GDS=enabled"),
    ("nvidia-fs", lambda m: m.write("proc/driver/nvidia-fs/modules", "rpcrdma: 1\n"), "nvme driver", "MLNX_OFED"),
    ("cufile.json", lambda m: m.cufile('{"properties": {"force_compat_mode": true}}'), "compat_mode is on", "off"),
    ("cufile.json", lambda m: m.cufile('{"properties": {'), "cannot be understood", "correct /etc/cufile.json"),
    ("mount options", lambda m: m.mount("ext4", *PLAIN, "rw"), "does not say data=ordered", "remount"),
    ("mount options", lambda m: m.mount("ext4", *PLAIN, "rw,data=journal"), "data=journal", "remount"),
    ("filesystem", lambda m: m.mount("overlay", "overlay", "0:40", "rw,lowerdir=/a"), "overlay at", "NVMe"),
    ("mount options", lambda m: m.mount("nfs4", "h:/x", "0:44", "rw,proto=tcp"), "goes by tcp", "proto=rdma"),
]


@pytest.mark.parametrize(("name", "spoil", "words", "fix"), MISSING)
def test_each_single_thing_that_is_missing_is_named(
    machine: Machine, name: str, spoil: Callable[[Machine], object], words: str, fix: str
) -> None:
    """Some missing things force copies through the host, others prevent any transfer."""
    spoil(machine)
    report, fact = machine.report(), machine.fact(name)
    assert (report.real, fact.ok) == (False, False)
    assert words in fact.words in report.verdict
    assert fact.fix is not None
    assert fix in fact.fix in report.verdict
    kind = "no GPUDirect Storage: cuFile cannot run here" if name == "GPU driver" else "compatibility mode: cuFile"
    assert report.verdict.startswith(kind)


def test_block_devices(machine: Machine) -> None:
    """Partitions and RAID 0 of NVMe drives are as good as a drive; the rest is not, and says why."""
    first, second = machine.root / "sys/devices/nvme0n1", machine.drive("nvme1n1", "259:5")
    (first / "nvme0n1p2").mkdir()
    (first / "nvme0n1p2" / "partition").write_text("1\n")
    machine._number("259:2", first / "nvme0n1p2")
    machine.drive("nvme9n1", "259:9", transport="rdma")
    machine.stack("md0", "9:0", [first, second], "raid0")
    machine.stack("md1", "9:1", [first, second], "raid1")
    machine.stack("md2", "9:2", [first, machine.drive("vda", "254:0")], "raid0")
    machine.stack("dm-0", "253:0", [first])
    other = " is no NVMe or RAID 0 of it"
    for number, real, words in (
        ("259:2", True, "nvme0n1p2"),
        ("9:0", True, "md0 (raid0 of nvme0n1, nvme1n1)"),
        ("9:1", False, f"md1 (raid1 of nvme0n1, nvme1n1){other}"),
        ("9:2", False, f"md2 (raid0 of nvme0n1, vda){other}"),
        ("253:0", False, f"dm-0 (dm of nvme0n1){other}"),
        ("254:0", False, f"vda{other}"),
        ("259:9", False, "nvme9n1"),  # the nvme_rdma driver does not know nvidia-fs
        ("8:77", False, "the block device is not known"),
    ):
        machine.mount("xfs", "/dev/some", number, "rw,attr2")
        assert (machine.report().real, machine.fact("block device").words) == (real, words)
    assert machine.report().verdict.startswith("GPUDirect Storage: not certain, because the block device is not known")


def test_the_file_in_force_and_what_wins_over_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.cufile("{")
    machine.write("opt/mine.json", '{"properties": {"max_device_pinned_mem_size_kb": 1024}} // mine')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/opt/mine.json")
    assert machine.report().real
    assert machine.fact("cufile.json").words == "read from /opt/mine.json"
    assert read_settings(str(machine.root)).values["properties.max_device_pinned_mem_size_kb"] == 1024
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "true")
    assert "force_compat_mode is on (/opt/mine.json, over it CUFILE_FORCE_COMPAT_MODE)" in machine.report().verdict
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/opt/none.json")
    assert machine.report().facts[1].words == "CUFILE_ENV_PATH_JSON names /opt/none.json, which does not exist"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[" * 100_000, b'{"properties": {"force_compat_mode": "x"}}'])
def test_odd_files_raise_nothing(machine: Machine, content: bytes) -> None:
    machine.cufile("").write_bytes(content)
    assert machine.report().real is content.startswith(b"{"), "settings of the wrong type count as the default"
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
    machine.p2pdma()
    assert machine.refusal(500 * GIB), "PCI P2PDMA pins as well"
    machine.write("proc/sys/kernel/osrelease", "5.15.0\n")
    assert not machine.refusal(500 * GIB)
