"""Proves that no answer of an S3 server ends in anything but a right value or a documented error, for the store and for
commands that administer a bucket. Inputs are what fuzzing kept, and drawn changes of right answers and refusals.

The first byte of an input chooses the question; the rest answers every request. ``Content-Length: *`` is made right.
"""

from __future__ import annotations

from itertools import islice
from unittest import mock

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import NotSupportedError, StoreError
from nixl_offload.stores import http_get, lifecycle, obstore
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.s3 import open_store
from nixl_offload.tiers.shared.inspect import SharedInspector, read_manifest
from tests.prove.fuzz import changed, fuzzed
from tests.s3.proxy import Raw, answering

_SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAFAKE", "AWS_SECRET_ACCESS_KEY": "SECRETSECRET", "AWS_SESSION_TOKEN": "TOKENTOKEN"}
_ENVIRONMENT = {
    **_SECRETS,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
_NAMESPACE = "0123456789abcdef0123456789abcdef"
_LISTED_MOST = 50
_DATE = b"Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT\r\n"
_PLAIN = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: *\r\n" + _DATE + b'ETag: "x"\r\n\r\n'
_REFUSAL = (
    b"HTTP/1.1 403 No\r\nConnection: close\r\nContent-Length: *\r\n\r\n"
    b"<Error><Code>AccessDenied</Code><Message>No.</Message></Error>"
)
_LISTING = (
    b'<?xml version="1.0"?><ListBucketResult><Name>kv-cache</Name><IsTruncated>false</IsTruncated><Contents>'
    b"<Key>%s</Key><LastModified>2026-11-21T10:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag><Size>10</Size>"
    b"</Contents></ListBucketResult>"
)
_RULES = (
    b"<LifecycleConfiguration><Rule><ID>a</ID><Filter><Prefix>x/</Prefix></Filter><Status>Enabled</Status>"
    b"<Expiration><Days>7</Days></Expiration></Rule></LifecycleConfiguration>"
)
_WORDS = [
    b"Content-Length: *", b"Content-Length: -5", b"Content-Length: 99999999999999999999", b"Content-Range: ",
    b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"Location: http://127.0.0.1:1/x\r\n",
    _DATE, b"Last-Modified: ", b"ETag: \"x\"\r\n", b"HTTP/1.1 ", b"301 ", b"307 ", b"404 ", b"416 ", b"503 ",
    b"<Key>", b"</Key>", b"<Size>-1</Size>", b"<Size>1e9</Size>", b"<IsTruncated>true</IsTruncated>",
    b"<NextContinuationToken>x</NextContinuationToken>", b"<!DOCTYPE x [<!ENTITY a \"b\">]>", b"&a;", b"&#0;",
    b"x-amz-bucket-region: ../x\r\n", b"<Code>NoSuchBucket</Code>", b"<Days>x</Days>", b"\r\n\r\n",
]  # fmt: skip


def _read(store: Store, tier: S3Config, answer: bytes) -> None:
    memory = bytearray(10)
    store.read_into("x/1", 0, memoryview(memory))
    is_plain = b"ncoding" not in answer.lower().replace(b"accept-encoding", b"")
    assert not is_plain or bytes(memory) in answer, "what is read is what the server sent"


def _list(store: Store, tier: S3Config, answer: bytes) -> None:
    for info in islice(store.list("x/"), _LISTED_MOST):
        _check(info)


def _head(store: Store, tier: S3Config, answer: bytes) -> None:
    found = store.head("x/1")
    if found is not None:
        _check(found)


def _check(info: ObjectInfo) -> None:
    assert type(info.name) is str
    assert type(info.size_bytes) is int
    assert info.size_bytes >= 0
    assert info.modified_s == info.modified_s, "a time is a number"


def _namespaces(store: Store, tier: S3Config, answer: bytes) -> None:
    inspector = SharedInspector(store, kind="s3", capacity_bytes=None)
    for namespace in islice(inspector.namespaces(), _LISTED_MOST):
        assert all(chunk.size_bytes >= 0 for chunk in islice(inspector.chunks(namespace), _LISTED_MOST))


def _lifecycle(store: Store, tier: S3Config, answer: bytes) -> None:
    assert all(change.isprintable() for change in lifecycle.plan_lifecycle(tier).changes)


_QUESTIONS = {
    _head: [_PLAIN],
    _read: [_PLAIN + b"0123456789"],
    lambda store, *_: store.write("x/1", memoryview(b"0123456789")): [_PLAIN],
    lambda store, *_: store.delete(["x/1", "x/2"]): [
        _PLAIN + b"<DeleteResult><Error><Key>x/1</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    ],
    _list: [_PLAIN + _LISTING % b"x/1", _PLAIN + _LISTING % (b"%s/01/%s.0000" % (_NAMESPACE.encode(), b"01" * 24))],
    lambda store, *_: read_manifest(store, _NAMESPACE): [_PLAIN + b'{"namespace": "x", "fields": {}}'],
    _namespaces: [_PLAIN + _LISTING % (b"%s/01/%s.0000" % (_NAMESPACE.encode(), b"01" * 24))],
    _lifecycle: [_PLAIN + _RULES],
}
"""What is asked, and right answers to it."""
_SEEDS = [
    bytes([number]) + answer
    for number, answers in enumerate(_QUESTIONS.values())
    for answer in (*answers, _PLAIN + b"0123456789", _REFUSAL)
]


@fuzzed("answers", _SEEDS, changed(_SEEDS, _WORDS))
def test_what_an_s3_server_answers(data: bytes) -> None:
    """Errors are short, printable and show no secret."""
    head, end, body = data[1:].partition(b"\r\n\r\n")
    answer = head.replace(b"Content-Length: *", b"Content-Length: %d" % len(body)) + end + body
    fields = {"kind": "s3", "bucket": "kv-cache", "region": "us-east-1", "ttl": "7d", "request_timeout": "2s"}
    once = mock.patch.object(lifecycle, "ATTEMPTS", 1), mock.patch.object(obstore, "ATTEMPTS", 1)  # pauses take long
    with (
        mock.patch.dict("os.environ", _ENVIRONMENT), once[0], once[1],
        mock.patch.object(http_get, "PAUSE_S", 0.0), answering(Raw(answer)) as server,
    ):  # fmt: skip
        tier = S3Config.model_validate({**fields, "endpoint": server.endpoint})
        store = open_store(tier)
        try:
            [*_QUESTIONS][data[0] % len(_QUESTIONS) if data else 0](store, tier, answer)
        except (StoreError, NotSupportedError) as error:
            _check_error(str(error))
        finally:
            store.close()


def _check_error(message: str) -> None:
    assert message.isprintable()
    assert not any(secret in message for secret in _SECRETS.values())
    assert len(message) < 2000
