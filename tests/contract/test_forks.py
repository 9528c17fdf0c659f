"""A forked child that collects what it has inherited, and ends, does no harm to movers of NIXL and KvikIO, nor they
to it.

As a program (``python -m tests.contract.test_forks CONTENT TIER MOVER...``) this is the process that forks while a
transfer is under way (KvikIO: has ended): pytest's own is not to fork beside NIXL's threads.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.movers.base import Mover, Op, Transfer, TransferState, open_file
from nixl_offload.movers.kvikio import KvikioMover
from nixl_offload.movers.nixl import PLUGINS, NixlMover
from nixl_offload.movers.select import make_object_mover
from tests.contract.emulation.build import Control
from tests.contract.object_rigs import PREFIX
from tests.contract.suites.mover_rig import MIB, HostMemory, MemoryRig, extents
from tests.s3.servers import RcloneServer

UNHARMED = {"child": "ended with 0", "begun before": "done", "afterwards": "done"}
WAIT_S = 60.0
"""Long: on a busy machine it takes a child many seconds to collect its garbage and to end."""
ALL = extents([0], MIB)


# What forks


class Work:
    """A mover, memory, and a MiB in a file or an object that is read into it."""

    def __init__(self, name: str, target: str, tier: dict[str, Any]) -> None:
        if name == "obj":
            mover: Mover = make_object_mover(name, S3Config.model_validate(tier))
        else:
            mover = KvikioMover(2, close_timeout_s=1.0) if name == "kvikio" else NixlMover(PLUGINS[name])
        self.rig = MemoryRig(mover, HostMemory(MIB))
        self.target = (
            mover.open_object(target, MIB) if name == "obj" else open_file(mover, target, MIB, direct_io=False)
        )

    def begin(self) -> Transfer:
        """Begin to read all of it."""
        self.rig.set_memory(0)
        return self.rig.mover.submit(Op.READ, self.rig.memory_id, ALL, self.target, ALL)

    def end(self, transfer: Transfer, content: bytes) -> str:
        """Wait, and say what has become of it."""
        self.rig.wait(transfer, timeout_s=WAIT_S)
        if transfer.state is not TransferState.DONE:
            return f"{transfer.state.value}: {transfer.error}"
        return "done" if self.rig.memory.tobytes() == content else "other bytes"


def fork(name: str, target: str, content: bytes, tier: dict[str, Any]) -> dict[str, str]:
    """Say how a child has ended, and what became of the parent's transfers."""
    try:
        held = [Work(name, target, tier)]
    except MoverUnavailableError as error:
        return {"refused": str(error)}
    lives = weakref.ref(held[0].rig.mover)
    under_way = [held[0].begin()]
    if name == "kvikio":  # its threads do not survive a fork, and a transfer under way would keep the mover
        held[0].end(under_way[0], content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is the point here
        child = os.fork()
    if child == 0:
        signal.alarm(round(2 * WAIT_S))  # whoever waits for it may be killed
        held.clear()
        under_way.clear()
        gc.collect()
        code = 0 if lives() is not None else 3
        if name == "kvikio":
            os._exit(code)  # the library's own destructors wait for its threads, for ever
        sys.exit(code)
    found = {
        "child": end_of(child),
        "begun before": held[0].end(under_way[0], content),
        "afterwards": held[0].end(held[0].begin(), content),
    }
    held[0].rig.mover.close()
    return found


def end_of(child: int) -> str:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def main(path: str, tier: str, *movers: str) -> None:
    if "kvikio" in movers:  # KvikIO would load the one of NVIDIA's wheel
        ctypes.CDLL("libcufile.so.0", mode=ctypes.RTLD_GLOBAL)
    content = Path(path).read_bytes()
    targets = {name: "it" if name == "obj" else path for name in movers}
    found = {name: fork(name, targets[name], content, json.loads(tier)) for name in movers}
    print(json.dumps(found), flush=True)


# Tests


def forked_with(
    *movers: str, tmp_path: Path, libraries: Sequence[Path], environment: Mapping[str, str], tier: Mapping[str, Any]
) -> dict[str, Any]:
    """What the program says of these movers; the content to be read is at ``tmp_path``."""
    known = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
    paths = os.pathsep.join([*map(str, libraries), *known])
    told = subprocess.run(
        [sys.executable, "-m", "tests.contract.test_forks", str(tmp_path / "content"), json.dumps(tier), *movers],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "NIXL_LOG_LEVEL": "FATAL", **environment, "LD_LIBRARY_PATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    )
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def test_a_child_that_ends_leaves_nixl_alone(tmp_path: Path, cufile_emulation: Path) -> None:
    """To destroy an agent there hangs or crashes the child (OBJ, GDS_MT), or takes the parent's completions away, so
    that a transfer never ends (io_uring).
    """
    content = secrets.token_bytes(MIB)
    (tmp_path / "content").write_bytes(content)
    movers = ["posix_aio", "posix_uring", "gds_mt", "obj"]
    with RcloneServer() as server:
        server.write(f"{PREFIX}/it", content)
        environment = {**server.environment, "CUFILE_EMULATION_CONTROL": str(cufile_emulation / "control")}
        tier = server.tier(PREFIX, connections=2, request_timeout="5s")
        found = forked_with(
            *movers, tmp_path=tmp_path, libraries=[cufile_emulation], environment=environment, tier=tier
        )
    if "refused" in found["posix_uring"]:  # as containers do
        del found["posix_uring"]
        movers.remove("posix_uring")
    assert found == dict.fromkeys(movers, UNHARMED)


def test_a_child_leaves_the_files_that_cufile_knows(
    tmp_path: Path, cufile_emulation: Path, driver_emulation: Path
) -> None:
    """KvikIO's handles, where they are collected, tell cuFile that the file is to be forgotten."""
    pytest.importorskip("kvikio")
    (tmp_path / "content").write_bytes(secrets.token_bytes(MIB))
    control = Control(cufile_emulation / "control")
    control.reset()
    environment = {"CUFILE_EMULATION_CONTROL": str(cufile_emulation / "control"), "KVIKIO_COMPAT_MODE": "OFF"}
    files = control["files"]
    libraries = [driver_emulation, cufile_emulation]
    found = forked_with("kvikio", tmp_path=tmp_path, libraries=libraries, environment=environment, tier={})
    assert found == {"kvikio": UNHARMED}
    assert control["files"] == files


if __name__ == "__main__":
    main(*sys.argv[1:])
