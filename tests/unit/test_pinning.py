"""Device memory that cuFile could not pin is refused before it is registered, in words that say what to change."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nixl_offload.errors import MoverError
from nixl_offload.hardware.cufile import VARIABLES
from nixl_offload.movers import pinning
from nixl_offload.movers.base import MemoryId, MemoryKind, MemoryRegion
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import PLUGINS
from nixl_offload.movers.pinning import Bar1, check_pinning, find_bar1
from tests.unit.gds_rig import Machine

GIB = 1 << 30
WINDOW = "sys/bus/pci/devices/0000:4e:00.0/resource"
DRIVERS = """
#include <stdlib.h>
#include <string.h>
static unsigned long long number(const char *name) {
    const char *text = getenv(name);
    return text ? strtoull(text, 0, 10) : 0;
}
int cuInit(unsigned flags) { return flags || number("FAKE_NO_CUDA"); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal != 0; }
int cuDeviceGetPCIBusId(char *text, int length, int device) { strncpy(text, "0000:4E:00.0", length); return device; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle) {
    *handle = (void *)7;
    return strcmp(address, "0000:4E:00.0");
}
int nvmlDeviceGetBAR1MemoryInfo(void *handle, unsigned long long *memory) {
    memory[0] = number("FAKE_BAR1_TOTAL");
    memory[1] = number("FAKE_BAR1_FREE");
    memory[2] = memory[0] - memory[1];
    return handle != (void *)7 || !memory[0];
}
"""


@pytest.fixture(autouse=True)
def _no_settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUFILE_ENV_PATH_JSON", "LD_LIBRARY_PATH", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.path", [])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def vram(size_bytes: int, device: int = 0) -> MemoryRegion:
    return MemoryRegion(0x7F00_0000_0000, size_bytes, MemoryKind.VRAM, device)


@contextmanager
def registered(region: MemoryRegion) -> Iterator[None]:
    """Another mover has ``region`` registered."""
    holder = object()
    pinning.add_holder(region, holder, [])
    yield
    pinning.remove_holder(region, holder, lambda: None)


def window(machine: Machine, size_bytes: int) -> None:
    lines = (
        "0x00000000d6000000 0x00000000d6ffffff 0x40200",
        f"0x2000000000 {0x2000000000 + size_bytes - 1:#x} 0x14220c",
    )
    machine.write(WINDOW, "\n".join(lines) + "\n")


def refusal(machine: Machine, size_bytes: int, registered_bytes: int = 0) -> str:
    with pytest.raises(MoverError) as caught:
        check_pinning("gds_mt", vram(size_bytes), registered_bytes, root=str(machine.root))
    return str(caught.value)


def test_the_limit_of_cufile_json(machine: Machine) -> None:
    """32 GiB by default, cuFile's own 128 MiB included; what is registered already counts."""
    root = str(machine.root)
    check_pinning("gds_mt", vram(32 * GIB - (128 << 20)), 0, root=root)
    assert refusal(machine, 32 * GIB) == (
        "gds_mt: cannot register 32GiB of device memory: with 128MiB of cuFile's own this is over "
        "max_device_pinned_mem_size_kb = 33554432 (32GiB); set it to 33685504 or more under `properties` in "
        "/etc/cufile.json, or turn `block_outermost` off, so that chunks are packed and only `staging` bytes are "
        "registered"
    )
    assert "beside the 30GiB that are: with" in refusal(machine, 2 * GIB, 30 * GIB)
    machine.cufile('{"properties": {"max_device_pinned_mem_size_kb": 33685504}}')
    check_pinning("gds_mt", vram(32 * GIB), 0, root=root)
    machine.cufile('{"properties": {"max_device_pinned_mem_size_kb": "much"}}')
    assert "= 33554432 (32GiB)" in refusal(machine, 32 * GIB), "cuFile's default stands for what is no number"


def test_a_window_that_is_too_small(machine: Machine) -> None:
    """A GPU without resizable BAR shows 256 MiB; the kernel says so where NVML is not to be had."""
    window(machine, 256 << 20)
    assert refusal(machine, GIB) == (
        "gds_mt: cannot register 1GiB of device memory: the GPU's BAR1 window is 256MiB; switch on resizable (large) "
        "BAR and 'above 4G decoding' in the BIOS, or turn `block_outermost` off, so that chunks are packed and only "
        "`staging` bytes are registered"
    )
    window(machine, 128 * GIB)
    check_pinning("gds_mt", vram(GIB), 0, root=str(machine.root))
    machine.write(WINDOW, "nonsense\n")
    check_pinning("gds_mt", vram(GIB), 0, root=str(machine.root))


def test_in_compatibility_mode_nothing_is_pinned_and_nothing_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = str(machine.root)
    window(machine, 1 << 20)
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "1")
    with caplog.at_level("DEBUG", logger="nixl_offload.movers.pinning"):
        check_pinning("gds_mt", vram(500 * GIB), 0, root=root)
    assert caplog.messages == ["gds_mt: nothing is pinned of 500GiB: cuFile bounces here, and has no limit"]
    monkeypatch.delenv("CUFILE_FORCE_COMPAT_MODE")
    assert refusal(machine, 500 * GIB)
    machine.remove("dev/nvidia-fs0")
    check_pinning("gds_mt", vram(500 * GIB), 0, root=root)
    machine.remove("proc/driver/nvidia")
    check_pinning("gds_mt", vram(500 * GIB), 0, root=root)


def test_p2pdma_pins_as_well(machine: Machine) -> None:
    machine.p2pdma()
    assert "max_device_pinned_mem_size_kb" in refusal(machine, 32 * GIB)
    machine.write("proc/sys/kernel/osrelease", "5.15.0\n")
    check_pinning("gds_mt", vram(32 * GIB), 0, root=str(machine.root))


def test_what_the_driver_says_of_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA names the GPU, NVML its window; both are real libraries here, loaded as NVIDIA's would be."""
    (tmp_path / "driver.c").write_text(DRIVERS)
    library = tmp_path / "driver.so"
    build = [
        "gcc",
        "-std=gnu11",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-o",
        str(library),
        str(tmp_path / "driver.c"),
    ]
    subprocess.run(build, check=True, capture_output=True, text=True)
    monkeypatch.setattr(pinning, "CUDA", str(library))
    monkeypatch.setattr(pinning, "NVML", str(library))
    monkeypatch.setenv("FAKE_BAR1_TOTAL", str(128 * GIB))
    monkeypatch.setenv("FAKE_BAR1_FREE", str(GIB))
    assert find_bar1(0) == Bar1(128 * GIB, GIB)
    for route, refused in (("nvidia-fs", True), ("PCI P2PDMA", False)):
        monkeypatch.setattr(pinning, "pinning_route", lambda root, settings, route=route: route)
        if refused:
            with pytest.raises(MoverError, match=r"window of 128GiB only 1GiB are free; stop what else uses this GPU"):
                check_pinning("kvikio", vram(2 * GIB), 0)
        else:
            check_pinning("kvikio", vram(2 * GIB), 0)
        check_pinning("kvikio", vram(GIB), 0)
    with registered(vram(2 * GIB)):
        monkeypatch.setattr(pinning, "pinning_route", lambda root, settings: "nvidia-fs")
        check_pinning("gds_mt", vram(2 * GIB), 2 * GIB)  # another tier's mover has it: nothing more is pinned
        with pytest.raises(MoverError, match="1GiB are free"):
            check_pinning("gds_mt", vram(3 * GIB), 2 * GIB)
    monkeypatch.setenv("FAKE_BAR1_TOTAL", "0")
    assert find_bar1(0) is None, "NVML does not know, and the kernel has no such GPU"
    monkeypatch.setenv("FAKE_NO_CUDA", "1")
    assert find_bar1(0) is None
    monkeypatch.setattr(pinning, "CUDA", str(tmp_path / "none.so"))
    assert find_bar1(0) is None


def test_nixl_asks_before_it_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they hold already; host memory is left alone. The agent is never reached by what is refused."""
    asked = []

    def refuse(mover: str, region: MemoryRegion, registered_bytes: int) -> None:
        asked.append((mover, region.length_bytes, registered_bytes))
        if region.length_bytes > GIB:
            raise MoverError("too much")

    class Agent:
        """Counts what reaches it."""

        registered = 0

        def register_memory(self, *_: object) -> object:
            self.registered += 1
            return object()

        def deregister_memory(self, *_: object) -> None:
            self.registered -= 1

    agent = Agent()
    monkeypatch.setattr("nixl_offload.movers.nixl.check_pinning", refuse)
    mover = NixlMover(PLUGINS["gds_mt"])
    monkeypatch.setattr(mover._nixl, "get", lambda: agent)
    mover.register_memory(vram(GIB))
    mover.register_memory(MemoryRegion(4096, 4096))
    with pytest.raises(MoverError, match="too much"):
        mover.register_memory(vram(GIB + 1))
    assert asked == [("gds_mt", GIB, 0), ("gds_mt", GIB + 1, GIB)]
    assert agent.registered == 2
    mover.close()
    assert agent.registered == 0


def test_what_fails_at_the_end_keeps_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither other regions nor what the owner of a shared one has left over; and ``close`` does not raise."""

    class Agent:
        """Takes everything."""

        def register_memory(self, rows: object, *_: object) -> object:
            return rows

    freed: list[str] = []

    def fails() -> None:
        raise MoverError("refused")

    region, one, other = vram(GIB), object(), object()
    for holder in (one, other):
        pinning.add_holder(region, holder, [])
    pinning.remove_holder(region, one, lambda: freed.append("owner"))
    with pytest.raises(MoverError, match="refused"):
        pinning.remove_holder(region, other, fails)
    assert freed == ["owner"]

    mover, given_back = NixlMover(PLUGINS["posix_uring"]), list[MemoryId]()
    monkeypatch.setattr(mover._nixl, "get", Agent)
    regions = [mover.register_memory(MemoryRegion(4096 * at, 4096)) for at in (1, 2)]

    def unregister(memory: MemoryId) -> None:
        given_back.append(memory)
        raise MoverError(f"region {memory} refused")

    monkeypatch.setattr(mover, "unregister_memory", unregister)
    mover.close()
    assert given_back == regions
    assert [record.getMessage() for record in caplog.records] == [f"region {memory} refused" for memory in regions]
    with pytest.raises(MoverError, match="closed"):
        mover.register_memory(MemoryRegion(4096, 4096))
