"""A device for tests, in host memory: streams that work on threads of their own, their fences, and gates by which a
test holds up a stream.

Threading: ``run`` from any one thread per stream, as for a real one; gates and ``close`` by the test. As on CUDA, a
stream whose work has raised does nothing more, and its fences raise, until ``synchronize`` has said so.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from nixl_offload.engine.streams import READY, Device, Fence
from nixl_offload.movers.base import MemoryKind
from tests.unit.engine_rig import until

T = TypeVar("T")
LIMIT_S = 20.0
"""Work that takes longer hangs; all work here is small."""


class ThreadedFence:
    """Done when its stream reaches it."""

    def __init__(self, stream: ThreadedStream) -> None:
        self.passed = threading.Event()
        self.error: BaseException | None = None
        self._stream = stream

    def done(self) -> bool:
        """See Fence. Raises the error that the stream's work raised before it."""
        if not self.passed.is_set():
            return False
        if self.error is not None:
            self._stream.is_told = True
            raise RuntimeError("the device is out of order") from self.error
        return True


class ThreadedStream:
    """One thread that does what is queued, in order."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._gates: list[threading.Event] = []
        self._error: BaseException | None = None
        self.is_told = True
        """Whether a fence or ``synchronize`` has raised the error."""
        self._thread = threading.Thread(target=self._main, name=f"device-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None], behind: Fence = READY) -> ThreadedFence:
        fence = ThreadedFence(self)

        def item() -> None:
            if isinstance(behind, ThreadedFence):
                _await(behind.passed)
            else:
                assert behind.done(), "a fence of another device"
            if self._error is None:
                with torch.inference_mode():
                    work()

        def reached() -> None:
            fence.error = self._error
            fence.passed.set()

        self._queue.put(item)
        self._queue.put(reached)
        return fence

    def synchronize(self) -> None:
        """Wait for all work. Raises the work's error, once."""
        _await(self.run(lambda: None).passed)
        error, self._error = self._error, None
        self.is_told = True
        if error is not None:
            raise error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold up work that is queued within the block until it ends. Earlier work is done when the block begins."""
        gate, reached = threading.Event(), threading.Event()
        self._gates.append(gate)

        def closed() -> None:
            reached.set()
            _await(gate)

        self._queue.put(closed)
        _await(reached)
        try:
            yield
        finally:
            gate.set()

    def release(self) -> None:
        """Open all gates."""
        for gate in self._gates:
            gate.set()

    def close(self) -> None:
        """Open all gates, finish the queued work, and end the thread. Raises an error that was never raised."""
        self.release()
        self._queue.put(None)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"stream {self.name} hangs"
        if self._error is not None and not self.is_told:
            raise self._error

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                item()
            except BaseException as error:  # noqa: BLE001 - told by fences, and by synchronize
                if self._error is None:
                    self._error, self.is_told = error, False
            item = None


class ThreadedDevice(Device):
    """Host memory that plays device memory. Close it, or use it as a context."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), MemoryKind.VRAM)
        self.made: list[ThreadedStream] = []
        """In the order of their creation; the first is the model's."""
        self.compute = self.new_stream()

    def compute_fence(self) -> ThreadedFence:
        return self.compute.run(lambda: None)

    def new_stream(self) -> ThreadedStream:
        stream = ThreadedStream("compute" if not self.made else str(len(self.made)))
        self.made.append(stream)
        return stream

    def release(self) -> None:
        """Open all gates."""
        for stream in self.made:
            stream.release()

    def close(self) -> None:
        for stream in self.made:
            stream.close()

    def __enter__(self) -> ThreadedDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def devices() -> Iterator[ThreadedDevice]:
    """A fixture."""
    with ThreadedDevice() as device:
        yield device


def settled(fence: Fence) -> None:
    """Wait for ``fence``."""
    until(fence.done)


def at_once(steps: Generator[None, None, T]) -> T:
    """Return the result of ``steps``, which must not wait."""
    try:
        next(steps)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("it waits")


def _await(event: threading.Event) -> None:
    if not event.wait(LIMIT_S):
        raise TimeoutError("a stream of the emulated device hangs")
