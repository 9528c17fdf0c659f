"""What every mover must refuse, before anything was started: one part of the conformance suite.

Threading: one test, one thread.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from nixl_offload.errors import MoverError
from nixl_offload.movers.base import Extents, FileId, MemoryId, MemoryKind, MemoryRegion, Op, TransferState
from nixl_offload.movers.handles import open_file
from nixl_offload.types import PAGE_BYTES
from tests.contract.suites.mover_rig import KIB, MIB, MoverRigs, Rig, extents


class RefusalSuite(MoverRigs):
    """Ids, extents, files and sizes that do not fit raise MoverError, and no byte moves."""

    @pytest.mark.parametrize(
        ("memory", "file"),
        [
            pytest.param(extents([4 * MIB - 4 * KIB], 8 * KIB), extents([0], 8 * KIB), id="past-the-region"),
            pytest.param(extents([0], 8 * KIB), extents([4 * MIB - 4 * KIB], 8 * KIB), id="past-the-file"),
            pytest.param(extents([-4 * KIB], 4 * KIB), extents([0], 4 * KIB), id="negative-offset"),
            pytest.param(extents([0], 0), extents([0], 0), id="no-length"),
            pytest.param(extents([0], -4 * KIB), extents([0], -4 * KIB), id="negative-length"),
            pytest.param(extents([4 * KIB], 2**63 - 1), extents([4 * KIB], 2**63 - 1), id="overflow"),
            pytest.param(extents([0], 4 * KIB), extents([0], 8 * KIB), id="lengths-differ"),
            pytest.param(extents([0, 8 * KIB], 4 * KIB), extents([0], 4 * KIB), id="counts-differ"),
            pytest.param(np.zeros(2, dtype=np.int64), extents([0], 4 * KIB), id="shape"),
        ],
    )
    def test_refuses_what_does_not_fit(self, rig: Rig, memory: Extents, file: Extents) -> None:
        """Extents outside their region or file, or that do not match, raise, and no byte moves."""
        before = rig.memory
        for op in Op:
            with pytest.raises(MoverError):
                rig.submit(op, memory, file)
        assert np.array_equal(rig.memory, before)
        assert np.array_equal(rig.raw_read(), rig.stored)

    def test_refuses_bad_ids(self, rig: Rig) -> None:
        """An id that was never given out is an error, not a crash."""
        where = extents([0], 4 * KIB)
        with pytest.raises(MoverError):
            rig.mover.submit(Op.READ, MemoryId(10**6), where, rig.file_id, where)
        with pytest.raises(MoverError):
            rig.mover.submit(Op.READ, rig.memory_id, where, FileId(10**6), where)
        with pytest.raises(MoverError):
            rig.mover.unregister_memory(MemoryId(10**6))
        with pytest.raises(MoverError):
            rig.mover.close_file(FileId(10**6))

    @pytest.mark.parametrize("kind", list(MemoryKind))
    def test_refuses_foreign_memory(self, rig: Rig, kind: MemoryKind) -> None:
        """Memory of a kind that the mover does not name is refused at registration."""
        if kind in rig.mover.memory_kinds:
            return
        with pytest.raises(MoverError):
            rig.mover.register_memory(MemoryRegion(rig.region.address, PAGE_BYTES, kind))

    @pytest.mark.parametrize(("memory", "file", "length"), [(512, 0, 4096), (0, 512, 4096), (0, 0, 512)])
    def test_refuses_misalignment(self, tmp_path: Path, memory: int, file: int, length: int) -> None:
        """O_DIRECT off the 4 KiB grid is refused with a sentence, before the kernel answers EINVAL."""
        with self.open_rig(tmp_path / "data", direct_io=True) as rig, pytest.raises(MoverError, match="multiples"):
            rig.submit(Op.READ, extents([memory], length), extents([file], length))

    def test_refuses_files_that_cannot_be_used(self, rig: Rig, tmp_path: Path) -> None:
        """Missing, a directory, a pipe, not writable: MoverError, and nothing is created."""
        missing = tmp_path / "missing"
        os.mkfifo(tmp_path / "pipe")
        for path in (missing, tmp_path, tmp_path / "pipe"):
            with pytest.raises(MoverError, match=path.name):
                open_file(rig.mover, str(path), 4 * KIB, direct_io=self.direct_io)
        assert not missing.exists()
        # A program that runs cannot be opened for writing by anyone, root included.
        program = tmp_path / "sleep"
        shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
        with subprocess.Popen([str(program), "60"]) as process:
            try:
                with pytest.raises(MoverError, match="sleep"):
                    open_file(rig.mover, str(program), 4 * KIB, direct_io=self.direct_io)
            finally:
                process.kill()

    # Sizes

    def test_too_many_extents(self, tmp_path: Path) -> None:
        """More than 65,536 extents stop NIXL's POSIX plugin for good. A mover refuses them, or moves them."""
        with self.open_rig(tmp_path / "data", direct_io=False) as rig:
            pages = np.arange(70_000) % 1024 * 4 * KIB
            where, back = extents(pages, 4 * KIB), extents(4 * MIB - 4 * KIB - pages, 4 * KIB)
            if rig.mover.limits.max_extents_per_transfer < len(pages):
                before = rig.memory
                with pytest.raises(MoverError):
                    rig.submit(Op.READ, where, back)
                assert np.array_equal(rig.memory, before)
                return
            assert rig.move(Op.READ, where, back).state is TransferState.DONE
            assert np.array_equal(rig.memory.reshape(1024, -1), rig.stored.reshape(1024, -1)[::-1])

    def test_refuses_too_large(self, rig: Rig) -> None:
        """An extent over the mover's own limit is refused, not started."""
        size = rig.mover.limits.max_extent_bytes + 64 * KIB
        large = self.make_memory(size)
        os.ftruncate(rig.fd, size)
        memory = rig.mover.register_memory(large.region)
        file = open_file(rig.mover, str(rig.path), size, direct_io=self.direct_io)
        with pytest.raises(MoverError):
            rig.mover.submit(Op.READ, memory, extents([0], size), file, extents([0], size))
        rig.mover.close_file(file)
        rig.mover.unregister_memory(memory)
