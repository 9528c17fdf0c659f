"""Files that a mover opens for itself: what fails after the open leaves no descriptor."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nixl_offload.errors import MoverError
from nixl_offload.movers.handles import open_regular_file


def test_a_file_that_cannot_be_looked_at_is_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem may fail between open and fstat, and each try anew would keep another descriptor."""
    file = tmp_path / "shard"
    file.write_bytes(b"x")

    def fails(_: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fstat", fails)
        with pytest.raises(MoverError, match="Input/output error"):
            open_regular_file(str(file), direct_io=False)
    assert os.listdir("/proc/self/fd") == before
