"""Targets: what an S3 server answers, to the store and to commands that administer a bucket.

The first byte chooses what is asked; the rest is the answer to every request. ``Content-Length: *`` is made right.
Requests are tried once, for pauses between attempts would take all the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import NotSupportedError, StoreError
from nixl_offload.stores.base import ObjectInfo
from nixl_offload.stores.s3 import open_store
from nixl_offload.tiers.shared.inspect import SharedInspector, read_manifest
from tests.prove.fuzz import One, Target, expect
from tests.s3.proxy import FaultProxy, Raw

_SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAFAKE", "AWS_SECRET_ACCESS_KEY": "SECRETSECRET", "AWS_SESSION_TOKEN": "TOKENTOKEN"}
_BYTES = 10
_NAMESPACE = "0123456789abcdef0123456789abcdef"
_LISTED_MOST = 50
_DATE = b"Last-Modified: Sat, 21 Nov 2026 10:00:00 GMT\r\n"


def asking(ask: Callable[[S3Config], Mapping[str, Callable[[bytes], Any]]]) -> Callable[[Path], One]:
    """Return the target of what ``ask`` names."""

    def begin(scratch: Path) -> One:
        os.environ.update(_SECRETS, AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE="/dev/null")
        os.environ["AWS_SHARED_CREDENTIALS_FILE"] = "/dev/null"
        import nixl_offload.stores.bucket as administration
        import nixl_offload.stores.http_get as direct
        import nixl_offload.stores.obstore as by_obstore

        administration.ATTEMPTS = by_obstore.ATTEMPTS = 1  # type: ignore[misc]
        direct.PAUSE_S = 0.0  # type: ignore[misc]
        server = FaultProxy()
        rule = server.inject(Raw(b""))
        tier = S3Config.model_validate(
            {"kind": "s3", "endpoint": server.endpoint, "bucket": "kv-cache", "region": "us-east-1", "ttl": "7d",
             "request_timeout": "2s"}
        )  # fmt: skip
        asked = [*ask(tier).values()]

        def one(data: bytes) -> None:
            answer = _measured(data[1:])
            rule.fault = Raw(answer)
            try:
                asked[data[0] % len(asked) if data else 0](answer)
            except (StoreError, NotSupportedError) as error:
                said = str(error)
                expect(said.isprintable(), "an error is printable")
                expect(not any(secret in said for secret in _SECRETS.values()), "an error shows no secret")
                expect(len(said) < 2000, "an error is short")
            server.heads.clear()

        return one

    return begin


def asked_of_store(tier: S3Config) -> Mapping[str, Callable[[bytes], Any]]:
    """Return what can be asked of a store, each with what must hold of its result."""
    store = open_store(tier)

    def read(answer: bytes) -> None:
        memory = bytearray(_BYTES)
        store.read_into("x/1", 0, memoryview(memory))
        plain = b"ncoding" not in answer.lower().replace(b"accept-encoding", b"")
        expect(not plain or bytes(memory) in answer, "what is read is what the server sent")

    def listing(_: bytes) -> None:
        for info in islice(store.list("x/"), _LISTED_MOST):
            _check(info)

    def head(_: bytes) -> None:
        found = store.head("x/1")
        if found is not None:
            _check(found)

    def namespaces(_: bytes) -> None:
        inspector = SharedInspector(store, kind="s3", capacity_bytes=None)
        for namespace in islice(inspector.namespaces(), _LISTED_MOST):
            for chunk in islice(inspector.chunks(namespace), _LISTED_MOST):
                expect(chunk.size_bytes >= 0, "a chunk has a size")

    return {
        "head": head,
        "read": read,
        "write": lambda _: store.write("x/1", memoryview(b"0123456789")),
        "delete": lambda _: store.delete(["x/1", "x/2"]),
        "list": listing,
        "manifest": lambda _: read_manifest(store, _NAMESPACE),
        "namespaces": namespaces,
    }


def asked_of_bucket(tier: S3Config) -> Mapping[str, Callable[[bytes], Any]]:
    """Return what commands ask of a bucket."""
    from nixl_offload.stores.bucket import bucket_region, plan_lifecycle

    def lifecycle(_: bytes) -> None:
        expect(all(change.isprintable() for change in plan_lifecycle(tier).changes), "a plan is printable")

    return {"lifecycle": lifecycle, "region": lambda _: bucket_region(tier)}


def _check(info: ObjectInfo) -> None:
    expect(type(info.name) is str and type(info.size_bytes) is int, "an object has a name and a size")
    expect(info.size_bytes >= 0, "a size is not negative")
    expect(info.modified_s == info.modified_s, "a time is a number")


def _measured(answer: bytes) -> bytes:
    head, end, body = answer.partition(b"\r\n\r\n")
    return head.replace(b"Content-Length: *", b"Content-Length: %d" % len(body)) + end + body


def targets() -> Iterator[Target]:
    """The store, and administration."""
    words = [
        b"Content-Length: *", b"Content-Length: -5", b"Content-Length: 99999999999999999999", b"Content-Range: ",
        b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"Location: http://127.0.0.1:1/x\r\n",
        _DATE, b"Last-Modified: ", b"ETag: \"x\"\r\n", b"HTTP/1.1 ", b"301 ", b"307 ", b"404 ", b"416 ", b"503 ",
        b"<Key>", b"</Key>", b"<Size>-1</Size>", b"<Size>1e9</Size>", b"<IsTruncated>true</IsTruncated>",
        b"<NextContinuationToken>x</NextContinuationToken>", b"<!DOCTYPE x [<!ENTITY a \"b\">]>", b"&a;", b"&#0;",
        b"x-amz-bucket-region: ../x\r\n", b"<Code>NoSuchBucket</Code>", b"<Days>x</Days>", b"\r\n\r\n",
    ]  # fmt: skip
    yield Target("answers/obstore", asking(asked_of_store), 20_000, _seeds, words, max_bytes=1500, input_s=30)
    yield Target("answers/bucket", asking(asked_of_bucket), 4_000, _seeds, words, max_bytes=1500, input_s=30)


def _seeds() -> Iterator[bytes]:
    """Whole answers, and refusals, to each question."""
    listing = (
        b'<?xml version="1.0"?><ListBucketResult><Name>kv-cache</Name><IsTruncated>false</IsTruncated><Contents>'
        b"<Key>%s</Key><LastModified>2026-11-21T10:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag><Size>10</Size>"
        b"</Contents></ListBucketResult>"
    )
    rules = (
        b"<LifecycleConfiguration><Rule><ID>a</ID><Filter><Prefix>x/</Prefix></Filter><Status>Enabled</Status>"
        b"<Expiration><Days>7</Days></Expiration></Rule></LifecycleConfiguration>"
    )
    shard = b"%s/01/%s.0000" % (_NAMESPACE.encode(), b"01" * 24)
    plain = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: *\r\n" + _DATE + b'ETag: "x"\r\n\r\n'
    for number in range(10):
        yield bytes([number]) + plain + b"0123456789"
        yield (
            bytes([number])
            + b"HTTP/1.1 403 No\r\nConnection: close\r\nContent-Length: *\r\n\r\n"
            + (b"<Error><Code>AccessDenied</Code><Message>No.</Message></Error>")
        )
    yield b"\4" + plain + listing % b"x/1"
    yield b"\7" + plain + listing % shard
    yield b"\3" + plain + b"<DeleteResult><Error><Key>x/1</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    yield b"\5" + plain + b"<CopyObjectResult><LastModified>2026-11-21T10:00:00Z</LastModified></CopyObjectResult>"
    yield b"\x08" + plain + rules
    yield b"\x09" + plain + b"<LocationConstraint>EU</LocationConstraint>"
    yield b"\6" + plain + b'{"namespace": "x", "fields": {}}'
