"""GETs of presigned addresses, straight into the caller's memory, over HTTP/1.1 connections of our own.

Clients build bodies in buffers of theirs, which costs more than the network: docs/decisions/0011-s3-measurements.md.
Threading: any thread; a connection serves one call at a time. Ownership: a call holds the caller's memory no longer
than it lasts. Whatever is not an answer with exactly the bytes asked for is left to the client that signed.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from nixl_offload.stores.s3 import proxy_of

logger = logging.getLogger(__name__)

PAUSE_S: Final = 5.0
"""After a request without a whole answer none is tried for so long: a server that hangs shall not be asked twice."""
KEEP_S: Final = 20.0
"""A connection that has rested for longer is not used again: what is between us and the server may have dropped it."""
CONNECT_S: Final = 0.5
"""How long an address may take to connect while the host has another one."""
_HEAD_BYTES: Final = 16 << 10
"""An answer's status line and headers are no longer, or it is left alone."""
_END: Final = b"\r\n\r\n"


class DirectGets:
    """GETs at one server. ``tls`` makes the context for https, when it is needed first."""

    def __init__(self, *, timeout_s: float, tls: Callable[[], ssl.SSLContext]) -> None:
        """``timeout_s``: of one request. Where the environment has a proxy for the server, all reads are refused."""
        self._timeout_s = timeout_s
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._idle: deque[tuple[float, socket.socket]] = deque()
        """Since when, and what; the last to come is the first to go."""
        self._open: set[socket.socket] = set()
        self._dead: set[Any] = set()
        """Addresses that did not connect when they were last tried."""
        self._refusing = False
        self._not_before_s = 0.0

    @property
    def refusing(self) -> bool:
        """Whether ``read_into`` would try nothing now."""
        return self._refusing or time.monotonic() < self._not_before_s

    def refuse(self) -> None:
        """Try nothing any more."""
        self._refusing = True

    def read_into(self, url: str, offset: int, memory: memoryview) -> int | None:
        """Fill ``memory``, bytes and not empty, from ``offset`` of the object on.

        Returns None when it is filled. Else what it holds is undefined: the status of an answer that was left alone, or
        0 if there was no whole answer.
        """
        parts = urlsplit(url)
        request = (
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Range: bytes={offset}-{offset + memory.nbytes - 1}\r\nAccept-Encoding: identity\r\n\r\n"
        ).encode("ascii")
        try:
            while (kept := self._kept()) is not None:
                with suppress(BrokenPipeError, ConnectionResetError):  # the server had closed it
                    return self._get(kept, request, offset, memory)
            return self._get(self._connect(parts), request, offset, memory)
        except (OSError, ValueError) as error:
            logger.debug("a direct GET is left to the client: %s", type(error).__name__)
            self._not_before_s = time.monotonic() + PAUSE_S
            return 0

    def close(self) -> None:
        """Calls in other threads end soon."""
        self._refusing = True
        for opened in list(self._open):
            with suppress(OSError):
                # Not SSLSocket's, which takes TLS off first: a read in another thread would get what is encrypted.
                socket.socket.shutdown(opened, socket.SHUT_RDWR)
        self._drop_idle()

    def _kept(self) -> socket.socket | None:
        """A connection that rests, and on which nothing has come since the last answer."""
        while self._idle:
            with suppress(IndexError):  # another thread was quicker
                since_s, kept = self._idle.pop()
                if time.monotonic() - since_s < KEEP_S and _is_silent(kept):
                    return kept
                self._drop(kept)
        return None

    def _connect(self, parts: SplitResult) -> socket.socket:
        if proxy_of(parts):
            self._refusing = True
            raise OSError("behind a proxy")
        host, tls = parts.hostname or "", parts.scheme == "https"
        opened = self._dial(host, parts.port or (443 if tls else 80))
        try:
            opened.settimeout(self._timeout_s)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls:
                self._context = self._context or self._tls()
                opened = self._context.wrap_socket(opened, server_hostname=host)
            else:
                # The kernel's own timeouts: Python's cost a poll for each call. With TLS only those work.
                opened.setblocking(True)
                limit = struct.pack("ll", int(self._timeout_s), int(self._timeout_s % 1 * 1e6))
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    opened.setsockopt(socket.SOL_SOCKET, option, limit)
        except BaseException:
            opened.close()
            raise
        self._open.add(opened)
        if self._refusing:  # closed meanwhile
            self._drop(opened)
            raise OSError("closed")
        return opened

    def _dial(self, host: str, port: int) -> socket.socket:
        """Connect to an address of ``host``; to those that were dead after the others."""
        addresses = [each[4] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        *others, last = sorted(addresses, key=self._dead.__contains__)
        for address in others:
            with suppress(OSError):
                return self._dial_one(address, min(CONNECT_S, self._timeout_s))
        return self._dial_one(last, self._timeout_s)

    def _dial_one(self, address: Any, timeout_s: float) -> socket.socket:
        self._dead.add(address)
        opened = socket.create_connection(address[:2], timeout_s)
        self._dead.discard(address)
        return opened

    def _get(self, connection: socket.socket, request: bytes, offset: int, memory: memoryview) -> int | None:
        """One exchange, as ``read_into``. The connection is kept if it can serve another."""
        deadline_s, keeps = time.monotonic() + self._timeout_s, False
        try:
            head, begin, got = self._head(connection, request, deadline_s)
            status, length, may_keep = _parse(bytes(head[:begin]), offset, memory.nbytes)
            if length != memory.nbytes:
                return status
            filled = got - begin
            if filled > length:
                raise ValueError("more than was announced")
            memory[:filled] = head[begin:got]
            while filled < length:
                count = connection.recv_into(memory[filled:])
                if not count or time.monotonic() > deadline_s:
                    raise OSError("the body ended early, or came too slowly")
                filled += count
            keeps = may_keep and not self._refusing
            return None
        finally:
            if keeps:
                self._idle.append((time.monotonic(), connection))
                if self._refusing:  # closed meanwhile
                    self._drop_idle()
            else:
                self._drop(connection)

    def _head(self, connection: socket.socket, request: bytes, deadline_s: float) -> tuple[memoryview, int, int]:
        """Return a buffer, where the body begins in it, and how much is in it."""
        buffer = bytearray(_HEAD_BYTES)
        view = memoryview(buffer)
        connection.sendall(request)
        got = connection.recv_into(view)
        if not got:
            raise ConnectionResetError
        while (end := buffer.find(_END, 0, got)) < 0:
            count = connection.recv_into(view[got:]) if got < _HEAD_BYTES else 0
            if not count or time.monotonic() > deadline_s:
                raise OSError("no whole answer")
            got += count
        return view, end + len(_END), got

    def _drop_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._drop(self._idle.pop()[1])

    def _drop(self, connection: socket.socket) -> None:
        self._open.discard(connection)
        connection.close()


def _is_silent(connection: socket.socket) -> bool:
    """Whether nothing waits to be read, not even an end: what came unasked must not pass for the next answer."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return not poller.poll(0)


def _parse(head: bytes, offset: int, wanted: int) -> tuple[int, int | None, bool]:
    """Return an answer's status, the length of its body if that is what was asked for, and whether the connection can
    be kept. Raises ValueError for what is no such answer.
    """
    first, *lines = head[: -len(_END)].split(b"\r\n")
    version, code, *_ = first.split(b" ", 2)
    if version not in {b"HTTP/1.1", b"HTTP/1.0"} or len(code) != 3:
        raise ValueError("not HTTP/1")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or (name.lower() in fields and name.lower() in {b"content-length", b"content-range"}):
            raise ValueError("not a header")
        fields[name.lower()] = value.strip()
    status, length = int(code), None
    if b"transfer-encoding" not in fields and fields.get(b"content-encoding", b"identity") == b"identity":
        announced = fields.get(b"content-length", b"")
        span = fields.get(b"content-range", b"")
        fits = span.startswith(b"bytes %d-%d/" % (offset, offset + wanted - 1))
        if not span:  # some servers answer 200 even to a range, and one that says nothing more may be the whole object
            fits = status == 200 and not offset
        if fits and status in {200, 206} and announced.isdigit():
            length = int(announced)
    return status, length, version == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close"
