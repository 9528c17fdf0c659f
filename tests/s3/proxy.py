"""A proxy between S3 clients and a server that counts requests and, by rules that tests set and lift, breaks them.

    with RcloneServer() as server, FaultProxy(server.port) as proxy:
        client = server.client(proxy.endpoint)
        rule = proxy.inject(Stall(at=0.5), operation="GET", times=1)
        ...
        rule.release()

Heads are passed on untouched, ``Host`` too, so signatures hold with path addressing. Bodies are streamed.

Threading: one thread of its own runs everything; its methods may be called from any other. Ownership: ``close`` (the
end of the ``with``) resets every connection, held ones too, and joins the thread. The server may go and come back.
"""

from __future__ import annotations

import asyncio
import email.utils
import re
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

from examples.s3_server import free_port

from .http1 import CHUNKED, UNTIL_EOF, Head, Wire, operation_of

__all__ = [
    "Answer",
    "Cut",
    "Delay",
    "Fault",
    "FaultProxy",
    "Flip",
    "Hold",
    "Redate",
    "Request",
    "Reset",
    "Rule",
    "Stall",
    "Stretch",
]

T = TypeVar("T")
_WAIT_S: Final = 10.0


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

    ``headers`` are lines, ``more`` is XML beside the code.
    """

    status: int = 503
    code: str = "SlowDown"
    headers: tuple[str, ...] = ()
    more: str = ""


@dataclass(frozen=True, slots=True)
class Redate:
    """Shift the answer's ``Date``, as a server does whose clock is ``seconds`` ahead."""

    seconds: float


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


Fault = Delay | Hold | Answer | Redate | Reset | Cut | Flip | Stall | Stretch


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
    bytes_up: int = 0
    bytes_down: int = 0
    """Payload that was passed on."""
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
        unless: str = "",
    ) -> None:
        self.fault = fault
        self._proxy = proxy
        self._operations = None if operation is None else frozenset(operation.split("|"))
        self._key = re.compile(key)
        self._unless = re.compile(unless) if unless else None
        self._nth, self._times = nth, times
        self._probability, self._seed = probability, seed
        self._seen: Counter[str] = Counter()
        self._hits = 0
        self._released = asyncio.Event()

    @property
    def hits(self) -> int:
        """Requests that this rule broke so far; those that it holds count."""
        return self._hits

    def wait(self, hits: int = 1, timeout_s: float = _WAIT_S) -> None:
        """Wait until the rule broke so many requests.

        Raises:
            TimeoutError: It did not.
        """
        changed = self._proxy._changed
        with changed:
            if not changed.wait_for(lambda: self._hits >= hits, timeout_s):
                raise TimeoutError(f"{self.fault} hit {self._hits} requests, not {hits}")

    def release(self) -> None:
        """End the rule: it breaks nothing any more, and what it holds goes on. A no-op when done before."""
        self._proxy._lift(self)

    def __enter__(self) -> Rule:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _takes(self, request: Request, head: str) -> bool:
        """Decide on a request, and count it. Called under the proxy's lock."""
        if self._unless is not None and self._unless.search(head):
            return False
        if self._operations is not None and request.operation not in self._operations:
            return False
        if not self._key.search(request.key):
            return False
        name = f"{request.operation} {request.target}"
        self._seen[name] += 1
        if self._nth is not None and self._seen.total() != self._nth:
            return False
        if self._times is not None and self._hits >= self._times:
            return False
        if self._probability < 1.0:
            chance = zlib.crc32(f"{self._seed} {name} {self._seen[name]}".encode()) / 2**32
            if chance >= self._probability:
                return False
        self._hits += 1
        return True


class FaultProxy:
    """Listens on a fresh port and passes every connection on to ``127.0.0.1:server_port``.

    A server that is down shows as a reset of the client's connection; see ``go_down`` for one that refuses connections.
    """

    def __init__(self, server_port: int) -> None:
        self._server = ("127.0.0.1", server_port)
        self._changed = threading.Condition()
        self._rules: list[Rule] = []
        self._requests: list[Request] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = free_port()
        self._thread.start()
        try:
            self.come_back()
        except BaseException:
            self.close()
            raise

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
        """Break requests from now on.

        Every ``Delay`` that fits a request applies, and the first of the other rules.

        Args:
            fault: What happens.
            operation: One of ``Request.operation``, or several: ``"GET|HEAD"``. None: all.
            key: Regular expression to be found in the object's name.
            nth: Only the nth request that fits, from 1.
            times: At most so many requests.
            probability: Share of requests. Which ones depends on ``seed``, on what they ask and how often that was
                asked, not on the order in which they arrive.
            seed: Of the choice above.
            unless: Regular expression; where it is found in a request's head, that is spared.
        """
        rule = Rule(self, fault, operation, key, nth, times, probability, seed, unless)
        with self._changed:
            self._rules.append(rule)
        return rule

    def release_all(self) -> None:
        """End every rule."""
        with self._changed:
            rules = list(self._rules)
        for rule in rules:
            rule.release()

    def requests(self, operation: str | None = None, key: str = "") -> list[Request]:
        """Return the requests since ``forget``, in order of arrival: of one operation, of keys that ``key`` fits."""
        with self._changed:
            found = list(self._requests)
        return [r for r in found if operation in (None, r.operation) and re.search(key, r.key)]

    def counts(self) -> Counter[str]:
        """Return the number of requests since ``forget`` by operation."""
        with self._changed:
            return Counter(request.operation for request in self._requests)

    def forget(self) -> None:
        """Count from zero."""
        with self._changed:
            self._requests = []

    def wait_idle(self, timeout_s: float = _WAIT_S) -> None:
        """Wait until no request is in flight.

        Raises:
            TimeoutError: One still is.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: all(r.end_s is not None for r in self._requests), timeout_s):
                raise TimeoutError(f"in flight: {[r for r in self._requests if r.end_s is None]}")

    def go_down(self) -> None:
        """Refuse connections and reset those that are open, as a server that is gone does."""
        self._call(self._go_down())

    def come_back(self) -> None:
        """Listen again, on the same port. A no-op when listening."""
        self._call(self._come_back())

    def close(self) -> None:
        """End everything; what is held never reaches the server. A no-op when done before."""
        if self._loop.is_closed():
            return
        self._call(self._go_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lift(self, rule: Rule) -> None:
        with self._changed:
            if rule in self._rules:
                self._rules.remove(rule)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(rule._released.set)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_WAIT_S)

    # On the loop's thread.

    async def _come_back(self) -> None:
        if self._listener is not None:
            return
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        try:
            listener.bind(("127.0.0.1", self.port))
        except BaseException:
            listener.close()
            raise
        listener.listen(1024)
        self._listener = listener
        self._accepting = self._loop.create_task(self._accept(listener))

    async def _go_down(self) -> None:
        listener, accepting = self._listener, self._accepting
        self._listener = self._accepting = None
        if listener is not None and accepting is not None:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            listener.close()
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(listener)
            task = self._loop.create_task(self._serve(Wire(self._loop, sock)))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, client: Wire) -> None:
        """Serve one client's connection. Whatever goes wrong on either side resets it."""
        exchange = _Exchange(self._loop, self._server, client)
        try:
            while (head := await client.head()) is not None:
                request, rules = self._admit(head)
                try:
                    if not await exchange.run(head, request, rules):
                        break
                finally:
                    with self._changed:
                        request.end_s = time.monotonic()
                        self._changed.notify_all()
        except OSError:
            client.reset()
        except asyncio.CancelledError:
            client.reset()
            raise
        finally:
            client.close()
            exchange.close()

    def _admit(self, head: Head) -> tuple[Request, list[Rule]]:
        operation, key = operation_of(head)
        request = Request(operation, key, head.first[1], time.monotonic())
        text = head.raw.decode("latin-1")
        with self._changed:
            self._requests.append(request)
            rules: list[Rule] = []
            for rule in self._rules:
                broken = any(not isinstance(taken.fault, Delay) for taken in rules)
                if (isinstance(rule.fault, Delay) or not broken) and rule._takes(request, text):
                    rules.append(rule)
            request.faults = [rule.fault for rule in rules]
            self._changed.notify_all()
        return request, rules


class _Exchange:
    """The requests of one client's connection, one after the other, over one connection to the server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: tuple[str, int], client: Wire) -> None:
        self._loop = loop
        self._address = server
        self._client = client
        self._server: Wire | None = None

    def close(self) -> None:
        if self._server is not None:
            self._server.reset()
            self._server = None

    async def run(self, head: Head, request: Request, rules: list[Rule]) -> bool:
        """Pass a request and its answer on, broken as ``rules`` say. False: the connection ends here, in order.

        Raises:
            ConnectionError: The connection is to be reset.
        """
        rule = next((rule for rule in rules if not isinstance(rule.fault, Delay)), None)
        fault = rule.fault if rule else None
        await _pause("request", rules)
        if fault == Reset("request"):
            raise ConnectionResetError("by rule")
        if isinstance(fault, Answer):
            return await self._answer(head, request, fault)
        server = await self._connect()
        await server.send(head.raw)
        asked = "expect" not in head.headers
        if asked:
            await self._upload(server, head, request, fault)
        answer = await server.head()
        while answer is not None and answer.status == 100:
            await self._client.send(answer.raw)
            if not asked:
                asked = True
                await self._upload(server, head, request, fault)
            answer = await server.head()
        if answer is None:
            raise ConnectionResetError("the server closed without an answer")
        await _pause("answer", rules)
        if fault == Reset("answer"):
            raise ConnectionResetError("by rule")
        alive = await self._pass_answer(server, answer, request, rule, head.first[0])
        if answer.ends_connection:
            self.close()
            return False
        return alive and not head.ends_connection

    async def _answer(self, head: Head, request: Request, fault: Answer) -> bool:
        expects = "expect" in head.headers
        if not expects:
            async for _ in self._client.body(head.request_framing()):
                pass
        error = f"<Error><Code>{fault.code}</Code><Message>by rule</Message>{fault.more}</Error>"
        body = f"<?xml version='1.0'?>{error}".encode()
        request.status = fault.status
        lines = [
            f"HTTP/1.1 {fault.status} {fault.code}",
            "Content-Type: application/xml",
            f"Content-Length: {len(body)}",
            *fault.headers,
        ]
        lines += ["Connection: close"] if expects else []
        await self._client.send("\r\n".join([*lines, "", ""]).encode() + (b"" if head.first[0] == "HEAD" else body))
        return not expects

    async def _connect(self) -> Wire:
        if self._server is not None and self._server.ended():
            self.close()
        if self._server is None:
            self._server = await Wire.connect(self._loop, self._address)
        return self._server

    async def _upload(self, server: Wire, head: Head, request: Request, fault: Fault | None) -> None:
        framing = head.request_framing()
        length = max(0, framing)
        flip_at = _offset(fault.at, length) if isinstance(fault, Flip) and fault.side == "request" else None
        reset_at = length // 2 if fault == Reset("upload") else None
        server_listens = True
        async for piece, payload in self._client.body(framing):
            start = request.bytes_up
            if reset_at is not None and start + len(piece) >= reset_at:
                await server.send(piece[: reset_at - start])
                raise ConnectionResetError("by rule")
            if flip_at is not None and payload and 0 <= flip_at - start < len(piece):
                piece[flip_at - start] ^= 0x10
            request.bytes_up += len(piece) if payload else 0
            if server_listens:
                try:
                    await server.send(piece)
                except OSError:  # It answered early, with a refusal; that is there to be read.
                    server_listens = False

    async def _pass_answer(self, server: Wire, answer: Head, request: Request, rule: Rule | None, method: str) -> bool:
        """Pass the answer on. False: the client must be told by a close that the body ends."""
        framing = answer.answer_framing(method)
        fault = rule.fault if rule else None
        request.status = answer.status
        if isinstance(fault, Redate):
            answer = Head.parse(_redated(answer, fault.seconds))
        on_body = isinstance(fault, Cut | Stall) or fault == Reset("body")
        on_body = on_body or (isinstance(fault, Flip) and fault.side == "answer")
        if rule is not None and on_body:
            return await self._break_body(server, answer, framing, request, rule)
        if isinstance(fault, Stretch):
            return await self._stretch(server, answer, framing, request, fault, method)
        await self._client.send(answer.raw)
        if fault == Reset("headers"):
            await _drained()
            raise ConnectionResetError("by rule")
        async for piece, payload in server.body(framing):
            await self._client.send(piece)
            request.bytes_down += len(piece) if payload else 0
        return framing != UNTIL_EOF

    async def _break_body(self, server: Wire, answer: Head, framing: int, request: Request, rule: Rule) -> bool:
        """Pass an answer on with its body broken."""
        fault = rule.fault
        if framing in (CHUNKED, UNTIL_EOF):
            parts = [bytes(piece) async for piece, payload in server.body(framing) if payload]
            pieces = _one_piece(b"".join(parts))
            length = sum(map(len, parts))
            answer = Head.parse(answer.reframed(length))
        else:
            pieces, length = server.body(framing), framing
        lying = isinstance(fault, Cut) and fault.lying
        end = _offset(fault.at, length) if isinstance(fault, Cut) else length // 2 if fault == Reset("body") else length
        stall_at = _offset(fault.at, length) if isinstance(fault, Stall) else None
        flip_at = _offset(fault.at, length) if isinstance(fault, Flip) else None
        await self._client.send(answer.reframed(end) if lying else answer.raw)
        offset = 0
        if stall_at == 0:
            await rule._released.wait()
        async for piece, _ in pieces:
            start, offset = offset, offset + len(piece)
            if flip_at is not None and start <= flip_at < offset:
                piece[flip_at - start] ^= 0x10
            if stall_at is not None and start < stall_at <= offset:
                await self._client.send(piece[: stall_at - start])
                request.bytes_down += stall_at - start
                await rule._released.wait()
                piece, start = piece[stall_at - start :], stall_at  # noqa: PLW2901
            kept = piece[: max(0, end - start)]
            await self._client.send(kept)
            request.bytes_down += len(kept)
            if offset >= end and not lying and end < length:
                break
        if fault == Reset("body"):
            await _drained()
            raise ConnectionResetError("by rule")
        if end < length and not lying:
            self.close()
            return False
        return True

    async def _stretch(
        self, server: Wire, answer: Head, framing: int, request: Request, fault: Stretch, method: str
    ) -> bool:
        """Pass an answer on with more than its body."""
        body = b"".join([bytes(piece) async for piece, payload in server.body(framing) if payload])
        length = int(answer.headers.get("content-length", len(body)))
        await self._client.send(answer.reframed(length if fault.lying else length + fault.by_bytes))
        if method != "HEAD" or fault.lying:
            await self._client.send(body + bytes(fault.by_bytes))
        request.bytes_down += len(body)
        if framing == UNTIL_EOF:
            self.close()
        return True


async def _pause(at: str, rules: list[Rule]) -> None:
    for rule in rules:
        if isinstance(rule.fault, Delay) and rule.fault.at == at:
            await asyncio.sleep(rule.fault.seconds)
        elif isinstance(rule.fault, Hold) and rule.fault.at == at:
            await rule._released.wait()


def _redated(head: Head, seconds: float) -> bytes:
    """Return the head's bytes with its date shifted."""
    date = email.utils.parsedate_to_datetime(head.headers["date"]) + timedelta(seconds=seconds)
    lines = [line for line in head.raw[:-4].split(b"\r\n") if not line.lower().startswith(b"date:")]
    return b"\r\n".join([*lines, f"Date: {email.utils.format_datetime(date, usegmt=True)}".encode(), b"", b""])


async def _drained() -> None:
    """Let the client read what was sent before a reset throws it away."""
    await asyncio.sleep(0.05)


async def _one_piece(data: bytes) -> Any:
    yield memoryview(bytearray(data)), True


def _offset(at: float, length: int) -> int:
    """Return an offset within a body: a share of it if ``at`` is a float, from the end if it is negative."""
    offset = int(at * length) if isinstance(at, float) else at
    return min(length, offset if offset >= 0 else length + offset)
