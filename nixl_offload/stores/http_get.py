"""GETs of presigned URLs, directly into the caller's memory, over HTTP/1.1 connections of our own.

S3 clients copy bodies through their own buffers, which costs more than the network: docs/decisions/0009-s3-clients.md.
Threading: any thread; a connection serves one call at a time. Ownership: a call uses the caller's memory only until it
returns. If an answer is not exactly the requested bytes, the caller reads by its client instead.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final
from urllib.parse import SplitResult, urlsplit

from nixl_offload.stores.s3 import proxy_of

logger = logging.getLogger(__name__)

PAUSE_S: Final = 5.0
"""Length of a pause of direct GETs. Without it a server that hangs would be asked twice per read."""
KEEP_S: Final = 20.0
"""A connection that was idle for longer is not reused: a firewall may have dropped it."""
CONNECT_S: Final = 1.0
"""Time limit to connect to one address. Some addresses of a host may be dead."""
_HEAD_BYTES: Final = 16 << 10
"""Size limit of an answer's status line and headers."""
_END: Final = b"\r\n\r\n"


class DirectGets:
    """GETs at one server. They pause after a request without a whole answer, and behind a proxy."""

    def __init__(self, *, timeout_s: float, tls: Callable[[], ssl.SSLContext]) -> None:
        """``timeout_s``: the limit of one request. ``tls`` is called once, at the first https connection."""
        self._timeout_s = timeout_s
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._idle: deque[tuple[float, socket.socket]] = deque()
        """Idle connections and when their last answer ended, the latest last."""
        self._not_before_s = 0.0

    @property
    def is_off(self) -> bool:
        """Whether direct GETs are off now: during a pause, or after ``close``."""
        return time.monotonic() < self._not_before_s

    def pause(self) -> None:
        """Turn direct GETs off for ``PAUSE_S``."""
        self._not_before_s = max(self._not_before_s, time.monotonic() + PAUSE_S)

    def close(self) -> None:
        """Turn direct GETs off for good, and close idle connections."""
        self._not_before_s = math.inf
        with suppress(IndexError):
            while True:
                self._idle.pop()[1].close()

    def read_into(self, url: str, offset: int, memory: memoryview) -> bool:
        """Fill ``memory`` (bytes, not empty) from ``offset`` of the object on.

        Returns False if the answer was of no use. The content of ``memory`` is undefined then.
        """
        parts = urlsplit(url)
        request = (
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Range: bytes={offset}-{offset + memory.nbytes - 1}\r\nAccept-Encoding: identity\r\n\r\n"
        ).encode("ascii")
        try:
            while (kept := self._kept()) is not None:
                with suppress(BrokenPipeError, ConnectionResetError):  # the server has closed it; try the next
                    return self._exchange(kept, request, offset, memory)
            return self._exchange(self._connect(parts), request, offset, memory)
        except (OSError, ValueError) as error:
            logger.debug("a direct GET is left to the client: %s", type(error).__name__)
            self.pause()
            return False

    def _kept(self) -> socket.socket | None:
        """Return an idle connection that is still open and has no unread data; None without one."""
        with suppress(IndexError):
            while True:
                since_s, kept = self._idle.pop()
                poller = select.poll()
                poller.register(kept, select.POLLIN)
                if time.monotonic() - since_s < KEEP_S and not poller.poll(0):
                    return kept
                kept.close()
        return None

    def _connect(self, parts: SplitResult) -> socket.socket:
        if proxy_of(parts):
            raise OSError("behind a proxy")
        host, is_tls = parts.hostname or "", parts.scheme == "https"
        port, limit_s = parts.port or (443 if is_tls else 80), min(CONNECT_S, self._timeout_s)
        opened = socket.create_connection((host, port), limit_s)  # tries the host's addresses one after the other
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.settimeout(self._timeout_s)
            if is_tls:
                self._context = self._context or self._tls()
                return self._context.wrap_socket(opened, server_hostname=host)
        except BaseException:
            opened.close()
            raise
        return opened

    def _exchange(self, connection: socket.socket, request: bytes, offset: int, memory: memoryview) -> bool:
        """Send one request and read its answer; returns as ``read_into``. Keeps the connection if it is reusable."""
        deadline_s, keeps = time.monotonic() + self._timeout_s, False
        buffer = bytearray(_HEAD_BYTES)
        view = memoryview(buffer)
        try:
            connection.sendall(request)
            got, end = 0, -1
            while end < 0:
                count = connection.recv_into(view[got:]) if got < _HEAD_BYTES else 0
                if not count or time.monotonic() > deadline_s:
                    raise OSError("no whole answer") if got else ConnectionResetError
                got += count
                end = buffer.find(_END, 0, got)
            begin = end + len(_END)
            is_wanted, may_keep = _parse(bytes(view[:end]), offset, memory.nbytes)
            if not is_wanted:
                return False
            filled = got - begin
            if filled > memory.nbytes:
                raise ValueError("more than was announced")
            memory[:filled] = view[begin:got]
            while filled < memory.nbytes:
                count = connection.recv_into(memory[filled:])
                if not count or time.monotonic() > deadline_s:
                    raise OSError("the body ended early, or came too slowly")
                filled += count
            keeps = may_keep
            return True
        finally:
            if keeps:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()
            if self._not_before_s == math.inf:  # closed while this request ran
                self.close()


def _parse(head: bytes, offset: int, wanted: int) -> tuple[bool, bool]:
    """Return whether an answer's body is the ``wanted`` bytes from ``offset`` on, and whether the connection can be
    kept. Raises ValueError if ``head`` is not HTTP/1.
    """
    first, *lines = head.split(b"\r\n")
    version, code, *_ = first.split(b" ", 2)
    if version not in {b"HTTP/1.1", b"HTTP/1.0"} or len(code) != 3:
        raise ValueError("not HTTP/1")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or (name.lower() in fields and name.lower() in {b"content-length", b"content-range"}):
            raise ValueError("not a header")
        fields[name.lower()] = value.strip()
    status, span = int(code), fields.get(b"content-range")
    if span:
        is_wanted = status in {200, 206} and span.startswith(b"bytes %d-%d/" % (offset, offset + wanted - 1))
    else:  # some servers ignore a range and answer 200: without Content-Range that may be the whole object
        is_wanted = status == 200 and not offset
    is_wanted &= fields.get(b"content-length") == b"%d" % wanted and b"transfer-encoding" not in fields
    is_wanted &= fields.get(b"content-encoding", b"identity") == b"identity"
    return is_wanted, version == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close"
