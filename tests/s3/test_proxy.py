"""Each fault of the proxy does what it says, seen by boto3 and at the server behind, and lets go afterwards."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError, HTTPClientError

from tests.s3.proxy import Answer, Cut, Delay, Fault, FaultProxy, Flip, Hold, Reset, Stall, Stretch
from tests.s3.servers import BUCKET, MotoServer, RcloneServer

BODY = bytes(range(256)) * 4096
GONE = (ConnectionClosedError, HTTPClientError, EndpointConnectionError)


@pytest.fixture
def proxy(rclone: RcloneServer) -> Iterator[FaultProxy]:
    with FaultProxy(rclone.port) as proxy:
        yield proxy


@pytest.fixture
def client(rclone: RcloneServer, proxy: FaultProxy) -> Iterator[Any]:
    with closing(rclone.client(proxy.endpoint)) as client:
        yield client


@pytest.fixture
def key(rclone: RcloneServer, prefix: str) -> str:
    """Name of an object that holds ``BODY``."""
    rclone.write(f"{prefix}/k", BODY)
    return f"{prefix}/k"


def get(client: Any, key: str) -> bytes:
    return bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def test_without_rules_everything_passes_and_is_counted(proxy: FaultProxy, client: Any, prefix: str) -> None:
    key = f"{prefix}/a b+c"
    client.put_object(Bucket=BUCKET, Key=key, Body=BODY)
    assert get(client, key) == BODY
    assert client.get_object(Bucket=BUCKET, Key=key, Range="bytes=256-511")["Body"].read() == BODY[:256]
    client.head_object(Bucket=BUCKET, Key=key)
    assert [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]] == [key]
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key}]})
    with pytest.raises(ClientError, match="404"):
        client.head_object(Bucket=BUCKET, Key=key)
    proxy.wait_idle()
    assert proxy.counts() == {"PUT": 1, "GET": 2, "HEAD": 2, "LIST": 1, "DELETE_MANY": 1}
    (put,) = proxy.requests("PUT")
    assert (put.key, put.status, put.bytes_up) == (key, 200, len(BODY))
    assert [each.bytes_down for each in proxy.requests("GET")] == [len(BODY), 256]
    assert [each.status for each in proxy.requests("HEAD", "a b")] == [200, 404]
    proxy.forget()
    assert not proxy.counts()


def test_answers_in_chunks_pass(moto: MotoServer, prefix: str) -> None:
    with FaultProxy(moto.port) as proxy, closing(moto.client(proxy.endpoint)) as client:
        client.put_object(Bucket=BUCKET, Key=prefix, Body=BODY)
        assert get(client, prefix) == BODY
        assert client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["KeyCount"] == 1


@pytest.mark.parametrize(
    ("fault", "read", "sent_bytes"),
    [
        (Reset("request"), None, 0),
        (Reset("answer"), None, 0),
        (Reset("headers"), None, 0),
        (Reset("body"), None, len(BODY) // 2),
        (Cut(at=1000), None, 1000),
        (Cut(at=1000, lying=True), BODY[:1000], 1000),
        (Cut(at=0, lying=True), b"", 0),
        (Stretch(1000), BODY + bytes(1000), len(BODY)),
        (Flip(at=-1), BODY[:-1] + bytes([BODY[-1] ^ 0x10]), len(BODY)),
    ],
    ids=lambda value: str(value) if isinstance(value, Fault) else "",
)
def test_what_a_get_sees(
    proxy: FaultProxy, client: Any, key: str, fault: Fault, read: bytes | None, sent_bytes: int
) -> None:
    """And the next one sees nothing of it."""
    with proxy.inject(fault, operation="GET") as rule:
        if read is None:
            with pytest.raises(GONE):
                get(client, key)
        else:
            assert get(client, key) == read
        assert rule.hits == 1
    proxy.wait_idle()  # the client may be done before it is
    assert proxy.requests("GET")[0].bytes_down == sent_bytes
    assert get(client, key) == BODY


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (403, "AccessDenied")])
def test_answers_by_rule_never_reach_the_server(
    rclone: RcloneServer, proxy: FaultProxy, client: Any, key: str, status: int, code: str
) -> None:
    with proxy.inject(Answer(status, code)) as rule:
        with pytest.raises(ClientError, match=code):
            get(client, key)
        with pytest.raises(ClientError, match=str(status)):
            client.head_object(Bucket=BUCKET, Key=key)
        with pytest.raises(ClientError, match=code):
            client.put_object(Bucket=BUCKET, Key=f"{key}-new", Body=BODY)
        assert rule.hits == 3
    assert not rclone.path(f"{key}-new").exists()
    assert get(client, key) == BODY


@pytest.mark.parametrize(("at", "stored"), [("request", False), ("upload", False), ("answer", True)])
def test_resets_of_a_put(
    rclone: RcloneServer, proxy: FaultProxy, client: Any, prefix: str, at: Any, stored: bool
) -> None:
    """After "answer" the object is there although the client must believe that it is not."""
    with proxy.inject(Reset(at), operation="PUT"), pytest.raises(GONE):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/k", Body=BODY)
    assert rclone.path(f"{prefix}/k").exists() == stored


def test_a_flipped_bit_of_a_put_is_stored(rclone: RcloneServer, proxy: FaultProxy, client: Any, key: str) -> None:
    with proxy.inject(Flip(at=0.5, side="request"), operation="PUT"):
        client.put_object(Bucket=BUCKET, Key=f"{key}-new", Body=BODY)
    stored, middle = rclone.path(f"{key}-new").read_bytes(), len(BODY) // 2
    assert stored == BODY[:middle] + bytes([BODY[middle] ^ 0x10]) + BODY[middle + 1 :]


def test_what_a_lying_stretch_sends_comes_before_the_next_answer(proxy: FaultProxy) -> None:
    connecting, stretched = socket.create_connection(("127.0.0.1", proxy.port), timeout=10.0), Stretch(1000, lying=True)
    with connecting as connection, proxy.inject(stretched, times=1):
        connection.sendall(b"GET /bucket/key HTTP/1.1\r\nHost: here\r\n\r\n" * 2)  # the server refuses both
        got = b""
        while got.count(b"</Error>") < 2:
            got += connection.recv(1 << 16)
    head, _, rest = got.partition(b"\r\n\r\n")
    told = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert rest[:told].endswith(b"</Error>")
    assert rest[told:].startswith(bytes(1000) + b"HTTP/1.1 4")


def test_delays_add_up(proxy: FaultProxy, client: Any, key: str) -> None:
    with proxy.inject(Delay(0.1)), proxy.inject(Delay(0.1, at="answer"), operation="HEAD|GET"):
        start_s = time.monotonic()
        client.head_object(Bucket=BUCKET, Key=key)
        assert time.monotonic() - start_s >= 0.2


def test_a_stalled_body_ends_after_release(proxy: FaultProxy, client: Any, key: str) -> None:
    with ThreadPoolExecutor(1) as pool, proxy.inject(Stall(at=0.5), operation="GET") as rule:
        got = pool.submit(get, client, key)
        rule.wait()
        with pytest.raises(TimeoutError):
            proxy.wait_idle(timeout_s=0.2)
        (request,) = proxy.requests("GET")
        assert (request.status, request.bytes_down) == (200, len(BODY) // 2)
        rule.release()
        assert got.result(10) == BODY


def test_a_held_put_reaches_the_server_only_after_release(
    rclone: RcloneServer, proxy: FaultProxy, client: Any, prefix: str
) -> None:
    rclone.make_directories(prefix)
    with ThreadPoolExecutor(2) as pool:
        early = proxy.inject(Hold(), operation="PUT", key="early$")
        late = proxy.inject(Hold(at="answer"), operation="PUT", key="late$")
        puts = [
            pool.submit(client.put_object, Bucket=BUCKET, Key=f"{prefix}/{name}", Body=BODY)
            for name in ("early", "late")
        ]
        early.wait()
        late.wait()
        deadline_s = time.monotonic() + 10.0
        while not rclone.path(f"{prefix}/late").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert not rclone.path(f"{prefix}/early").exists()
        assert not any(put.done() for put in puts)
        proxy.release_all()
        for put in puts:
            put.result(10)
        assert rclone.path(f"{prefix}/early").exists()


def test_nth_times_and_probability_choose_requests(proxy: FaultProxy, client: Any, key: str) -> None:
    def passed(count: int) -> list[bool]:
        """Whether each HEAD came back from the server, which has no such object, or by the rule."""
        found = []
        for number in range(count):
            with pytest.raises(ClientError) as raised:
                client.head_object(Bucket=BUCKET, Key=f"{key}-{number}")
            found.append(raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404)
        return found

    fault = Answer(500, "InternalError")
    with proxy.inject(fault, nth=3):
        assert passed(4) == [True, True, False, True]
    with proxy.inject(fault, times=2):
        assert passed(4) == [False, False, True, True]
    with proxy.inject(fault, key=r"-[02]$"):
        assert passed(4) == [False, True, False, True]
    hits = []
    for _ in range(2):
        with proxy.inject(fault, probability=0.5, seed=7) as rule:
            passed(40)
            hits.append(rule.hits)
    assert hits[0] == hits[1]
    assert 10 <= hits[0] <= 30


def test_down_means_refused_and_back_means_back(proxy: FaultProxy, client: Any, key: str) -> None:
    client.head_object(Bucket=BUCKET, Key=key)
    proxy.go_down()
    with pytest.raises(EndpointConnectionError):
        client.head_object(Bucket=BUCKET, Key=key)
    proxy.come_back()
    client.head_object(Bucket=BUCKET, Key=key)


def test_close_ends_what_is_held_and_leaves_no_thread(rclone: RcloneServer, key: str) -> None:
    threads = threading.active_count()
    with ThreadPoolExecutor(1) as pool:
        with FaultProxy(rclone.port) as proxy, closing(rclone.client(proxy.endpoint)) as client:
            rule = proxy.inject(Hold(), operation="GET")
            got = pool.submit(get, client, key)
            rule.wait()
        with pytest.raises(GONE):
            got.result(10)
    assert threading.active_count() == threads
