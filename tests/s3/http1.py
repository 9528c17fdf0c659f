"""As much of HTTP/1.1 as a proxy for S3 needs: heads, framing of bodies, and sockets on an event loop.

Threading: everything on the thread of its event loop. Ownership: a ``Wire`` owns its socket until ``close`` or
``reset``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, unquote

__all__ = ["CHUNKED", "UNTIL_EOF", "Head", "Wire", "operation_of"]

CHUNKED: Final = -1
UNTIL_EOF: Final = -2
_BUFFER_BYTES: Final = 256 << 10
_HEAD_BYTES: Final = 64 << 10
_NO_BODY: Final = (204, 304)
_BUCKET_QUERIES: Final = frozenset(
    ("accelerate", "acl", "cors", "encryption", "lifecycle", "location", "policy", "tagging", "versioning", "uploads")
)


@dataclass(frozen=True, slots=True)
class Head:
    """The first line and the headers of a message, as received."""

    raw: bytes
    first: tuple[str, str, str]
    headers: dict[str, str]

    @classmethod
    def parse(cls, raw: bytes) -> Head:
        """Parse a head that ends with its empty line. A repeated header keeps its last value.

        Raises:
            ConnectionError: That is not HTTP.
        """
        lines = raw[:-4].decode("latin-1").split("\r\n")
        first = lines[0].split(" ", 2)
        if len(first) < 2 or "HTTP/" not in lines[0]:
            raise ConnectionError(f"not HTTP: {lines[0][:80]!r}")
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return cls(raw, (first[0], first[1], first[2] if len(first) > 2 else ""), headers)

    @property
    def status(self) -> int:
        """The status of an answer."""
        return int(self.first[1])

    @property
    def ends_connection(self) -> bool:
        """Whether the sender closes after this message."""
        connection = self.headers.get("connection", "").lower()
        return connection == "close" or (self.first[0] == "HTTP/1.0" and connection != "keep-alive")

    def request_framing(self) -> int:
        """Return the body's length in bytes, or ``CHUNKED``."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return CHUNKED
        return int(self.headers.get("content-length", "0"))

    def answer_framing(self, method: str) -> int:
        """Return the length in bytes of the body that answers ``method``, or ``CHUNKED``, or ``UNTIL_EOF``."""
        if method == "HEAD" or self.status in _NO_BODY or self.status < 200:
            return 0
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return CHUNKED
        length = self.headers.get("content-length")
        return UNTIL_EOF if length is None else int(length)

    def reframed(self, length_bytes: int) -> bytes:
        """Return the head's bytes with ``length_bytes`` for the body's length, whatever its framing was."""
        lines = self.raw[:-4].split(b"\r\n")
        framing = (b"content-length:", b"transfer-encoding:")
        kept = [line for line in lines if not line.lower().startswith(framing)]
        return b"\r\n".join([*kept, b"Content-Length: %d" % length_bytes, b"", b""])


class Wire:
    """A connected socket with a buffer that is read ahead."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = loop
        self._socket = sock
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0

    @classmethod
    async def connect(cls, loop: asyncio.AbstractEventLoop, address: tuple[str, int]) -> Wire:
        """Connect to ``address``.

        Raises:
            OSError: It does not answer.
        """
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
        except BaseException:
            sock.close()
            raise
        return cls(loop, sock)

    async def head(self) -> Head | None:
        """Read the next head; None at the end of the stream.

        Raises:
            ConnectionError: The stream ends, or is no HTTP.
        """
        while (at := bytes(self._buffer[self._start : self._end]).find(b"\r\n\r\n")) < 0:
            if self._end - self._start >= _HEAD_BYTES:
                raise ConnectionError("endless head")
            if not await self._more():
                if self._start == self._end:
                    return None
                raise ConnectionError("stream ends within a head")
        raw = bytes(self._buffer[self._start : self._start + at + 4])
        self._start += at + 4
        return Head.parse(raw)

    async def body(self, framing: int) -> AsyncIterator[tuple[memoryview, bool]]:
        """Read a body piece by piece: (bytes valid until the next piece, whether they are payload and not framing).

        Raises:
            ConnectionError: The stream ends before the body does.
        """
        if framing == CHUNKED:
            while True:
                line = await self._line()
                yield memoryview(line), False
                length = int(line.split(b";")[0], 16)
                async for piece, _ in self.body(length):
                    yield piece, True
                if length:
                    yield memoryview(await self._line()), False
                    continue
                while (line := await self._line()) != b"\r\n":
                    yield memoryview(line), False
                yield memoryview(line), False
                return
        left = framing
        while left:
            if self._start == self._end and not await self._more():
                if framing == UNTIL_EOF:
                    return
                raise ConnectionError("stream ends within a body")
            count = self._end - self._start if framing == UNTIL_EOF else min(left, self._end - self._start)
            piece = self._buffer[self._start : self._start + count]
            self._start += count
            if framing != UNTIL_EOF:
                left -= count
            yield piece, True

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``.

        Raises:
            OSError: The other side is gone.
        """
        if len(data):
            await self._loop.sock_sendall(self._socket, data)

    def ended(self) -> bool:
        """Whether the other side of an idle connection has closed it."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close in order: what was sent arrives."""
        self._socket.close()

    def reset(self) -> None:
        """Close with a reset: what was sent may be lost."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    async def _line(self) -> bytes:
        while (at := bytes(self._buffer[self._start : self._end]).find(b"\r\n")) < 0:
            if self._end - self._start >= _HEAD_BYTES or not await self._more():
                raise ConnectionError("stream ends within a chunk")
        line = bytes(self._buffer[self._start : self._start + at + 2])
        self._start += at + 2
        return line

    async def _more(self) -> bool:
        """Read into the buffer's free end; False at the end of the stream."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._buffer):
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        count = await self._loop.sock_recv_into(self._socket, self._buffer[self._end :])
        self._end += count
        return count > 0


def operation_of(head: Head) -> tuple[str, str]:
    """Return what a path-style S3 request does, and the object's name ("" where it concerns the bucket).

    With a name: the method, or COPY. Without: LIST, DELETE_MANY, or BUCKET for all administration.
    """
    method, target, _ = head.first
    path, _, query = target.partition("?")
    _, _, key = unquote(path).lstrip("/").partition("/")
    if key:
        return ("COPY" if "x-amz-copy-source" in head.headers else method), key
    names = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    if method == "GET" and path != "/" and not names & _BUCKET_QUERIES:
        return "LIST", ""
    return ("DELETE_MANY" if method == "POST" and "delete" in names else "BUCKET"), ""
