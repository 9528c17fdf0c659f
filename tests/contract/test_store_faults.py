"""An S3 store and servers that are dead, hang, refuse, break off or lie; and credentials. No secret gets out.

Against servers with one answer for all, and rclone. Each case bounds the time that a call may take.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import certifi
import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import ConfigError, NotSupportedError, StoreError
from nixl_offload.movers.nixl import object_plugin
from nixl_offload.stores import obstore
from nixl_offload.stores.base import Store
from nixl_offload.stores.lifecycle import plan_lifecycle
from nixl_offload.stores.s3 import S3Address, open_store
from tests.contract.suites.store_suite import CALLS, cause_of, read
from tests.s3.proxy import Answer, Fault, FaultProxy, Hold, Raw, Reset, answering, raw
from tests.s3.servers import RcloneServer, free_port

KEY_ID = "AKIAFAKEFAKEFAKEFAKE"
SECRET = "SECRETSECRETSECRETSECRETSECRETSECRETSECR"
TOKEN = "TOKENTOKENTOKENTOKENTOKENTOKEN"
TIMEOUT_S = 0.3
PATIENCE_S = 30.0
"""A client that ignored the timeout would take a minute or more; one on a busy machine needs some seconds."""


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that can be recognised, and nothing of the machine's own."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")


def tier_at(endpoint: str, **fields: object) -> S3Config:
    fields = {"bucket": "kv-cache", "region": "us-east-1", "request_timeout": "10s", **fields}
    return S3Config.model_validate({"kind": "s3", "endpoint": endpoint, **fields})


def store_at(endpoint: str, **fields: object) -> Store:
    return open_store(tier_at(endpoint, **fields))


def failure_of(store: Store, operation: str) -> StoreError:
    try:
        with pytest.raises(StoreError) as caught:
            CALLS[operation](store)
    finally:
        store.close()
    return caught.value


def error(status: str, code: str, more: str = "") -> Raw:
    """Return S3's way to refuse."""
    return raw(status, f"<Error><Code>{code}</Code><Message>Said so.</Message>{more}</Error>".encode())


WHOLE = {"ETag": '"e"', "Last_Modified": "Sat, 21 Nov 2026 10:00:00 GMT"}
PARTIAL = {"Content_Range": "bytes 0-9/10", **WHOLE}
SHORT = {"Content_Range": "bytes 0-4/5", **WHOLE}
BROKEN = raw("206 Partial Content", b"01234", length=10, **PARTIAL)


@contextlib.contextmanager
def dead() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def unconnected() -> Iterator[str]:
    """An address that answers no SYN: its listener's queue is full."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            queued = sockets.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def served(fault: Fault) -> Iterator[str]:
    with answering(fault) as server:
        yield server.endpoint
        assert len(server.heads) <= 4, "three attempts, and a direct GET before a read"


@pytest.mark.parametrize(
    ("served_by", "operations", "causes"),
    [
        (dead, CALLS, {"unreachable"}),
        (unconnected, ["head"], {"timeout", "unreachable"}),
        (lambda: served(Hold()), ["head", "read", "write"], {"timeout"}),
        (lambda: served(Raw(BROKEN.content, hangs=True)), ["read"], {"timeout"}),
        (lambda: served(Reset()), ["read"], {"unreachable"}),
    ],
    ids=["dead", "does not connect", "hangs", "stalls amid a body", "resets"],
)
def test_a_server_that_does_not_answer_is_given_up(
    served_by: Callable[[], contextlib.AbstractContextManager[str]],
    operations: Iterable[str],
    causes: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within seconds, retries and pauses included."""
    monkeypatch.setattr(obstore, "CONNECT_TIMEOUT_S", 0.2)
    for operation in operations:
        with served_by() as endpoint:
            start_s = time.monotonic()
            store = store_at(endpoint, request_timeout=f"{TIMEOUT_S}s")
            assert failure_of(store, operation).cause in causes
            assert time.monotonic() - start_s < PATIENCE_S


def undeleted(code: str) -> Raw:
    """A bulk delete's answer: its status is 200, the code inside counts."""
    failed = f"<Error><Key>x/1</Key><Code>{code}</Code><Message>No.</Message></Error>"
    return raw("200 OK", f"<DeleteResult>{failed}</DeleteResult>".encode())


def listed(key: str = "x/1", size: str = "5", more: str = "") -> Raw:
    """A page of a listing with one object."""
    moment = "<LastModified>2026-11-21T10:00:00.000Z</LastModified>"
    found = f"<Contents><Key>{key}</Key>{moment}<ETag>e</ETag><Size>{size}</Size></Contents>"
    return raw("200 OK", f"<ListBucketResult>{more}{found}</ListBucketResult>".encode())


NEXT = "<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
ANSWERS: dict[str, tuple[str, Raw, str, str]] = {
    "denied": ("read", error("403 Forbidden", "AccessDenied"), "denied", "AccessDenied: Said so."),
    "expired": ("read", error("400 Bad Request", "ExpiredToken"), "denied", "ExpiredToken"),
    "slow down": ("read", error("503 Service Unavailable", "SlowDown"), "throttled", "slow down"),
    "too many": ("read", raw("429 Too Many Requests"), "throttled", "slow down"),
    "in trouble": ("read", error("500 Internal Server Error", "InternalError"), "server", "HTTP 500"),
    "full": ("read", error("403 Forbidden", "QuotaExceeded"), "full", "QuotaExceeded"),
    "invalid": ("read", error("400 Bad Request", "InvalidRequest"), "io", "InvalidRequest"),
    "elsewhere": ("read", raw("301 Moved Permanently"), "io", "set region"),
    "no bucket": ("read", error("404 Not Found", "NoSuchBucket"), "io", "no bucket 'kv-cache'"),
    "no object": ("read", error("404 Not Found", "NoSuchKey"), "missing", "NoSuchKey"),
    "past its end": ("read", error("416 Range Not Satisfiable", "InvalidRange"), "short", "ends before"),
    "broken off": ("read", BROKEN, "unreachable", "GET"),
    "short": ("read", raw("206 Partial Content", b"01234", **SHORT), "short", ""),
    "short whole": ("read", raw("200 OK", b"01234", **WHOLE), "short", ""),
    "may not delete": ("delete", undeleted("AccessDenied"), "denied", ""),
    "cannot delete": ("delete", undeleted("InternalError"), "server", ""),
    "negative size": ("list", listed(size="-5"), "io", "-5"),
    "for ever the same page": ("list", listed(more=NEXT), "server", "begins again"),
    "controls in a name": ("list", listed(key=f"x/{chr(0x85)}1", size="-1"), "io", ""),
    "controls in a code": ("list", error("400 Bad Request", f"Bad{chr(0x9B)}2J"), "io", ""),
}


@pytest.mark.parametrize(("operation", "said", "cause", "words"), ANSWERS.values(), ids=ANSWERS)
def test_each_refusal_has_its_cause_and_words(operation: str, said: Raw, cause: str, words: str) -> None:
    """S3's own words, where and what was asked; nothing that a terminal obeys: servers, and whoever may write to a
    bucket, could draw on an operator's screen.
    """
    with answering(said) as server:
        failure = failure_of(store_at(server.endpoint), operation)
    text = str(failure)
    assert (failure.cause, words in text) == (cause, True), text
    assert text.startswith("s3://kv-cache at http")
    assert {"read": "GET x/1", "delete": "DELETE x/1", "list": "LIST x/"}[operation] in text
    assert text.isprintable()
    assert failure.__cause__ is not None or cause == "short" or "begins again" in words


def test_deleting_what_is_absent_is_fine() -> None:
    with answering(undeleted("NoSuchKey")) as server, contextlib.closing(store_at(server.endpoint)) as store:
        store.delete(["x/1"])


def test_a_server_without_ranges_is_read_past_the_offset() -> None:
    """It sends the whole object whatever was asked for; the right bytes arrive, and too few of them are short."""
    whole = raw("200 OK", b"0123456789", **WHOLE)
    with answering(whole) as server:
        store = store_at(server.endpoint)
        for offset, length_bytes in [(0, 10), (0, 3), (4, 6), (9, 1)]:
            assert read(store, "x/1", offset, length_bytes) == b"0123456789"[offset : offset + length_bytes]
        assert cause_of(lambda: read(store, "x/1", 5, 6)) == "short"
        store.close()


def test_a_server_that_takes_no_presigned_addresses_is_read_all_the_same() -> None:
    """It is asked so once, not for each object."""
    resumed, presigned = "bytes=5-", "X-Amz-Signature="
    with FaultProxy() as server, contextlib.closing(store_at(server.endpoint)) as store:
        breaks = server.inject(BROKEN, unless=f"{resumed}|{presigned}", times=0)
        server.inject(raw("206 Partial Content", b"0123456789", **PARTIAL), unless=f"{resumed}|{presigned}")
        server.inject(raw("200 OK", b"0123456789", **WHOLE), unless=presigned)
        server.inject(raw("403 Forbidden"))
        for _ in range(3):
            assert read(store, "x/1", 0, 10) == b"0123456789"
        assert [presigned in head for head in server.heads] == [True, False, False, False]
        breaks.times = 1
        assert read(store, "x/1", 0, 10) == b"0123456789", "a body that breaks off is read once more"


def test_wrong_credentials_are_denied(rclone: RcloneServer) -> None:
    """A real server checks the signature; each operation says denied, and HEAD does not say absent."""
    for operation in CALLS:
        failure = failure_of(store_at(rclone.endpoint), operation)
        assert failure.cause == "denied", operation


def test_no_credentials_are_denied_and_looked_for_again(rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text says what helps; once there are some, the same store works."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(obstore, "CREDENTIALS_RETRY_S", 0.0)
    store = store_at(rclone.endpoint)
    for operation in ("head", "read", "list"):
        with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID") as caught:
            CALLS[operation](store)
        assert caught.value.cause == "denied"
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)
    assert store.head("x/none") is None
    store.close()


def test_keys_that_are_rotated_in_a_file_are_used_after_the_first_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several threads, for reads, which go by presigned addresses, and all else."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setattr(obstore, "CREDENTIALS_RETRY_S", 0.0)

    def write_keys() -> None:
        keys = f"aws_access_key_id = {server.access_key_id}\naws_secret_access_key = {server.secret_access_key}\n"
        (tmp_path / "credentials").write_text(f"[default]\n{keys}")

    with RcloneServer() as server, ThreadPoolExecutor(4) as threads:
        server.write("x/1", b"0123456789")
        write_keys()
        with contextlib.closing(store_at(server.endpoint)) as store:
            for operation in ("read", "write", "head", "list"):
                CALLS[operation](store)
                server.stop()
                server.access_key_id, server.secret_access_key = f"AKIA{operation.upper()}", operation * 8
                server.start()
                write_keys()
                assert cause_of(lambda: CALLS[operation](store)) == "denied"  # noqa: B023
                list(threads.map(lambda _: CALLS[operation](store), range(4)))  # noqa: B023
            assert [info.name for info in store.list("x/")] == ["x/1"]


@pytest.fixture
def allowed(rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own credentials."""
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)


def test_a_client_that_works_outlives_refusals(
    rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch, allowed: None
) -> None:
    """Of one object, say: neither a chain that has the same keys nor one that has none ends what worked before."""
    monkeypatch.setattr(obstore, "CREDENTIALS_RETRY_S", 0.0)
    rclone.write("x/1", b"0123456789")
    made = []
    real = obstore.S3Store
    monkeypatch.setattr(obstore, "S3Store", lambda *given, **named: made.append(1) or real(*given, **named))
    with FaultProxy(rclone.port) as proxy, contextlib.closing(store_at(proxy.endpoint, bucket=rclone.bucket)) as store:
        for _ in range(2):
            with proxy.inject(Answer(403, "AccessDenied"), operation="PUT"):
                assert cause_of(lambda: CALLS["write"](store)) == "denied"
            assert read(store, "x/1", 0, 10) == b"0123456789"
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                monkeypatch.delenv(name, raising=False)
    assert len(made) == 1


def test_an_absent_bucket_is_not_an_absent_object(rclone: RcloneServer, allowed: None) -> None:
    """But for a HEAD, whose answer is the same for both."""
    for operation in CALLS.keys() - {"head"}:
        failure = failure_of(store_at(rclone.endpoint, bucket="no-such-bucket"), operation)
        assert (failure.cause, "bucket init" in str(failure)) == ("io", True), (operation, str(failure))


def test_no_secret_in_logs_errors_and_reprs(caplog: pytest.LogCaptureFixture) -> None:
    """Not even at DEBUG, and when the server quotes the request that it refuses, as S3 does."""
    quoted = f"<AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId><CanonicalRequest>{TOKEN} {SECRET}</CanonicalRequest>"
    said = [error("403 Forbidden", "SignatureDoesNotMatch", quoted), error("500 Oh", "InternalError", quoted)]
    said += [raw("200 OK", quoted.encode()), raw("404 Not Found", quoted.encode())]
    texts: list[str] = []
    caplog.set_level(logging.DEBUG)
    for one in said:
        with answering(one) as server:
            store = store_at(server.endpoint)
            for operation in CALLS.values():
                try:
                    operation(store)
                except StoreError as failure:
                    texts += [str(failure), repr(failure), "".join(traceback.format_exception(failure))]
            store.close()
            try:
                plan_lifecycle(tier_at(server.endpoint))
            except (StoreError, NotSupportedError) as failure:
                texts += [str(failure), "".join(traceback.format_exception(failure))]
            texts += [repr(store), store.where, repr(vars(store))]
            assert len(server.heads) > len(CALLS) - 1
    texts += [record.getMessage() for record in caplog.records] + [repr(record.args) for record in caplog.records]
    assert len(texts) > 20
    for secret in (SECRET, TOKEN, KEY_ID):
        assert [text[:300] for text in texts if secret in text] == []


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Path style where an endpoint is given, else virtual; the user of an endpoint's URL is not shown."""

    def address(**fields: object) -> S3Address:
        return S3Address.of(S3Config.model_validate({"kind": "s3", "bucket": "kv-cache", **fields}))

    assert address().path_style is False
    assert address(endpoint="http://h:1").path_style is True
    assert address(bucket="kv.cache").path_style is True
    assert address(endpoint="https://h:1", addressing="virtual").virtual_endpoint == "https://kv-cache.h:1"
    assert address(prefix="a/b").key("ns/x") == "a/b/ns/x"
    assert address().where == "s3://kv-cache"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:1")
    assert address(prefix="a").where == "s3://kv-cache/a at http://h:1"
    for bad in ("http://user:SECRET@h:1", "http://h:90000", "http://h:0", "SECRET:9000", "http://"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", bad)
        with pytest.raises(ConfigError, match=r"^AWS_ENDPOINT_URL .*allowed: http") as refusal:
            address()
        assert "SECRET" not in str(refusal.value)
        assert address(endpoint="http://h:1").endpoint == "http://h:1"


PROFILES = """
[default]
endpoint_url = http://127.0.0.1:1
[profile kv]
region = eu-test-1
ca_bundle = /pems/kv.pem
services = storage
[services storage]
s3 =
  endpoint_url = {endpoint}
"""


def test_the_profile_has_the_endpoint_for_every_client(
    rclone: RcloneServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: None
) -> None:
    """For the store, for what ``check`` and ``bucket init`` ask, and for NIXL. What is nearer counts for more."""
    (tmp_path / "config").write_text(PROFILES.format(endpoint=rclone.endpoint))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "kv")
    tier = S3Config.model_validate({"kind": "s3", "bucket": rclone.bucket})
    rclone.write("x/1", b"0123456789")
    assert S3Address.of(tier).where == f"s3://{rclone.bucket} at {rclone.endpoint}"
    assert S3Address.of(tier).ca_bundle == "/pems/kv.pem"
    monkeypatch.setenv("AWS_CA_BUNDLE", certifi.where())
    with contextlib.closing(open_store(tier)) as store:
        assert read(store, "x/1", 0, 10) == b"0123456789"
    assert S3Address.of(tier).region == "eu-test-1"
    assert {"endpoint_override": rclone.endpoint, "region": "eu-test-1"}.items() <= object_plugin(tier).params.items()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:3")
    assert S3Address.of(tier).endpoint == "http://127.0.0.1:3"
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_PROFILE")
    assert S3Address.of(tier).endpoint == "http://127.0.0.1:1"
