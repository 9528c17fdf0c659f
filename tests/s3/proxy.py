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

import http.client
import re
import socket
import ssl
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qsl, unquote

from examples.s3_server import free_port

_WAIT_S: Final = 10.0
_BUCKET_QUERIES: Final = frozenset(
    ("accelerate", "acl", "cors", "encryption", "lifecycle", "location", "policy", "tagging", "versioning", "uploads")
)


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait for the rule's ``release``, then go on, whether the client still waits or not.

    request: before the server hears of it; answer: when the server has done it.
    """

    at: Literal["request", "answer"] = "request"
    seconds: float | None = None
    """No longer than this; None: for ever."""


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


@dataclass(frozen=True, slots=True)
class Raw:
    """Answer with these bytes instead of the server, then close the connection; if ``hangs``, after ``release``."""

    content: bytes
    hangs: bool = False
    keeps: bool = False
    """Leave the connection open for the next request."""
    pause_s: float = 0.0
    """Send byte by byte, with pauses."""


Fault = Hold | Answer | Reset | Cut | Flip | Stall | Stretch | Raw


def raw(status: str, body: bytes = b"", *, length: int | None = None, **headers: str) -> Raw:
    """Return an HTTP answer of one's own. ``length``: what it claims; an underscore in a header's name is a dash."""
    lines = [f"HTTP/1.1 {status}", "Connection: close", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return Raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


@contextmanager
def answering(fault: Fault, tls: ssl.SSLContext | None = None) -> Iterator[FaultProxy]:
    """A server that does the same to every request, with none behind it."""
    with FaultProxy(tls=tls) as proxy:
        proxy.inject(fault)
        yield proxy


@dataclass(slots=True, eq=False)
class Rule:
    """Which requests suffer a fault. Use as a context manager, or call ``release``."""

    proxy: FaultProxy
    fault: Fault
    operation: str = ""
    key: str = ""
    times: int | None = None
    probability: float = 1.0
    seed: int = 0
    unless: str = "(?!)"
    hits: int = 0
    """Requests that this rule broke so far; those that it holds count."""
    released: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    def wait(self, hits: int = 1, timeout_s: float = _WAIT_S) -> None:
        """Wait until the rule broke so many requests. Raises TimeoutError when it did not."""
        with self.proxy.changed:
            if not self.proxy.changed.wait_for(lambda: self.hits >= hits, timeout_s):
                raise TimeoutError(f"{self.fault} hit {self.hits} requests, not {hits}")

    def release(self) -> None:
        """End the rule: it breaks nothing any more, and what it holds goes on. Idempotent."""
        with self.proxy.changed:
            self.released = True
            self.proxy.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def takes(self, operation: str, key: str, target: str, head: str) -> bool:
        """Decide on a request, and count it. Called under the proxy's lock."""
        if self.released or re.search(self.unless, head) or not re.search(self.key, key):
            return False
        if self.operation and operation not in self.operation.split("|"):
            return False
        name = f"{operation} {target}"
        self.seen[name] += 1
        chance = zlib.crc32(f"{self.seed} {name} {self.seen[name]}".encode()) / 2**32
        taken = chance < self.probability and (self.times is None or self.hits < self.times)
        self.hits += taken
        return taken


class FaultProxy:
    """Listens on a fresh port and passes every connection on to ``127.0.0.1:server_port``.

    A server that is down shows as a reset of the client's connection; see ``go_down`` for one that refuses connections.
    """

    def __init__(self, server_port: int = 0, *, tls: ssl.SSLContext | None = None) -> None:
        self.server_port, self.tls = server_port, tls
        self.changed = threading.Condition()
        self.connections: set[_Connection] = set()
        self.accepted = 0
        """Number of connections so far."""
        self.counts: Counter[str] = Counter()
        """Requests by operation: HEAD, GET, PUT, DELETE, POST of an object; COPY; LIST, DELETE_MANY, BUCKET."""
        self.heads: deque[str] = deque(maxlen=100)
        """Request line and headers of the latest requests."""
        self.in_flight = 0
        self._rules: list[Rule] = []
        self._listener: _Listener | None = None
        self.port = free_port()
        self.come_back()

    @property
    def endpoint(self) -> str:
        """The URL to give to clients."""
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def inject(self, fault: Fault, **where: Any) -> Rule:
        """Break requests from now on. Of several rules that fit a request the first applies.

        ``operation``: as in ``counts``, or several, ``"GET|HEAD"``; empty: all. ``key``: regular expression to be found
        in the object's name. ``times``: at most so many. ``probability`` of requests: which ones depends on ``seed``,
        on what they ask and how often that was asked, not on the order in which they arrive. ``unless``: regular
        expression; a request that has it in its head is spared.
        """
        rule = Rule(self, fault, **where)
        with self.changed:
            self._rules.append(rule)
        return rule

    def release_all(self) -> None:
        """End every rule."""
        for rule in list(self._rules):
            rule.release()

    def wait_idle(self, timeout_s: float = _WAIT_S) -> None:
        """Wait until no request is in flight. Raises TimeoutError when one still is."""
        with self.changed:
            if not self.changed.wait_for(lambda: not self.in_flight, timeout_s):
                raise TimeoutError(f"{self.in_flight} requests are in flight")

    def go_down(self) -> None:
        """Refuse connections and end those that are open, as a server that is gone does."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        listener.shutdown()
        listener.socket.close()
        for thread in listener.threads:
            while thread.is_alive():
                with self.changed:
                    for connection in self.connections:  # one that was just accepted comes a little later
                        connection.end()
                    self.changed.notify_all()
                thread.join(0.05)

    def come_back(self) -> None:
        """Listen again, on the same port. A no-op when listening."""
        if self._listener is None:
            self._listener = _Listener(self)
            serve = self._listener.serve_forever
            threading.Thread(target=serve, args=(0.02,), name="fault-proxy", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    close = go_down
    """What is held never reaches the server. Idempotent."""

    def admit(self, connection: _Connection) -> Rule | None:
        """Count a request; return the rule that it suffers."""
        operation, key = _operation_of(connection)
        head = f"{connection.requestline}\n{connection.headers}"
        with self.changed:
            self.counts[operation] += 1
            self.heads.append(head)
            self.in_flight += 1
            found = next((rule for rule in self._rules if rule.takes(operation, key, connection.path, head)), None)
            self.changed.notify_all()
        return found

    def ended(self) -> None:
        """Note that nothing more happens to a request."""
        with self.changed:
            self.in_flight -= 1
            self.changed.notify_all()


class _Listener(ThreadingHTTPServer):
    request_queue_size = 1024

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self.threads: list[threading.Thread] = []
        super().__init__(("127.0.0.1", proxy.port), _Connection)
        if proxy.tls is not None:
            self.socket = proxy.tls.wrap_socket(self.socket, server_side=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread, which has the name of the proxy's others."""
        serve, arguments = self.process_request_thread, (request, client_address)
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        self.threads.append(threading.Thread(target=serve, args=arguments, name="fault-proxy", daemon=True))
        self.threads[-1].start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is nothing to print."""


class _Connection(BaseHTTPRequestHandler):
    """One client's connection: its requests, one after the other, over one connection to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def setup(self) -> None:
        self._proxy, self._is_over = self.server.proxy, False
        self._upstream = http.client.HTTPConnection("127.0.0.1", self._proxy.server_port)
        super().setup()
        with self._proxy.changed:
            self._proxy.connections.add(self)
            self._proxy.accepted += 1

    def handle(self) -> None:
        """Serve until either side ends. A failure, by rule or not, resets the client's connection."""
        try:
            super().handle()
        except (OSError, ValueError, http.client.HTTPException):
            with suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    def finish(self) -> None:
        with self._proxy.changed:
            self._proxy.connections.discard(self)
        self._upstream.close()
        with suppress(OSError):
            super().finish()

    def end(self) -> None:
        """End it soon, by a reset. Called by other threads, under the proxy's lock."""
        self._is_over = True
        for each in (self.connection, self._upstream.sock):
            with suppress(OSError):
                _ = each and each.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *arguments: object) -> None:
        """The proxy counts; it does not print."""

    def handle_expect_100(self) -> bool:
        """``_exchange`` does it, for a fault may come first."""
        return True

    def _serve(self) -> None:
        rule = self._proxy.admit(self)
        try:
            self._exchange(rule)
        finally:
            self._proxy.ended()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):  # one for each method
            return self._serve
        raise AttributeError(name)

    def _exchange(self, rule: Rule | None) -> None:
        """Pass a request and its answer on, broken as the rule says."""
        fault = rule.fault if rule else None
        self._pause("request", rule)
        if fault == Reset("request"):
            raise ConnectionResetError("by rule")
        waits = "Expect" in self.headers
        if isinstance(fault, Answer):
            if not waits:
                self._body()
            error = f"<Error><Code>{fault.code}</Code><Message>by rule</Message>{fault.more}</Error>"
            content = f"<?xml version='1.0'?>{error}".encode()
            fields = [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))]
            self._send_head(fault.status, fault.code, [*fields, *[("Connection", "close")] * waits])
            self.wfile.write(b"" if self.command == "HEAD" else content)
            return
        if isinstance(fault, Raw) and rule is not None:
            self._body()
            self.close_connection |= not fault.keeps
            for part in [fault.content] if not fault.pause_s else (bytes([each]) for each in fault.content):
                self.wfile.write(part)
                time.sleep(fault.pause_s)
            if fault.hangs:
                self._wait_for(rule)
            return
        if waits:
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._body()
        answer = self._ask(body, fault)
        payload = bytearray(answer.read())
        self._pause("answer", rule)
        if fault == Reset("answer"):
            raise ConnectionResetError("by rule")
        self._pass_on(answer, payload, rule)
        self.close_connection |= answer.will_close

    def _body(self) -> bytearray:
        return bytearray(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _send_head(self, status: int, reason: str, fields: list[tuple[str, str]]) -> None:
        self.send_response_only(status, reason)
        for name, value in fields:
            self.send_header(name, value)  # "Connection: close" ends the connection
        self.end_headers()

    def _ask(self, body: bytearray, fault: Fault | None) -> http.client.HTTPResponse:
        """Send a request to the server, its headers as they came; return the answer."""
        if isinstance(fault, Flip) and fault.side == "request" and body:
            body[_offset(fault.at, len(body))] ^= 0x10
        upstream = self._upstream
        if upstream.sock is not None:
            with suppress(BlockingIOError):  # the server may have closed it meanwhile
                if not upstream.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    upstream.close()
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            upstream.putheader(name, value)
        upstream.endheaders()
        if self._is_over:
            raise ConnectionResetError("the proxy went down")
        if fault == Reset("upload"):
            upstream.send(body[: len(body) // 2])
            raise ConnectionResetError("by rule")
        with suppress(OSError):  # it may have answered early, with a refusal; that is there to be read
            upstream.send(body)
        return upstream.getresponse()

    def _pass_on(self, answer: http.client.HTTPResponse, body: bytearray, rule: Rule | None) -> None:
        fault, is_head = rule.fault if rule else None, self.command == "HEAD"
        length = int(answer.headers.get("Content-Length", 0)) if is_head else len(body)
        sent, stop_at = bytes(body), len(body)
        if isinstance(fault, Cut):
            stop_at = _offset(fault.at, len(body))
            length = stop_at if fault.lying else length
            self.close_connection |= not fault.lying and stop_at < len(body)
        elif isinstance(fault, Stall):
            stop_at = _offset(fault.at, len(body))
        elif fault == Reset("body"):
            stop_at = len(body) // 2
        elif isinstance(fault, Flip) and fault.side == "answer" and body:
            body[_offset(fault.at, len(body))] ^= 0x10
            sent = bytes(body)
        elif isinstance(fault, Stretch):
            length += 0 if fault.lying else fault.by_bytes
            sent = b"" if is_head and not fault.lying else sent + bytes(fault.by_bytes)
            stop_at = len(sent)
        fields = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("content-length", "transfer-encoding")]
        if answer.status not in (204, 304):
            fields.append(("Content-Length", str(length)))
        self._send_head(answer.status, answer.reason, fields)
        self.wfile.write(sent[: 0 if fault == Reset("headers") else stop_at])
        if isinstance(fault, Reset):
            time.sleep(0.05)  # let the client read what was sent before the reset throws it away
            raise ConnectionResetError("by rule")
        if isinstance(fault, Stall) and rule is not None:
            self._wait_for(rule)
            self.wfile.write(sent[stop_at:])

    def _pause(self, at: str, rule: Rule | None) -> None:
        if rule is not None and isinstance(rule.fault, Hold) and rule.fault.at == at:
            self._wait_for(rule, rule.fault.seconds)

    def _wait_for(self, rule: Rule, timeout_s: float | None = None) -> None:
        """Wait until the rule is released, or for a time. Raises ConnectionResetError when the connection is ended."""
        with self._proxy.changed:
            self._proxy.changed.wait_for(lambda: self._is_over or rule.released, timeout_s)
        if self._is_over:
            raise ConnectionResetError("the proxy went down")


def _operation_of(connection: _Connection) -> tuple[str, str]:
    """Return what a path-style S3 request does, as in ``FaultProxy.counts``, and the object's name."""
    method = connection.command
    path, _, query = connection.path.partition("?")
    _, _, key = unquote(path).lstrip("/").partition("/")
    if key:
        return ("COPY" if "x-amz-copy-source" in connection.headers else method), key
    names = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    if method == "GET" and path != "/" and not names & _BUCKET_QUERIES:
        return "LIST", ""
    return ("DELETE_MANY" if method == "POST" and "delete" in names else "BUCKET"), ""


def _offset(at: float, length: int) -> int:
    """Return an offset within a body: a share of it if ``at`` is a float, from the end if it is negative."""
    offset = int(at * length) if isinstance(at, float) else at
    return min(length, offset if offset >= 0 else length + offset)
