"""Direct GETs over real sockets: an answer with exactly the bytes asked for fills the memory, connections
are used again, and whatever else a server says or does is left to the client that signed.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nixl_offload.stores.http_get import DirectGets
from tests.contract.one_answer_server import HANG, RESET, OneAnswerServer, answer, dead_address
from tests.s3.tls import make_certificate

BODY = bytes(range(200))


def no_tls() -> None:
    raise AssertionError("plain HTTP needs no TLS")


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch) -> Iterator[DirectGets]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    opened = DirectGets(timeout_s=30.0, tls=no_tls)  # type: ignore[arg-type]
    yield opened
    opened.refuse()
    assert not opened._idle


def get(gets: DirectGets, endpoint: str, offset: int = 0, length: int = len(BODY)) -> tuple[int | None, bytes]:
    memory = bytearray(length)
    return gets.read_into(f"{endpoint}/bucket/x/1?X-Amz-Signature=0", offset, memoryview(memory)), bytes(memory)


WHOLE = {
    "whole": answer("200 OK", BODY),
    "a range": answer("206 Partial Content", BODY, content_range="bytes 0-199/1000"),
    "a range as 200": answer("200 OK", BODY, content_range="bytes 0-199/200"),
    "fields in any case": b"HTTP/1.1 200 OK\r\ncOnTeNt-LeNgTh:200\r\nX: a: b\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("said", WHOLE.values(), ids=WHOLE)
def test_an_answer_with_the_bytes_asked_for_fills_the_memory(gets: DirectGets, said: bytes) -> None:
    with OneAnswerServer(said) as server:
        assert get(gets, server.endpoint) == (None, BODY)
        [head] = server.requests
        assert head.startswith(b"GET /bucket/x/1?X-Amz-Signature=0 HTTP/1.1\r\n")
        assert b"Range: bytes=0-199\r\n" in head


OTHER = {
    "shorter": (answer("200 OK", BODY[:199]), 200),
    "longer": (answer("200 OK", BODY + b"x"), 200),
    "another range": (answer("206 Partial Content", BODY, content_range="bytes 1-200/1000"), 206),
    "a part without a range": (answer("206 Partial Content", BODY), 206),
    "in chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 200\r\n\r\n" + BODY, 200),
    "compressed": (answer("200 OK", BODY, content_encoding="gzip"), 200),
    "without a length": (b"HTTP/1.1 200 OK\r\n\r\n" + BODY, 200),
    "refused": (answer("403 Forbidden", BODY), 403),
    "two lengths": (b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\nContent-Length: 300\r\n\r\n" + BODY, 0),
    "broken off": (answer("200 OK", BODY[:100], length=200), 0),
    "more than announced": (answer("200 OK", BODY + b"x", length=200), 0),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", 0),
    "headers without an end": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000, 0),
    "reset": (RESET, 0),
    "hung": (HANG, 0),
}


@pytest.mark.parametrize(("said", "status"), OTHER.values(), ids=OTHER)
def test_any_other_answer_is_left_alone(gets: DirectGets, said: bytes | None, status: int) -> None:
    """Only where there was no whole answer, so that another would cost as much time, is there a pause."""
    gets._timeout_s = 0.3 if said is HANG else gets._timeout_s
    with OneAnswerServer(said) as server:
        assert get(gets, server.endpoint)[0] == status
        assert gets.refusing is (status == 0)


@pytest.mark.parametrize(("no_proxy", "goes"), [("", False), ("example.org, 127.0.0.1", True), ("*", True)])
def test_a_proxy_is_for_hosts_that_no_proxy_does_not_name(
    monkeypatch: pytest.MonkeyPatch, no_proxy: str, goes: bool
) -> None:
    for name, value in (("http_proxy", "http://127.0.0.1:1"), ("no_proxy", no_proxy)):
        monkeypatch.setenv(name, value)
        monkeypatch.delenv(name.upper(), raising=False)
    gets = DirectGets(timeout_s=5.0, tls=no_tls)  # type: ignore[arg-type]
    with OneAnswerServer(WHOLE["whole"]) as server:
        for _ in range(2):
            if not gets.refusing:
                assert (get(gets, server.endpoint) == (None, BODY)) is goes
        assert len(server.requests) == 2 * goes


def test_a_host_with_a_dead_address_is_reached_by_the_other(gets: DirectGets, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what names resolve to is played."""
    with OneAnswerServer(WHOLE["whole"]) as server, dead_address() as dead:
        live = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in (dead, live)]
        resolve = socket.getaddrinfo
        named = {"kv.example": found}
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: named.get(host) or resolve(host, *a, **k))
        started_s = time.monotonic()
        assert get(gets, "http://kv.example") == (None, BODY)
        assert time.monotonic() - started_s < 15.0


class Keeping:
    """Serves ``requests`` requests on each connection, then closes it. With ``tls``, a context, over TLS."""

    def __init__(self, requests: int, tls: ssl.SSLContext | None = None) -> None:
        self._requests, self._tls, self.connections = requests, tls, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if self._tls is not None:
                try:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                except OSError:
                    connection.close()
                    return
            with connection:
                self.connections += 1
                for _ in range(self._requests):
                    if not connection.recv(65536):
                        break
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + BODY[:50])
                    connection.sendall(BODY[50:])
                else:
                    continue
            return

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def test_connections_are_used_again_and_replaced_when_the_server_closes_them(gets: DirectGets) -> None:
    server = Keeping(3)
    for _ in range(8):
        assert get(gets, server.endpoint) == (None, BODY)
    assert server.connections == 3
    gets.refuse()
    server.close()
    assert gets.refusing


def certified(directory: Path) -> tuple[ssl.SSLContext, str]:
    """Return a server's context, and the file of the authority that vouches for it."""
    certificate, key, authority = make_certificate(directory, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, str(authority)


@pytest.mark.parametrize(("trusted", "status", "connections"), [(True, None, 2), (False, 0, 0)])
def test_https_trusts_the_context_given(tmp_path: Path, trusted: bool, status: int | None, connections: int) -> None:
    """It is made once. A server that it does not trust gets no request."""
    context, authority = certified(tmp_path)
    server = Keeping(2, context)
    contexts = iter([ssl.create_default_context(cafile=authority if trusted else None)])
    gets = DirectGets(timeout_s=10.0, tls=lambda: next(contexts))
    assert get(gets, server.endpoint)[0] == status
    if trusted:
        assert [get(gets, server.endpoint) for _ in range(2)] == [(None, BODY)] * 2
    gets.refuse()
    server.close()
    assert server.connections == connections


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + BODY[:50]])
def test_a_server_that_falls_silent_over_tls_is_not_waited_for(tmp_path: Path, said: bytes) -> None:
    """Before its answer, or amid it."""
    (context, authority), over = certified(tmp_path), threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(65536)
            connection.sendall(said)
            over.wait()

    server = threading.Thread(target=serve)
    server.start()
    trusting = ssl.create_default_context(cafile=authority)
    gets = DirectGets(timeout_s=0.2, tls=lambda: trusting)
    assert get(gets, f"https://127.0.0.1:{listener.getsockname()[1]}")[0] == 0
    over.set()
    server.join()
    listener.close()
    gets.refuse()


def test_bytes_behind_an_answer_are_no_answer_to_the_next_request(gets: DirectGets) -> None:
    """A server that answers once too often: another connection is taken."""
    listener, connections = socket.create_server(("127.0.0.1", 0)), 0

    def serve() -> None:
        nonlocal connections
        for body in (BODY, BODY[::-1]):
            with listener.accept()[0] as connection:
                connections += 1
                connection.recv(65536)
                said = b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n" + body
                connection.sendall(said)
                time.sleep(0.02)
                with suppress(OSError):
                    connection.sendall(said)
                    connection.recv(65536)

    server = threading.Thread(target=serve)
    server.start()
    endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert get(gets, endpoint) == (None, BODY)
    time.sleep(0.2)
    assert get(gets, endpoint) == (None, BODY[::-1])
    gets.refuse()
    server.join()
    listener.close()
    assert connections == 2
