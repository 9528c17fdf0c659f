"""Each fault of the proxy does what it says, seen by boto3 and by a plain HTTP client, and lets go afterwards."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError, HTTPClientError

from tests.s3.http1 import Head
from tests.s3.proxy import Answer, Cut, Delay, FaultProxy, Flip, Hold, Reset, Stall, Stretch
from tests.s3.servers import BUCKET, MotoServer, RcloneServer

BODY = bytes(range(256)) * 4096
GONE = (ConnectionClosedError, HTTPClientError, EndpointConnectionError)


@pytest.fixture(scope="module")
def running(rclone: RcloneServer) -> Iterator[tuple[FaultProxy, Any]]:
    with FaultProxy(rclone.port) as proxy, closing(rclone.client(proxy.endpoint)) as client:
        yield proxy, client


@pytest.fixture
def proxy(running: tuple[FaultProxy, Any]) -> Iterator[FaultProxy]:
    """One proxy for all tests; none leaves a rule behind."""
    proxy, _ = running
    yield proxy
    proxy.come_back()
    proxy.release_all()
    proxy.wait_idle()
    proxy.forget()


@pytest.fixture
def client(running: tuple[FaultProxy, Any]) -> Any:
    return running[1]


@pytest.fixture
def key(rclone: RcloneServer, prefix: str) -> str:
    """Name of an object that holds ``BODY``."""
    rclone.write(f"{prefix}/k", BODY)
    return f"{prefix}/k"


def test_without_rules_everything_passes_and_is_counted(proxy: FaultProxy, client: Any, prefix: str) -> None:
    key = f"{prefix}/a b+c"
    client.put_object(Bucket=BUCKET, Key=key, Body=BODY)
    assert _get(client, key) == BODY
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
    assert [get.bytes_down for get in proxy.requests("GET")] == [len(BODY), 256]
    assert [head.status for head in proxy.requests("HEAD", "a b")] == [200, 404]
    proxy.forget()
    assert not proxy.counts()


def test_bodies_without_a_length_and_lists_in_chunks_pass(moto: MotoServer, rclone: RcloneServer, prefix: str) -> None:
    names = [f"{prefix}/{n:04}" for n in range(200)]
    for name in names:
        rclone.path(name).parent.mkdir(exist_ok=True)
        rclone.path(name).touch()
    rclone.forget()
    with FaultProxy(rclone.port) as proxy, closing(rclone.client(proxy.endpoint)) as client:
        assert [e["Key"] for e in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]] == names
        with proxy.inject(Cut(at=0.5), operation="LIST"), pytest.raises((ClientError, *GONE)):
            client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    with FaultProxy(moto.port) as proxy, closing(moto.client(proxy.endpoint)) as client:
        client.put_object(Bucket=BUCKET, Key=prefix, Body=BODY)
        assert _get(client, prefix) == BODY
        assert client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["KeyCount"] == 1


def test_delays_add_up(proxy: FaultProxy, client: Any, key: str) -> None:
    with proxy.inject(Delay(0.1)), proxy.inject(Delay(0.1, at="answer"), operation="HEAD|GET"):
        start_s = time.monotonic()
        client.head_object(Bucket=BUCKET, Key=key)
        assert time.monotonic() - start_s >= 0.2


@pytest.mark.parametrize(
    ("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (403, "AccessDenied")], ids=["500", "503", "403"]
)
def test_answers_by_rule_never_reach_the_server(
    rclone: RcloneServer, proxy: FaultProxy, client: Any, key: str, status: int, code: str
) -> None:
    with proxy.inject(Answer(status, code)) as rule:
        with pytest.raises(ClientError, match=code):
            _get(client, key)
        with pytest.raises(ClientError, match=str(status)):
            client.head_object(Bucket=BUCKET, Key=key)
        with pytest.raises(ClientError, match=code):
            client.put_object(Bucket=BUCKET, Key=f"{key}-new", Body=BODY)
        assert rule.hits == 3
    assert not rclone.path(f"{key}-new").exists()
    assert _get(client, key) == BODY


@pytest.mark.parametrize("at", ["request", "answer", "headers", "body"])
def test_resets_of_a_get(proxy: FaultProxy, client: Any, key: str, at: Any) -> None:
    with proxy.inject(Reset(at), operation="GET"), pytest.raises(GONE):
        _get(client, key)
    (get,) = proxy.requests("GET")
    assert get.bytes_down == (len(BODY) // 2 if at == "body" else 0)
    assert _get(client, key) == BODY


@pytest.mark.parametrize(("at", "stored"), [("request", False), ("upload", False), ("answer", True)])
def test_resets_of_a_put(
    rclone: RcloneServer, proxy: FaultProxy, client: Any, prefix: str, at: Any, stored: bool
) -> None:
    """After "answer" the object is there although the client must believe that it is not."""
    with proxy.inject(Reset(at), operation="PUT"), pytest.raises(GONE):
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/k", Body=BODY)
    assert rclone.path(f"{prefix}/k").exists() == stored


def test_a_cut_body_is_noticed_and_a_lying_one_is_not(proxy: FaultProxy, client: Any, key: str) -> None:
    with proxy.inject(Cut(at=1000), operation="GET"), pytest.raises(GONE):
        _get(client, key)
    with proxy.inject(Cut(at=1000, lying=True), operation="GET"):
        assert _get(client, key) == BODY[:1000]
    with proxy.inject(Cut(at=0, lying=True), operation="GET"):
        assert _get(client, key) == b""
    assert _get(client, key) == BODY


def test_a_stretched_body_is_longer_than_the_object(proxy: FaultProxy, client: Any, key: str) -> None:
    with proxy.inject(Stretch(1000)) as rule:
        assert _get(client, key) == BODY + bytes(1000)
        assert client.head_object(Bucket=BUCKET, Key=key)["ContentLength"] == len(BODY) + 1000
        assert rule.hits == 2
    assert _get(client, key) == BODY


def test_what_a_lying_stretch_sends_comes_before_the_next_answer(proxy: FaultProxy) -> None:
    connecting, stretched = socket.create_connection(("127.0.0.1", proxy.port), timeout=10.0), Stretch(1000, lying=True)
    with connecting as connection, proxy.inject(stretched, times=1):
        connection.sendall(b"GET /bucket/key HTTP/1.1\r\nHost: here\r\n\r\n" * 2)  # the server refuses both
        got = b""
        while got.count(b"</Error>") < 2:
            got += connection.recv(1 << 16)
    assert got.startswith(b"HTTP/1.1 4")
    head, _, rest = got.partition(b"\r\n\r\n")
    told = int(Head.parse(head + b"\r\n\r\n").headers["content-length"])
    assert rest[:told].endswith(b"</Error>")
    assert rest[told:].startswith(bytes(1000) + b"HTTP/1.1 4")


def test_a_flipped_bit(rclone: RcloneServer, proxy: FaultProxy, client: Any, key: str) -> None:
    """Upwards nobody notices: rclone checks no body, so what rests in the bucket is not what was sent."""
    with proxy.inject(Flip(at=-1), operation="GET"):
        got = _get(client, key)
    assert got[:-1] == BODY[:-1]
    assert got[-1] == BODY[-1] ^ 0x10
    with proxy.inject(Flip(at=0.5, side="request"), operation="PUT") as rule:
        client.put_object(Bucket=BUCKET, Key=f"{key}-new", Body=BODY)
        assert rule.hits == 1
    stored, middle = rclone.path(f"{key}-new").read_bytes(), len(BODY) // 2
    assert stored[middle] == BODY[middle] ^ 0x10
    assert (stored[:middle], stored[middle + 1 :]) == (BODY[:middle], BODY[middle + 1 :])


def test_a_stalled_body_ends_after_release(proxy: FaultProxy, client: Any, key: str) -> None:
    with ThreadPoolExecutor(1) as pool, proxy.inject(Stall(at=0.5), operation="GET") as rule:
        got = pool.submit(_get, client, key)
        rule.wait()
        with pytest.raises(TimeoutError):
            proxy.wait_idle(timeout_s=0.2)
        (get,) = proxy.requests("GET")
        assert (get.status, get.bytes_down) == (200, len(BODY) // 2)
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
        _wait_for(lambda: rclone.path(f"{prefix}/late").exists())
        assert not rclone.path(f"{prefix}/early").exists()
        assert not any(put.done() for put in puts)
        proxy.release_all()
        for put in puts:
            put.result(10)
        assert rclone.path(f"{prefix}/early").exists()


def test_nth_times_and_probability_choose_requests(proxy: FaultProxy, client: Any, key: str) -> None:
    def outcomes(count: int) -> list[bool]:
        return [_answered(client, f"{key}-{n}") for n in range(count)]

    with proxy.inject(Answer(500, "InternalError"), nth=3):
        assert outcomes(4) == [True, True, False, True]
    with proxy.inject(Answer(500, "InternalError"), times=2):
        assert outcomes(4) == [False, False, True, True]
    with proxy.inject(Answer(500, "InternalError"), key=r"-[02]$"):
        assert outcomes(4) == [False, True, False, True]
    with proxy.inject(Answer(500, "InternalError"), probability=0.5, seed=7) as rule:
        outcomes(40)
        assert 10 <= rule.hits <= 30
    first = rule.hits
    with proxy.inject(Answer(500, "InternalError"), probability=0.5, seed=7) as rule:
        outcomes(40)
    assert rule.hits == first


def test_down_means_refused_and_back_means_back(proxy: FaultProxy, client: Any, key: str) -> None:
    client.head_object(Bucket=BUCKET, Key=key)
    proxy.go_down()
    with pytest.raises(EndpointConnectionError):
        client.head_object(Bucket=BUCKET, Key=key)
    proxy.come_back()
    client.head_object(Bucket=BUCKET, Key=key)


def test_the_server_behind_goes_and_comes_back() -> None:
    with RcloneServer() as server, FaultProxy(server.port) as proxy, closing(server.client(proxy.endpoint)) as client:
        client.put_object(Bucket=BUCKET, Key="k", Body=BODY)
        server.stop()
        with pytest.raises(GONE):
            _get(client, "k")
        server.start()
        assert _get(client, "k") == BODY


def test_close_ends_what_is_held_and_leaves_no_thread(rclone: RcloneServer, key: str) -> None:
    threads = threading.active_count()
    with closing(rclone.client()) as plain, ThreadPoolExecutor(1) as pool:
        with FaultProxy(rclone.port) as proxy, closing(rclone.client(proxy.endpoint)) as client:
            rule = proxy.inject(Hold(), operation="GET")
            got = pool.submit(_get, client, key)
            rule.wait()
        with pytest.raises(GONE):
            got.result(10)
        assert _get(plain, key) == BODY
    assert threading.active_count() == threads


def test_parallel_large_bodies_arrive_whole(proxy: FaultProxy, rclone: RcloneServer, client: Any, prefix: str) -> None:
    rclone.make_directories(prefix)
    bodies = {f"{prefix}/{n}": bytes([n]) * (8 << 20) for n in range(4)}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda item: client.put_object(Bucket=BUCKET, Key=item[0], Body=item[1]), bodies.items()))
        got = list(pool.map(lambda name: _get(client, name), bodies))
    assert [hashlib.sha256(b).digest() for b in got] == [hashlib.sha256(b).digest() for b in bodies.values()]


def _get(client: Any, key: str) -> bytes:
    return bytes(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())


def _answered(client: Any, key: str) -> bool:
    """Whether a HEAD came back from the server, which knows no such object, or from the proxy's rule."""
    with pytest.raises(ClientError) as raised:
        client.head_object(Bucket=BUCKET, Key=key)
    return bool(raised.value.response["ResponseMetadata"]["HTTPStatusCode"] == 404)


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
