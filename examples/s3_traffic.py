"""A pass-through before an S3 server that counts what goes by: requests by method, and bytes.

Threading: two threads for each connection; ``traffic`` from any thread. Ownership: ``close`` (the end of the ``with``)
ends the listener and every connection. It changes nothing; a request whose body has no length ends its connection.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

_PIECE_BYTES = 1 << 18
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has gone by. Bytes are those of the wire, heads included."""

    heads: int = 0
    gets: int = 0
    puts: int = 0
    others: int = 0
    bytes_to_server: int = 0
    bytes_from_server: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        """Return what has gone by after ``earlier`` was taken."""
        return Traffic(
            self.heads - earlier.heads,
            self.gets - earlier.gets,
            self.puts - earlier.puts,
            self.others - earlier.others,
            self.bytes_to_server - earlier.bytes_to_server,
            self.bytes_from_server - earlier.bytes_from_server,
        )


class CountingProxy:
    """Listens on a fresh port of this machine and passes everything on to ``port``. Listings count as others."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="s3-traffic", daemon=True).start()

    def traffic(self) -> Traffic:
        """Return what has gone by so far."""
        with self._lock:
            counts = Counter(self._counts)
        known = {"heads": counts.pop("HEAD", 0), "gets": counts.pop("GET", 0), "puts": counts.pop("PUT", 0)}
        to_server, from_server = counts.pop("to", 0), counts.pop("from", 0)
        return Traffic(**known, others=counts.total(), bytes_to_server=to_server, bytes_from_server=from_server)

    def close(self) -> None:
        """Stop listening and break all connections. Idempotent."""
        _end(self._listener)
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _end(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:
                    _end(client)
                    continue
                for connection in (client, server):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    with self._lock:
                        self._open.add(connection)
                for target in (self._requests, self._answers):
                    threading.Thread(target=self._pass, args=(target, client, server), daemon=True).start()

    def _pass(self, target: Callable[..., None], client: socket.socket, server: socket.socket) -> None:
        try:
            target(client, server)
        except (OSError, ValueError):
            pass  # a connection ended, or is ended here
        finally:
            for connection in (client, server):
                _end(connection)
                with self._lock:
                    self._open.discard(connection)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        pending = b""
        while True:
            while (end := pending.find(b"\r\n\r\n")) < 0:
                piece = client.recv(_PIECE_BYTES)
                if not piece or len(pending) > _HEAD_BYTES:
                    return
                pending += piece
            head, pending = pending[: end + 4], pending[end + 4 :]
            self._count(_method(head), 1)
            self._send(server, head)
            left = _body_bytes(head)
            while left:
                piece, pending = (pending, b"") if pending else (client.recv(_PIECE_BYTES), b"")
                if not piece:
                    return
                piece, pending = piece[:left], piece[left:]
                left -= len(piece)
                self._send(server, piece)

    def _send(self, server: socket.socket, piece: bytes) -> None:
        self._count("to", len(piece))
        server.sendall(piece)

    def _answers(self, client: socket.socket, server: socket.socket) -> None:
        while piece := server.recv(_PIECE_BYTES):
            self._count("from", len(piece))
            client.sendall(piece)

    def _count(self, what: str, by: int) -> None:
        with self._lock:
            self._counts[what] += by


def _method(head: bytes) -> str:
    method, _, target = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    return "LIST" if method == "GET" and "list-type=" in target else method


def _body_bytes(head: bytes) -> int:
    fields = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n")[1:])
    if b"transfer-encoding" in fields:
        raise ValueError("a body without a length")
    return int(fields.get(b"content-length", b"0"))


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
