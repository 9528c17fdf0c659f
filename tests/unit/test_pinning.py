"""Device memory that cuFile's settings forbid is refused before it is registered, in words that say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_offload.errors import MoverError
from nixl_offload.hardware.cufile import VARIABLES
from nixl_offload.movers.base import MemoryId, MemoryRegion
from nixl_offload.movers.pinning import add_holder, pinning_limit, remove_holder
from nixl_offload.movers.threaded import CopyMover
from tests.unit.gds_rig import Machine

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("CUFILE_ENV_PATH_JSON", "LD_LIBRARY_PATH", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.path", [])
    return Machine(tmp_path)


def refusal(machine: Machine, size_bytes: int, registered_bytes: int = 0) -> str:
    """Return why so much memory is refused; empty: it is not."""
    try:
        pinning_limit("gds_mt", size_bytes, registered_bytes, root=str(machine.root))
    except MoverError as error:
        return str(error)
    return ""


def test_the_limit_of_cufile_json(machine: Machine) -> None:
    """32 GiB by default, cuFile's own 128 MiB and what is registered already included."""
    assert not refusal(machine, 32 * GIB - (128 << 20))
    assert refusal(machine, 32 * GIB) == (
        "gds_mt: cannot register 32GiB of device memory: with 128MiB of cuFile's own this is over "
        "max_device_pinned_mem_size_kb = 33554432 (32GiB); set it to 33685504 or more under `properties` in "
        "/etc/cufile.json, or turn `block_outermost` off, so that chunks are packed and only `staging` bytes are "
        "registered"
    )
    assert "beside the 30GiB that are: with" in refusal(machine, 2 * GIB, 30 * GIB)
    machine.cufile('{"properties": {"max_device_pinned_mem_size_kb": 33685504}}')
    assert not refusal(machine, 32 * GIB)
    machine.cufile('{"properties": {"max_device_pinned_mem_size_kb": "much"}}')
    assert "= 33554432 (32GiB)" in refusal(machine, 32 * GIB), "cuFile's default stands for what is no number"


def test_where_nothing_is_pinned_there_is_no_limit(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFILE_FORCE_COMPAT_MODE", "1")
    assert not refusal(machine, 500 * GIB)
    monkeypatch.delenv("CUFILE_FORCE_COMPAT_MODE")
    assert refusal(machine, 500 * GIB)
    machine.p2pdma()
    assert refusal(machine, 500 * GIB), "PCI P2PDMA pins as well"
    machine.write("proc/sys/kernel/osrelease", "5.15.0\n")
    assert not refusal(machine, 500 * GIB)


def test_what_fails_at_the_end_keeps_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither other regions nor other movers of a shared one; and ``close`` does not raise."""
    freed: list[str] = []

    def fails() -> None:
        raise MoverError("refused")

    region = MemoryRegion(0x7F00_0000_0000, GIB)
    for _ in range(2):
        add_holder(region)
    remove_holder(region, lambda: freed.append("the first's"))
    assert not freed
    with pytest.raises(MoverError, match="refused"):
        remove_holder(region, fails)
    assert freed == ["the first's"]

    mover, given_back = CopyMover(), list[MemoryId]()
    regions = [mover.register_memory(MemoryRegion(4096 * at, 4096)) for at in (1, 2)]

    def unregister(memory: MemoryId) -> None:
        given_back.append(memory)
        raise MoverError(f"region {memory} refused")

    monkeypatch.setattr(mover, "unregister_memory", unregister)
    mover.close()
    assert given_back == regions
    assert [record.getMessage() for record in caplog.records] == [f"region {memory} refused" for memory in regions]
