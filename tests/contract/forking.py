"""A process with movers that forks while a transfer is under way (KvikIO: has ended). Run by ``test_forks.py``, apart.

Its children drop and collect what they have inherited, and end: as scripts do, with the interpreter, or at once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import MoverUnavailableError
from nixl_offload.movers.base import Mover, Op, Transfer, TransferState, open_file
from nixl_offload.movers.kvikio import KvikioMover
from nixl_offload.movers.nixl import PLUGINS, NixlMover
from nixl_offload.movers.select import make_object_mover
from tests.contract.suites.mover_rig import MIB, HostMemory, extents

WAIT_S = 60.0
"""Long: on a busy machine it takes a child many seconds to collect its garbage and to end."""
_ALL = extents([0], MIB)


class Work:
    """A mover, memory, and a MiB in a file or an object that is read into it."""

    def __init__(self, name: str, target: str, tier: dict[str, Any]) -> None:
        self.mover = _make(name, tier)
        self._memory = HostMemory(MIB)
        self._region = self.mover.register_memory(self._memory.region)
        if name == "obj":
            self._file = self.mover.open_object(target, MIB)
        else:
            self._file = open_file(self.mover, target, MIB, direct_io=False)

    def begin(self) -> Transfer:
        """Begin to read all of it."""
        self._memory.write(0)
        return self.mover.submit(Op.READ, self._region, _ALL, self._file, _ALL)

    def end(self, transfer: Transfer, content: bytes) -> str:
        """Wait, and say what has become of it."""
        until_s = time.monotonic() + WAIT_S
        while self.mover.poll(transfer) is TransferState.PENDING and time.monotonic() < until_s:
            time.sleep(0.001)
        if transfer.state is not TransferState.DONE:
            return f"{transfer.state.value}: {transfer.error}"
        return "done" if self._memory.read().tobytes() == content else "other bytes"


def _make(name: str, tier: dict[str, Any]) -> Mover:
    if name == "kvikio":
        return KvikioMover(2, close_timeout_s=1.0)
    if name == "obj":
        return make_object_mover(name, S3Config.model_validate(tier))
    return NixlMover(PLUGINS[name], close_timeout_s=1.0)


def tell(name: str, target: str, content: bytes, tier: dict[str, Any]) -> dict[str, str]:
    """Say how a child has ended, and what became of the parent's transfers."""
    try:
        held = [Work(name, target, tier)]
    except MoverUnavailableError as error:
        return {"refused": str(error)}
    lives = weakref.ref(held[0].mover)
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
        "child": _end_of(child),
        "begun before": held[0].end(under_way[0], content),
        "afterwards": held[0].end(held[0].begin(), content),
    }
    held[0].mover.close()
    return found


def _end_of(child: int) -> str:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung"


def main(content: str, tier: str, *movers: str) -> None:
    """Print as JSON what ``tell`` says of each mover; all read what is in ``content``, ``obj`` as the object ``it``."""
    if "kvikio" in movers:
        ctypes.CDLL("libcufile.so.0", mode=ctypes.RTLD_GLOBAL)  # or KvikIO would load the one of NVIDIA's wheel
    data = Path(content).read_bytes()
    found = {name: tell(name, "it" if name == "obj" else content, data, json.loads(tier)) for name in movers}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
