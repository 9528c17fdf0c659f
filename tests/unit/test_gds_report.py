"""GPUDirect Storage is called real only where everything says so; each single thing that is missing is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_offload.hardware.cufile import VARIABLES, read_settings
from tests.unit.gds_rig import Machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUFILE_ENV_PATH_JSON", "LD_LIBRARY_PATH", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    # This machine's wheels are no part of the fake one.
    monkeypatch.setattr("sys.path", [])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_real_with_nvidia_fs(machine: Machine) -> None:
    report = machine.report()
    assert report.verdict == "GPUDirect Storage: real (nvidia-fs 2.24, ext4 on nvme0n1)"
    assert report.real
    assert machine.fact("PCI P2PDMA").ok is False, "one of the two is enough"
    assert not list(machine.directory.iterdir()), "the scratch file is gone"


def test_our_cufile_json_is_what_p2pdma_wants(machine: Machine) -> None:
    """The file that we ship, comments and all, on a machine that lacks only the settings."""
    machine.p2pdma()
    machine.remove("etc/cufile.json")
    assert not machine.report().real
    machine.cufile((ROOT / "nixl_offload/configs/cufile.json").read_text())
    assert machine.report().real
    settings = read_settings(str(machine.root))
    assert settings.error is None
    assert settings.flag("properties.allow_compat_mode") is True
    assert settings.number("properties.max_device_pinned_mem_size_kb") == 256 << 20
    assert set(settings.said) == {
        "properties.allow_compat_mode",
        "properties.use_pci_p2pdma",
        "properties.max_device_pinned_mem_size_kb",
        "block.nvme.use_pci_p2pdma",
    }


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
    spoil(machine)
    report, fact = machine.report(), machine.fact(name)
    assert not report.real
    assert fact.ok is False
    assert words in fact.words
    assert fact.fix is not None
    assert fix in fact.fix
    assert fact.words in report.verdict
    assert fact.fix in report.verdict


def test_how_bad_it_is(machine: Machine) -> None:
    """Copying through the host is one thing, not running at all another."""
    machine.remove("run/udev")
    assert machine.report().verdict.startswith(
        "compatibility mode: cuFile copies through host memory, because /run/udev"
    )
    machine.remove("proc/driver/nvidia")
    verdict = machine.report().verdict
    assert verdict.startswith("no GPUDirect Storage: cuFile cannot run here, because no NVIDIA driver here; fix: ")
    assert "udev" not in verdict, "without a driver the rest does not matter yet"


def test_block_devices(machine: Machine) -> None:
    """Partitions and RAID 0 of NVMe drives are as good as a drive; the rest is not, and says why."""
    first, second = machine.root / "sys/devices/nvme0n1", machine.drive("nvme1n1", "259:5")
    machine.partition(first, "nvme0n1p2", "259:2")
    disk = machine.drive("vda", "254:0")
    machine.drive("nvme9n1", "259:9", transport="rdma")
    machine.stack("md0", "9:0", [first, second], md__level="raid0\n")
    machine.stack("md1", "9:1", [first, second], md__level="raid1\n")
    machine.stack("md2", "9:2", [first, disk], md__level="raid0\n")
    machine.stack("dm-0", "253:0", [first], dm__uuid="LVM-abc\n")
    machine.stack("dm-1", "253:1", [first], dm__uuid="CRYPT-LUKS2-abc\n")

    def on(number: str) -> tuple[bool, str]:
        machine.mount("xfs", "/dev/some", number, "rw,attr2")
        return machine.report().real, machine.fact("block device").words

    assert on("259:2") == (True, "nvme0n1p2")
    assert on("9:0") == (True, "md0 (raid0 of nvme0n1, nvme1n1)")
    assert on("9:1") == (False, "md1 (raid1 of nvme0n1, nvme1n1) is no NVMe or RAID 0 of it")
    assert on("9:2") == (False, "md2 (raid0 of nvme0n1, vda) is no NVMe or RAID 0 of it")
    assert on("253:0") == (False, "dm-0 (dm of nvme0n1) is no NVMe or RAID 0 of it")
    assert on("253:1") == (False, "dm-1 (dm of nvme0n1) is no NVMe or RAID 0 of it")
    assert on("254:0") == (False, "vda is no NVMe or RAID 0 of it")
    assert on("259:9") == (False, "nvme9n1")
    assert "the nvme_rdma driver does not know it" in machine.report().verdict
    machine.write("proc/driver/nvidia-fs/modules", "nvme_rdma: 1.0\n")
    assert on("259:9") == (True, "nvme9n1")
    assert on("8:77") == (False, "the block device is not known")
    assert machine.report().verdict.startswith("GPUDirect Storage: not certain, because the block device is not known")


def test_an_iommu_that_translates_makes_p2pdma_uncertain(machine: Machine) -> None:
    machine.write("sys/kernel/iommu_groups/0/type", "DMA-FQ\n")
    assert machine.report().real, "it slows nvidia-fs down, no more"
    machine.p2pdma()
    assert machine.report().verdict == (
        "GPUDirect Storage: not certain, because whether the IOMMU lets it pass is not known; `gdscheck -p` may tell"
    )
    machine.write("sys/kernel/iommu_groups/0/type", "identity\n")
    assert machine.report().real


def test_the_file_in_force_and_what_wins_over_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.cufile("{")
    machine.write("opt/mine.json", '{"properties": {"max_device_pinned_mem_size_kb": 1024}} // mine')
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/opt/mine.json")
    assert machine.report().real
    assert machine.fact("cufile.json").words == "read from /opt/mine.json"
    assert read_settings(str(machine.root)).number("properties.max_device_pinned_mem_size_kb") == 1024
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "true")
    assert "force_compat_mode is on (/opt/mine.json, over it CUFILE_FORCE_COMPAT_MODE)" in machine.report().verdict
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", "/opt/none.json")
    assert machine.report().facts[1].words == "CUFILE_ENV_PATH_JSON names /opt/none.json, which does not exist"


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"", b"[" * 100_000, b'{"properties": 7}', b'{"properties": {"allow_compat_mode": "x"}}']
)
def test_odd_files_raise_nothing(machine: Machine, content: bytes) -> None:
    machine.cufile("").write_bytes(content)
    report = machine.report()
    assert report.real is content.startswith(b"{"), "settings of the wrong type count as the default"
    for path in machine.root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(content)
    assert not machine.report().real
