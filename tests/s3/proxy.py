"""A proxy between S3 clients and a server that counts requests and, by rules that tests set and lift, breaks them.

    with RcloneServer() as server, FaultProxy(server.port) as proxy:
        client = server.client(proxy.endpoint)
        rule = proxy.inject(Stall(at=0.5), operation="GET", times=1)
        ...
        rule.release()

Requests are passed on untouched, ``Host`` too, so signatures hold with path addressing. Each is read whole, then passed
on, and so is its answer, which always gets a length.

Threading: a thread that accepts and one for each connection; methods may be called from any other. Ownership: ``close``
(the end of the ``with``) ends every connection, held ones too, and joins the threads. The server may go and come back.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import BinaryIO, Final, Literal, Self
from urllib.parse import parse_qsl, unquote

from examples.s3_server import free_port

_WAIT_S: Final = 10.0
_BUCKET_QUERIES: Final = frozenset(
    ("accelerate", "acl", "cors", "encryption", "lifecycle", "location", "policy", "tagging", "versioning", "uploads")
)


@dataclass(frozen=True, slots=True)
class Delay:
    """Wait: "request", before the server hears of it; "answer", when the server has done it."""

    seconds: float
    at: Literal["request", "answer"] = "request"


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait for the rule's ``release``, then go on, whether the client still waits or not."""

    at: Literal["request", "answer"] = "request"


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer instead of the server, which hears nothing. For example (500, "InternalError"), (403, "AccessDenied").

    ``more`` is XML beside the code.
    """

    status: int = 503
    code: str = "SlowDown"
    more: str = ""


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset the client's connection.

    request: the server hears nothing. upload: half the request's body has reached the server. answer: the server has
    done it, the answer is lost. headers: the answer's head has been sent. body: and half its body.
    """

    at: Literal["request", "upload", "answer", "headers", "body"] = "request"


@dataclass(frozen=True, slots=True)
class Cut:
    """Send the answer's body only up to ``at`` (int: bytes, float: share), then close.

    ``lying``: the head gives the short length, so that no client can tell; the connection lives on.
    """

    at: int | float = 0.5
    lying: bool = False


@dataclass(frozen=True, slots=True)
class Flip:
    """Flip one bit of the body's byte at ``at`` (int: offset, from the end if negative; float: share)."""

    at: int | float = 0.5
    side: Literal["request", "answer"] = "answer"


@dataclass(frozen=True, slots=True)
class Stall:
    """Send the answer's head and its body up to ``at`` (int: bytes, float: share); the rest after ``release``."""

    at: int | float = 0.5


@dataclass(frozen=True, slots=True)
class Stretch:
    """Send ``by_bytes`` more zeros than the answer's body has; of a HEAD's, which has none, say so.

    ``lying``: the head gives the body's own length, so that they come where the connection's next answer would begin.
    """

    by_bytes: int
    lying: bool = False


Fault = Delay | Hold | Answer | Reset | Cut | Flip | Stall | Stretch


@dataclass(slots=True)
class Request:
    """A request that came by. Times are ``time.monotonic``."""

    operation: str
    """HEAD, GET, PUT, DELETE, POST of an object; COPY; LIST, DELETE_MANY, BUCKET."""
    key: str
    target: str
    start_s: float
    status: int | None = None
    """What the client was told; None while it was told nothing."""
    end_s: float | None = None
    faults: list[Fault] = field(default_factory=list)


class Rule:
    """Which requests suffer a fault. Use as a context manager, or call ``release``."""

    def __init__(
        self,
        proxy: FaultProxy,
        fault: Fault,
        operation: str | None,
        key: str,
        nth: int | None,
        times: int | None,
        probability: float,
        seed: int,
        unless: str,
    ) -> None:
        self.fault = fault
        self.hits = 0
        """Requests that this rule broke so far; those that it holds count."""
        self.released = False
        self._proxy = proxy
        self._operations = operation and operation.split("|")
        self._key, self._unless = re.compile(key), re.compile(unless or "(?!)")
        self._nth, self._times, self._probability, self._seed = nth, times, probability, seed
        self._seen: Counter[str] = Counter()

    def wait(self, hits: int = 1, timeout_s: float = _WAIT_S) -> None:
        """Wait until the rule broke so many requests. Raises TimeoutError when it did not."""
        with self._proxy.changed:
            if not self._proxy.changed.wait_for(lambda: self.hits >= hits, timeout_s):
                raise TimeoutError(f"{self.fault} hit {self.hits} requests, not {hits}")

    def release(self) -> None:
        """End the rule: it breaks nothing any more, and what it holds goes on. Idempotent."""
        with self._proxy.changed:
            self.released = True
            self._proxy.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def takes(self, request: Request, head: str) -> bool:
        """Decide on a request, and count it. Called under the proxy's lock."""
        if self.released or self._unless.search(head) or not self._key.search(request.key):
            return False
        if self._operations and request.operation not in self._operations:
            return False
        name = f"{request.operation} {request.target}"
        self._seen[name] += 1
        chance = zlib.crc32(f"{self._seed} {name} {self._seen[name]}".encode()) / 2**32
        taken = self._nth in (None, self._seen.total()) and chance < self._probability
        taken = taken and (self._times is None or self.hits < self._times)
        self.hits += taken
        return taken


class FaultProxy:
    """Listens on a fresh port and passes every connection on to ``127.0.0.1:server_port``.

    A server that is down shows as a reset of the client's connection; see ``go_down`` for one that refuses connections.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.changed = threading.Condition()
        self._rules: list[Rule] = []
        self._requests: list[Request] = []
        self._listener: socket.socket | None = None
        self._connections: set[_Connection] = set()
        self._accepting: threading.Thread | None = None
        self.port = free_port()
        self.come_back()

    @property
    def endpoint(self) -> str:
        """The URL to give to clients."""
        return f"http://127.0.0.1:{self.port}"

    def inject(
        self,
        fault: Fault,
        *,
        operation: str | None = None,
        key: str = "",
        nth: int | None = None,
        times: int | None = None,
        probability: float = 1.0,
        seed: int = 0,
        unless: str = "",
    ) -> Rule:
        """Break requests from now on. Every ``Delay`` that fits a request applies, and the first of the other rules.

        ``operation``: of ``Request``, or several, ``"GET|HEAD"``; None: all. ``key``: regular expression to be found in
        the object's name. ``nth``: only the nth request that fits, from 1. ``times``: at most so many. ``probability``
        of requests: which ones depends on ``seed``, on what they ask and how often that was asked, not on the order in
        which they arrive. ``unless``: regular expression; a request that has it in its head is spared.
        """
        rule = Rule(self, fault, operation, key, nth, times, probability, seed, unless)
        with self.changed:
            self._rules.append(rule)
        return rule

    def release_all(self) -> None:
        """End every rule."""
        for rule in list(self._rules):
            rule.release()

    def requests(self, operation: str | None = None, key: str = "") -> list[Request]:
        """Return the requests since ``forget``, in order of arrival: of one operation, of keys that ``key`` fits."""
        return [r for r in list(self._requests) if operation in (None, r.operation) and re.search(key, r.key)]

    def counts(self) -> Counter[str]:
        """Return the number of requests since ``forget`` by operation."""
        return Counter(request.operation for request in list(self._requests))

    def forget(self) -> None:
        """Count from zero."""
        with self.changed:
            self._requests = []

    def wait_idle(self, timeout_s: float = _WAIT_S) -> None:
        """Wait until no request is in flight. Raises TimeoutError when one still is."""
        with self.changed:
            if not self.changed.wait_for(lambda: all(r.end_s is not None for r in self._requests), timeout_s):
                raise TimeoutError(f"in flight: {[r for r in self._requests if r.end_s is None]}")

    def go_down(self) -> None:
        """Refuse connections and end those that are open, as a server that is gone does."""
        listener, accepting = self._listener, self._accepting
        self._listener = self._accepting = None
        if listener is not None and accepting is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            accepting.join()
        with self.changed:
            connections = list(self._connections)
            for connection in connections:
                connection.end()
            self.changed.notify_all()
        for connection in connections:
            connection.join()

    def come_back(self) -> None:
        """Listen again, on the same port. A no-op when listening."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
            accept = partial(self._accept, self._listener)
            self._accepting = threading.Thread(target=accept, name="fault-proxy", daemon=True)
            self._accepting.start()

    def close(self) -> None:
        """End everything; what is held never reaches the server. Idempotent."""
        self.go_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def admit(self, head: Head) -> tuple[Request, list[Rule]]:
        """Count a request; return it with the rules that it suffers."""
        operation, key = _operation_of(head)
        request = Request(operation, key, head.first[1], time.monotonic())
        rules: list[Rule] = []
        with self.changed:
            self._requests.append(request)
            for rule in self._rules:
                free = isinstance(rule.fault, Delay) or all(isinstance(taken.fault, Delay) for taken in rules)
                if free and rule.takes(request, head.raw.decode("latin-1")):
                    rules.append(rule)
            request.faults = [rule.fault for rule in rules]
            self.changed.notify_all()
        return request, rules

    def ended(self, request: Request) -> None:
        """Note that nothing more happens to a request."""
        with self.changed:
            request.end_s = time.monotonic()
            self.changed.notify_all()

    def left(self, connection: _Connection) -> None:
        """Forget a connection that has ended."""
        with self.changed:
            self._connections.discard(connection)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection = _Connection(self, listener.accept()[0])
                with self.changed:
                    self._connections.add(connection)
                connection.start()


class _Connection(threading.Thread):
    """One client's connection: its requests, one after the other, over one connection to the server."""

    def __init__(self, proxy: FaultProxy, client: socket.socket) -> None:
        super().__init__(name="fault-proxy", daemon=True)
        self._proxy, self._client, self._server = proxy, client, None  # type: ignore[assignment]
        self._server: socket.socket | None
        self._answers: BinaryIO | None = None
        self._is_over = False
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def end(self) -> None:
        """End it soon, by a reset. Called by other threads, under the proxy's lock."""
        self._is_over = True
        for each in (self._client, self._server):
            with suppress(OSError):
                _ = each and each.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Serve until either side ends. A failure, by rule or not, resets the client's connection."""
        with self._client, self._client.makefile("rb") as requests:
            try:
                while (head := Head.read(requests)) is not None:
                    request, rules = self._proxy.admit(head)
                    try:
                        if not self._exchange(head, requests, request, rules):
                            break
                    finally:
                        self._proxy.ended(request)
            except (OSError, ValueError):
                with suppress(OSError):
                    self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._hang_up()
        self._proxy.left(self)

    def _exchange(self, head: Head, requests: BinaryIO, request: Request, rules: list[Rule]) -> bool:
        """Pass a request and its answer on, broken as ``rules`` say. False: the connection ends here, in order."""
        rule = next((rule for rule in rules if not isinstance(rule.fault, Delay)), None)
        fault = rule.fault if rule else None
        self._pause("request", rules)
        if fault == Reset("request"):
            raise ConnectionResetError("by rule")
        if "expect" in head.headers:
            if isinstance(fault, Answer):
                self._answer(head, request, fault, "Connection: close")
                return False
            self._client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw = head.body(requests)
        if isinstance(fault, Answer):
            self._answer(head, request, fault)
            return True
        answer, body = self._ask(head, raw, fault)
        self._pause("answer", rules)
        if fault == Reset("answer"):
            raise ConnectionResetError("by rule")
        alive = self._pass_on(answer, body, request, rule, head.first[0] == "HEAD")
        return alive and not answer.ends_connection and not head.ends_connection

    def _answer(self, head: Head, request: Request, fault: Answer, *more: str) -> None:
        error = f"<Error><Code>{fault.code}</Code><Message>by rule</Message>{fault.more}</Error>"
        body = f"<?xml version='1.0'?>{error}".encode()
        request.status = fault.status
        lines = [f"HTTP/1.1 {fault.status} {fault.code}", "Content-Type: application/xml"]
        lines += [f"Content-Length: {len(body)}", *more, "", ""]
        self._client.sendall("\r\n".join(lines).encode() + (b"" if head.first[0] == "HEAD" else body))

    def _ask(self, head: Head, raw: bytearray, fault: Fault | None) -> tuple[Head, bytearray]:
        """Send a request to the server; return the answer's head and body."""
        if isinstance(fault, Flip) and fault.side == "request" and raw:
            raw[_offset(fault.at, len(raw))] ^= 0x10
        server, answers = self._connected()
        server.sendall(head.raw)
        if fault == Reset("upload"):
            server.sendall(raw[: len(raw) // 2])
            raise ConnectionResetError("by rule")
        with suppress(OSError):  # it may have answered early, with a refusal; that is there to be read
            server.sendall(raw)
        while True:
            answer = Head.read(answers)
            if answer is None:
                raise ConnectionResetError("the server closed without an answer")
            if answer.status >= 200:
                break
        empty = head.first[0] == "HEAD" or answer.status in (204, 304)
        body = bytearray() if empty else answer.payload(answers)
        if answer.ends_connection:
            self._hang_up()
        return answer, body

    def _pass_on(self, answer: Head, body: bytearray, request: Request, rule: Rule | None, is_head: bool) -> bool:
        """Pass an answer on. False: the client must be told by a close that the body ends."""
        fault = rule.fault if rule else None
        request.status = answer.status
        told = int(answer.headers.get("content-length", 0)) if is_head else len(body)
        sent, stop_at = bytes(body), len(body)
        if isinstance(fault, Cut):
            stop_at = _offset(fault.at, len(body))
            told = stop_at if fault.lying else told
        elif isinstance(fault, Stall):
            stop_at = _offset(fault.at, len(body))
        elif fault == Reset("body"):
            stop_at = len(body) // 2
        elif isinstance(fault, Flip) and fault.side == "answer" and body:
            body[_offset(fault.at, len(body))] ^= 0x10
            sent = bytes(body)
        elif isinstance(fault, Stretch):
            told += 0 if fault.lying else fault.by_bytes
            sent = b"" if is_head and not fault.lying else sent + bytes(fault.by_bytes)
            stop_at = len(sent)
        self._client.sendall(answer.reframed(told))
        if fault == Reset("headers"):
            stop_at = 0
        self._client.sendall(sent[:stop_at])
        if isinstance(fault, Reset):
            time.sleep(0.05)  # let the client read what was sent before the reset throws it away
            raise ConnectionResetError("by rule")
        if isinstance(fault, Stall) and rule is not None:
            self._wait_for(rule)
            self._client.sendall(sent[stop_at:])
        return not isinstance(fault, Cut) or fault.lying or stop_at == len(body)

    def _pause(self, at: str, rules: list[Rule]) -> None:
        for rule in rules:
            if isinstance(rule.fault, Delay) and rule.fault.at == at:
                self._wait_for(None, rule.fault.seconds)
            elif isinstance(rule.fault, Hold) and rule.fault.at == at:
                self._wait_for(rule)

    def _wait_for(self, rule: Rule | None, timeout_s: float | None = None) -> None:
        """Wait until the rule is released, or for a time. Raises ConnectionResetError when the connection is ended."""
        with self._proxy.changed:
            self._proxy.changed.wait_for(lambda: self._is_over or (rule is not None and rule.released), timeout_s)
        if self._is_over:
            raise ConnectionResetError("the proxy went down")

    def _connected(self) -> tuple[socket.socket, BinaryIO]:
        if self._server is not None:
            with suppress(BlockingIOError):
                if not self._server.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    self._hang_up()
        if self._server is None or self._answers is None:
            self._server = socket.create_connection(("127.0.0.1", self._proxy.server_port))
            self._server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._answers = self._server.makefile("rb")
            if self._is_over:
                raise ConnectionResetError("the proxy went down")
        return self._server, self._answers

    def _hang_up(self) -> None:
        server, answers = self._server, self._answers
        self._server = self._answers = None
        if server is not None and answers is not None:
            with closing(server), closing(answers):
                pass


@dataclass(frozen=True, slots=True)
class Head:
    """The first line and the headers of a message, as received."""

    raw: bytes
    first: tuple[str, str, str]
    headers: dict[str, str]
    """By name in lower case. A repeated one keeps its last value."""

    @classmethod
    def read(cls, stream: BinaryIO) -> Head | None:
        """Read up to the empty line; None at the end of the stream. Raises ConnectionError for what is not HTTP."""
        lines = []
        while (line := stream.readline(1 << 16)) not in (b"", b"\r\n"):
            lines.append(line)
        if not line and not lines:
            return None
        text = [each.decode("latin-1").rstrip("\r\n") for each in lines]
        first = (*text[0].split(" ", 2), "", "") if text else ("", "", "")
        if not line or "HTTP/" not in first[0] + first[2]:
            raise ConnectionError(f"not HTTP: {text[:1]}")
        fields = (each.partition(":") for each in text[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        return cls(b"".join([*lines, b"\r\n"]), (first[0], first[1], first[2]), headers)

    @property
    def status(self) -> int:
        """The status of an answer."""
        return int(self.first[1])

    @property
    def ends_connection(self) -> bool:
        """Whether the sender closes after this message."""
        connection = self.headers.get("connection", "").lower()
        return connection == "close" or (self.first[0] == "HTTP/1.0" and connection != "keep-alive")

    def body(self, stream: BinaryIO) -> bytearray:
        """Read the body of a request; return it as it came."""
        if "chunked" not in self.headers.get("transfer-encoding", "").lower():
            return bytearray(stream.read(int(self.headers.get("content-length", 0))))
        raw, length = bytearray(), -1
        while length:
            line = stream.readline()
            length = int(line.split(b";")[0], 16)
            raw += line + stream.read(length)
            while length == 0 and (trailer := stream.readline()) not in (b"", b"\r\n"):
                raw += trailer
            raw += stream.readline() if length else b"\r\n"
        return raw

    def payload(self, stream: BinaryIO) -> bytearray:
        """Read the body of an answer, and take it out of its chunks."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            payload = bytearray()
            while length := int(stream.readline().split(b";")[0], 16):
                payload += stream.read(length)
                stream.readline()
            while stream.readline() not in (b"", b"\r\n"):
                pass
            return payload
        length = self.headers.get("content-length")
        payload = bytearray(stream.read() if length is None else stream.read(int(length)))
        if length is not None and len(payload) < int(length):
            raise ConnectionError("the server's body ended early")
        return payload

    def reframed(self, length_bytes: int) -> bytes:
        """Return an answer's head with ``length_bytes`` for the body's length."""
        framing = (b"content-length", b"transfer-encoding")
        lines = [line for line in self.raw[:-4].split(b"\r\n") if line.partition(b":")[0].lower() not in framing]
        if self.status not in (204, 304):
            lines.append(b"Content-Length: %d" % length_bytes)
        return b"\r\n".join([*lines, b"", b""])


def _operation_of(head: Head) -> tuple[str, str]:
    """Return what a path-style S3 request does, as ``Request.operation``, and the object's name."""
    method, target, _ = head.first
    path, _, query = target.partition("?")
    _, _, key = unquote(path).lstrip("/").partition("/")
    if key:
        return ("COPY" if "x-amz-copy-source" in head.headers else method), key
    names = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    if method == "GET" and path != "/" and not names & _BUCKET_QUERIES:
        return "LIST", ""
    return ("DELETE_MANY" if method == "POST" and "delete" in names else "BUCKET"), ""


def _offset(at: float, length: int) -> int:
    """Return an offset within a body: a share of it if ``at`` is a float, from the end if it is negative."""
    offset = int(at * length) if isinstance(at, float) else at
    return min(length, offset if offset >= 0 else length + offset)
