"""Rules for every test: GPU tests run only where a GPU is, and no test leaves a thread or a child process behind."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.stored_rig import Cli

_GRACE_S = 30.0
_FOREIGN_THREADS = ("TMonitor",)
"""Classes of daemon threads that third parties start once per process and never stop (tqdm)."""
_FAULT_PROXY = "fault-proxy"
"""Threads of ``tests.s3.proxy``, which joins them. A fixture of a whole module may own it."""
_FOREIGN_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


_NOT_MEASURED = ("model", "vllm")
"""Folders whose tests run without coverage: tracing doubles the time of the first, and the second's engines are child
processes, which are not traced anyway."""


def pytest_configure(config: pytest.Config) -> None:
    """Have SIGINT end what a test interrupts, also where a shell started all this in the background; and let examples
    that hypothesis draws take as long as a busy machine needs.
    """
    config.addinivalue_line("markers", "no_cover: runs without coverage (pytest-cov's, which may not be installed)")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(ImportError):  # on a GPU machine without a registry
        from hypothesis import HealthCheck, settings

        settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("busy")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes longest first, so that workers end together; skip ``gpu`` tests on a machine without one."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in _NOT_MEASURED:
            item.add_marker("no_cover")
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted or not (reason := _why_no_gpu()):
        return
    for item in wanted:
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs ``nixl-offload``; keeps what was printed."""
    from tests.unit.stored_rig import Cli

    return Cli(capsys)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail the test when a thread or a child process that it started is alive some seconds after it."""
    threads, children = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + _GRACE_S
    while True:
        new_threads = [each for each in set(threading.enumerate()) - threads if each.name != _FAULT_PROXY]
        left = [each.name for each in new_threads if type(each).__name__ not in _FOREIGN_THREADS]
        new = [name for pid, name in _children().items() if pid not in children]
        left += [name for name in new if not any(foreign in name for foreign in _FOREIGN_CHILDREN)]
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    if left:
        pytest.fail(f"left behind: {', '.join(left)}")


def _why_no_gpu() -> str:
    """What stands against running ``gpu`` tests here, or nothing."""
    try:
        import torch
    except ImportError as error:
        return f"no CUDA device: {error}"
    if torch.version.cuda is None:
        return "no CUDA device: this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device: torch finds none (what does nvidia-smi say?)"
    return ""


def _children() -> dict[int, str]:
    """Return pid and command line of this process's children, zombies included."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found[int(pid)] = f"process {pid} ({command.strip()[:120] or 'zombie'})"
    return found
