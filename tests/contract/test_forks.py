"""A forked child that collects what it has inherited, and ends, does no harm to movers of NIXL and KvikIO, nor they
to it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.suites.mover_rig import MIB
from tests.s3.servers import RcloneServer

from .emulation.build import Control
from .object_rigs import PREFIX

UNHARMED = {"child": "ended with 0", "begun before": "done", "afterwards": "done"}


@pytest.fixture
def content(tmp_path: Path) -> Path:
    """A file with what is read."""
    path = tmp_path / "content"
    path.write_bytes(secrets.token_bytes(MIB))
    return path


def fork_with(
    *movers: str,
    content: Path,
    libraries: Sequence[Path],
    environment: Mapping[str, str],
    tier: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Let ``forking.py`` tell, in a process of its own: this one is not to fork beside NIXL's threads."""
    known = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    told = subprocess.run(
        [sys.executable, "-m", "tests.contract.forking", str(content), json.dumps(dict(tier or {})), *movers],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "NIXL_LOG_LEVEL": "FATAL",
            **environment,
            "LD_LIBRARY_PATH": os.pathsep.join([*map(str, libraries), *known]),
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    )
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def test_a_child_that_ends_leaves_nixl_alone(content: Path, cufile_emulation: Path) -> None:
    """To destroy an agent there hangs or crashes the child (OBJ, GDS_MT), or takes the parent's completions away, so
    that a transfer never ends (io_uring).
    """
    with RcloneServer() as server:
        server.write(f"{PREFIX}/it", content.read_bytes())
        environment = {**server.environment, "CUFILE_EMULATION_CONTROL": str(cufile_emulation / "control")}
        movers = ["posix_aio", "posix_uring", "gds_mt", "obj"]
        tier = server.tier(PREFIX, connections=2, request_timeout="5s")
        found = fork_with(*movers, content=content, libraries=[cufile_emulation], environment=environment, tier=tier)
    if "refused" in found["posix_uring"]:  # as containers do
        del found["posix_uring"]
        movers.remove("posix_uring")
    assert found == dict.fromkeys(movers, UNHARMED)


def test_a_child_leaves_the_files_that_cufile_knows(
    content: Path, cufile_emulation: Path, driver_emulation: Path
) -> None:
    """KvikIO's handles, where they are collected, tell cuFile that the file is to be forgotten."""
    pytest.importorskip("kvikio")
    control = Control(cufile_emulation / "control")
    control.reset()
    environment = {"CUFILE_EMULATION_CONTROL": str(cufile_emulation / "control"), "KVIKIO_COMPAT_MODE": "OFF"}
    libraries = [driver_emulation, cufile_emulation]
    files = control["files"]
    found = fork_with("kvikio", content=content, libraries=libraries, environment=environment)
    assert found == {"kvikio": UNHARMED}
    assert control["files"] == files
