"""GETs of presigned URLs, directly into the caller's memory, by the standard library's HTTP.

S3 clients copy bodies through their own buffers, which costs more than the network: docs/decisions/0009-s3-clients.md.
Threading: any thread; a connection serves one call at a time. Ownership: a call uses the caller's memory only until it
returns. If an answer is not exactly the requested bytes, the caller reads by its client instead.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException, HTTPResponse
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from nixl_offload.stores.s3 import CONNECT_TIMEOUT_S, proxy_of

logger = logging.getLogger(__name__)

PAUSE_S: Final = 5.0
"""Length of a pause of direct GETs. Without it a server that hangs would be asked twice per read."""
KEEP_S: Final = 20.0
"""A connection that was idle for longer is not reused: a firewall may have dropped it."""
NEXT_ADDRESS_S: Final = 0.5
"""If an address of a host has not answered for this long, the next one is tried beside it (RFC 8305)."""


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
        except (OSError, ValueError, HTTPException, RuntimeError) as error:  # RuntimeError: no thread can be started
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
        port, limit_s = parts.port or (443 if is_tls else 80), min(CONNECT_TIMEOUT_S, self._timeout_s)
        opened = asyncio.run(asyncio.wait_for(_open(host, port), limit_s))
        try:
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
        stream: Any = _Stream(connection, time.monotonic() + self._timeout_s)
        answer, keeps = HTTPResponse(stream, method="GET"), False
        try:
            connection.sendall(request)
            answer.begin()
            if not _is_wanted(answer, offset, memory.nbytes):
                return False
            if answer.readinto(memory) < memory.nbytes:
                raise OSError("the body ended early")
            keeps = not answer.will_close
            return True
        finally:
            answer.close()
            if keeps:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()
            if self._not_before_s == math.inf:  # closed while this request ran
                self.close()


class _Stream(socket.SocketIO):
    """What an answer is read from. It raises TimeoutError after a deadline, however often a byte comes."""

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        super().__init__(connection, "r")
        self._deadline_s = deadline_s

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readinto(self, memory: Any) -> int | None:
        if time.monotonic() > self._deadline_s:
            raise TimeoutError
        return super().readinto(memory)


async def _open(host: str, port: int) -> socket.socket:
    """Connect to whichever address of a host answers first."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, host, port, happy_eyeballs_delay=NEXT_ADDRESS_S)
    opened: socket.socket = transport.get_extra_info("socket").dup()
    transport.close()
    return opened


def _is_wanted(answer: HTTPResponse, offset: int, wanted_bytes: int) -> bool:
    """Return whether an answer's body is the bytes from ``offset`` on."""
    fields, span = answer.headers, answer.headers["Content-Range"]
    if span:
        is_range = answer.status in {200, 206} and span.startswith(f"bytes {offset}-{offset + wanted_bytes - 1}/")
    else:  # some servers ignore a range and answer 200: without Content-Range that may be the whole object
        is_range = answer.status == 200 and not offset
    is_plain = "Transfer-Encoding" not in fields and fields.get("Content-Encoding", "identity") == "identity"
    return is_range and is_plain and fields.get_all("Content-Length") == [str(wanted_bytes)]
