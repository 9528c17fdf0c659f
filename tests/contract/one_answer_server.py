"""A server that gives every request of a kind the same raw answer, or none: what no real S3 server does on cue.

Threading: a thread for the listening socket and one per connection; ``close`` ends them all.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Self

HANG = None
"""Take the request and say nothing."""
RESET = b"RST"
"""Take the request and reset the connection."""


def answer(status: str, body: bytes = b"", *, length: int | None = None, **headers: str) -> bytes:
    """Return an HTTP answer; ``length`` is what it claims to be long."""
    lines = [f"HTTP/1.1 {status}", "Connection: close", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def error(status: str, code: str, more: str = "") -> bytes:
    """Return S3's way to say no."""
    return answer(status, f"<Error><Code>{code}</Code><Message>Said so.</Message>{more}</Error>".encode())


@contextlib.contextmanager
def dead_address() -> Iterator[tuple[str, int]]:
    """An address that answers no SYN: its listener's queue is full."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            queued = sockets.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(listener.getsockname())
        yield listener.getsockname()


class OneAnswerServer:
    """Listens on a fresh port of this machine. Use as a context manager."""

    def __init__(self, answer: bytes | None, **by_method: bytes) -> None:
        """``by_method``: the answers to requests of other methods, such as ``HEAD``."""
        self._answer = answer
        self._by_method = by_method
        self.requests: list[bytes] = []
        """The heads of all requests."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        received = b""
        with contextlib.suppress(OSError):
            while b"\r\n\r\n" not in received:
                got = connection.recv(65536)
                if not got:
                    return
                received += got
            with self._lock:
                self.requests.append(received.partition(b"\r\n\r\n")[0])
            answer = self._by_method.get(received.split(b" ")[0].decode(), self._answer)
            if answer is HANG:
                connection.recv(1 << 20)
            elif answer is RESET:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            else:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
