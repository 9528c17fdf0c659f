"""Direct GETs over real sockets: an answer with exactly the bytes asked for fills the memory, connections
are used again, and whatever else a server says or does is left to the client that signed.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from nixl_offload.stores import http_get
from nixl_offload.stores.http_get import DirectGets
from tests.s3.proxy import FaultProxy, Hold, Raw, Reset, answering, raw
from tests.s3.servers import make_contexts

BODY = bytes(range(200))


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server and of a client that trusts it."""
    return make_contexts(tmp_path_factory.mktemp("certified"))[:2]


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch, certified: tuple[ssl.SSLContext, ssl.SSLContext]) -> Iterator[DirectGets]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    opened = DirectGets(timeout_s=30.0, tls=lambda: certified[1])
    yield opened
    opened.close()
    assert not opened._idle


def get(gets: DirectGets, endpoint: str, offset: int = 0, length: int = len(BODY)) -> tuple[bool, bytes]:
    memory = bytearray(length)
    return gets.read_into(f"{endpoint}/bucket/x/1?X-Amz-Signature=0", offset, memoryview(memory)), bytes(memory)


WHOLE = {
    "whole": raw("200 OK", BODY),
    "a range": raw("206 Partial Content", BODY, content_range="bytes 0-199/1000"),
    "a range as 200": raw("200 OK", BODY, content_range="bytes 0-199/200"),
    "fields in any case": Raw(b"HTTP/1.1 200 OK\r\ncOnTeNt-LeNgTh:200\r\nX: a: b\r\n\r\n" + BODY),
}


@pytest.mark.parametrize("said", WHOLE.values(), ids=WHOLE)
def test_an_answer_with_the_bytes_asked_for_fills_the_memory(gets: DirectGets, said: Raw) -> None:
    with answering(said) as server:
        assert get(gets, server.endpoint) == (True, BODY)
        [head] = server.heads
        assert head.startswith("GET /bucket/x/1?X-Amz-Signature=0 HTTP/1.1\n")
        assert "Range: bytes=0-199\n" in head


OTHER = {
    "shorter": (raw("200 OK", BODY[:199]), False),
    "longer": (raw("200 OK", BODY + b"x"), False),
    "another range": (raw("206 Partial Content", BODY, content_range="bytes 1-200/1000"), False),
    "a part without a range": (raw("206 Partial Content", BODY), False),
    "in chunks": (Raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 200\r\n\r\n" + BODY), False),
    "compressed": (raw("200 OK", BODY, content_encoding="gzip"), False),
    "without a length": (Raw(b"HTTP/1.1 200 OK\r\n\r\n" + BODY), False),
    "refused": (raw("403 Forbidden", BODY), False),
    "two lengths": (Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\nContent-Length: 300\r\n\r\n" + BODY), False),
    "broken off": (raw("200 OK", BODY[:100], length=200), True),
    "no HTTP": (Raw(b"SSH-2.0-OpenSSH\r\n\r\n"), True),
    "headers without an end": (Raw(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000), True),
    "reset": (Reset(), True),
    "hung": (Hold(), True),
    "hung amid the body": (Raw(raw("200 OK", BODY[:50], length=200).content, hangs=True), True),
    "a byte now and then": (Raw(raw("200 OK", BODY).content, pause_s=0.02), True),
}


@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize(("said", "pauses"), OTHER.values(), ids=OTHER)
def test_any_other_answer_is_left_alone(
    gets: DirectGets,
    certified: tuple[ssl.SSLContext, ssl.SSLContext],
    said: Raw | Hold | Reset,
    pauses: bool,
    is_tls: bool,
) -> None:
    """A pause follows only if there was no whole answer, because the next GET could take as long."""
    is_slow = not isinstance(said, Reset) and (isinstance(said, Hold) or said.hangs or said.pause_s)
    gets._timeout_s = 0.3 if is_slow else gets._timeout_s
    with answering(said, certified[0] if is_tls else None) as server:
        assert get(gets, server.endpoint)[0] is False
        assert gets.is_off is pauses


@pytest.mark.parametrize(("no_proxy", "goes"), [("", False), ("example.org, 127.0.0.1", True), ("*", True)])
def test_a_proxy_is_for_hosts_that_no_proxy_does_not_name(
    gets: DirectGets, monkeypatch: pytest.MonkeyPatch, no_proxy: str, goes: bool
) -> None:
    for name, value in (("http_proxy", "http://127.0.0.1:1"), ("no_proxy", no_proxy)):
        monkeypatch.setenv(name, value)
        monkeypatch.delenv(name.upper(), raising=False)
    with answering(WHOLE["whole"]) as server:
        for _ in range(2):
            if not gets.is_off:
                assert (get(gets, server.endpoint) == (True, BODY)) is goes
        assert len(server.heads) == 2 * goes


def test_a_second_address_is_tried_beside_one_that_does_not_answer(
    gets: DirectGets, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(WHOLE["whole"]) as server, socket.create_server(("127.0.0.2", 0), backlog=0) as full:
        addresses = [full.getsockname(), ("127.0.0.1", urlsplit(server.endpoint).port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", address) for address in addresses]
        with socket.create_connection(addresses[0]):
            monkeypatch.setattr(http_get, "NEXT_ADDRESS_S", 0.05)
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
            assert get(gets, server.endpoint.replace("127.0.0.1", "several.example")) == (True, BODY)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n"
GOOD = Raw(HEAD + BODY, keeps=True)


def test_connections_are_used_again_and_replaced_when_the_server_closes_them(gets: DirectGets) -> None:
    with answering(GOOD) as server:
        for _ in range(3):
            for _ in range(3):
                assert get(gets, server.endpoint) == (True, BODY)
            server.go_down()
            server.come_back()
        assert server.accepted == 3


def test_bytes_behind_an_answer_are_no_answer_to_the_next_request(gets: DirectGets) -> None:
    """If a server sends more than one answer, another connection is used."""
    size_bytes = 100_000
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size_bytes
    one, other = head + b"1" * size_bytes, head + b"2" * size_bytes
    with FaultProxy() as server:
        rule = server.inject(Raw(one + one, keeps=True))
        assert get(gets, server.endpoint, length=size_bytes) == (True, b"1" * size_bytes)
        rule.fault = Raw(other, keeps=True)
        assert get(gets, server.endpoint, length=size_bytes) == (True, b"2" * size_bytes)
        assert server.accepted == 2


@pytest.mark.parametrize("trusted", [True, False])
def test_https_trusts_the_context_given(certified: tuple[ssl.SSLContext, ssl.SSLContext], trusted: bool) -> None:
    """The context is made once. A server that it does not trust gets no request."""
    contexts = iter([certified[1] if trusted else ssl.create_default_context()])
    with answering(GOOD, certified[0]) as server:
        gets = DirectGets(timeout_s=10.0, tls=lambda: next(contexts))
        for _ in range(2 if trusted else 1):
            assert [get(gets, server.endpoint)[0] for _ in range(2)] == [trusted] * 2
            server.go_down()
            server.come_back()
        assert (server.accepted, len(server.heads)) == ((2, 4) if trusted else (0, 0))
        gets.close()
