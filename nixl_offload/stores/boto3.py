"""A bucket over boto3: the client that is everywhere, for where obstore is not. The only store that knows it.

Threading: as ``base.Store``; boto3's clients may be shared by threads. Ownership: a call holds the caller's memory no
longer than it lasts. botocore logs signed requests at DEBUG, session token and all: see ``s3.hush_botocore``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ReadTimeoutError,
    SSLError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import ObjectInfo
from nixl_offload.stores.s3 import (
    ATTEMPTS,
    CONNECT_TIMEOUT_S,
    LIST_PAGE,
    NO_CREDENTIALS,
    BrokenBodyError,
    BucketStore,
    S3Address,
    answer_error,
    closed_error,
    hush_botocore,
    printable,
    readable_ca_bundle,
    short_error,
    stuck_error,
)


@contextmanager
def translating(doing: str, address: S3Address) -> Iterator[None]:
    """The edge of a foreign library: StoreError alone gets out."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        raise translated(error, doing, address) from error


def make_client(tier: S3Config) -> tuple[Any, Any]:
    """Return a boto3 client for the tier's bucket, and the credentials that it found, if any, which may take seconds.

    Raises StoreError, and ConfigError for an endpoint that is none.
    """
    hush_botocore()
    address = S3Address.of(tier)
    config = Config(
        connect_timeout=min(CONNECT_TIMEOUT_S, tier.request_timeout_s),
        read_timeout=tier.request_timeout_s,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=tier.connections,
        request_checksum_calculation="when_required",  # else it sends trailers that some servers store as data
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if address.path_style else "virtual"},
    )
    with translating("look for credentials", address):
        session = boto3.session.Session(region_name=address.region)
        bundle = readable_ca_bundle(tier)
        client = session.client("s3", endpoint_url=address.endpoint, verify=bundle, config=config)
        return client, session.get_credentials()


_KINDS: Final[tuple[tuple[tuple[type[Exception], ...], str, str], ...]] = (
    (
        (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, TokenRetrievalError),
        "denied",
        NO_CREDENTIALS,
    ),
    ((ReadTimeoutError, ConnectTimeoutError), "timeout", f"no answer in time, {ATTEMPTS} times"),
    ((SSLError,), "unreachable", "no TLS connection; set ca_bundle if the server has its own certificate authority"),
    ((HTTPClientError, ConnectionError, IncompleteReadError, OSError), "unreachable", "no connection, or it broke"),
    ((ResponseParserError,), "server", "not an answer of S3"),
    # botocore 1.44 follows a redirect that names no region for ever.
    ((RecursionError,), "io", "redirected; the bucket may be in another region: set region"),
)


def translated(error: Exception, doing: str, address: S3Address) -> StoreError:
    """Translate what boto3 raised; ``doing`` says what was asked ("HEAD x"). Raise it ``from error``."""
    if isinstance(error, ClientError):
        said = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return answer_error(doing, address, status, str(said.get("Code", "")), str(said.get("Message", ""))[:200])
    for types, cause, text in _KINDS:
        if isinstance(error, types):
            return StoreError(f"{address.where}: {doing}: {text} ({type(error).__name__})", cause=cause)
    return StoreError(f"{address.where}: {doing}: {type(error).__name__}", cause="io")


def error_code(error: StoreError) -> str:
    """Return S3's own word for what went wrong, empty where the error is not an answer of S3."""
    cause = error.__cause__
    return str(cause.response.get("Error", {}).get("Code", "")) if isinstance(cause, ClientError) else ""


def client_facts(tier: S3Config) -> tuple[str, str | None, str | None]:
    """Return the endpoint and region that a client uses, and botocore's name of the link of the AWS chain that has
    credentials: ``env``, ``iam-role`` ...; None where none has. Raises as ``make_client``.
    """
    client, credentials = make_client(tier)
    with closing(client):
        source = None if credentials is None else str(credentials.method)
        return str(client.meta.endpoint_url), client.meta.region_name, source


def bucket_region(tier: S3Config) -> str | None:
    """Return the region in which the bucket is, whichever the tier says: boto3 goes where it is sent.

    None where the server's answer names none. Raises StoreError.
    """
    address = S3Address.of(tier)
    with closing(make_client(tier)[0]) as client, translating("ask where the bucket is", address):
        found = client.get_bucket_location(Bucket=address.bucket).get("LocationConstraint")
    # S3 has no word for its first region, and an old one for its second.
    return "us-east-1" if found is None else "eu-west-1" if found == "EU" else str(found)


class Boto3Store(BucketStore[Any]):
    """An S3 bucket behind one boto3 client.

    Credentials come from boto3's chain. Where there are none, calls fail as ``denied``. A server that trickles its
    answer's headers is not broken off; a body is, after ``ATTEMPTS`` times the request timeout.
    """

    name = "boto3"

    def head(self, name: str) -> ObjectInfo | None:
        try:
            found = self._call(f"HEAD {name}", "head_object", Key=self._address.key(name))
            return self._info(name, found, "ContentLength")
        except StoreError as error:
            if error.cause != "missing":
                raise
        self._require_bucket()
        return None

    def write(self, name: str, memory: memoryview) -> None:
        # boto3 takes no memoryview; a file-like around one would go out in pieces of 16 KiB.
        self._call(f"PUT {name}", "put_object", Key=self._address.key(name), Body=bytes(memory))

    def _copy(self, name: str) -> None:
        key = self._address.key(name)
        source = {"Bucket": self._address.bucket, "Key": key}
        self._call(f"COPY {name}", "copy_object", Key=key, CopySource=source, MetadataDirective="REPLACE")

    def _delete(self, names: Sequence[str], doing: str) -> None:
        wanted = {"Objects": [{"Key": self._address.key(name)} for name in names], "Quiet": True}
        for failed in self._call(doing, "delete_objects", Delete=wanted).get("Errors", ()):
            code, name = str(failed.get("Code", "")), self._address.name(str(failed.get("Key", "")))
            if code not in ("NoSuchKey", "NoSuchVersion"):
                status = 403 if code == "AccessDenied" else 500
                raise answer_error(f"DELETE {name}", self._address, status, code, str(failed.get("Message", "")))

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        wanted: dict[str, Any] = {"Prefix": self._address.key(prefix), "MaxKeys": LIST_PAGE}
        if start_after:
            wanted["StartAfter"] = self._address.key(start_after)
        doing = f"LIST {prefix}".rstrip()
        while True:
            page = self._call(doing, "list_objects_v2", **wanted)
            for found in page.get("Contents", ()):
                key = str(found.get("Key", ""))
                if not key.startswith(wanted["Prefix"]):
                    raise StoreError(f"{self.where}: {doing}: lists what was not asked for: not S3?", cause="server")
                yield self._info(self._address.name(key), found, "Size")
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if token in (None, wanted.get("ContinuationToken")):
                raise stuck_error(self.where, doing)
            wanted["ContinuationToken"] = token

    def close(self) -> None:
        made = self._made
        super().close()
        if made is not None:
            made[0].close()

    def _make(self) -> tuple[Any, Any]:
        return make_client(self._tier)

    def _get(self, name: str, offset: int, memory: memoryview) -> None:
        doing, wanted = f"GET {name}", f"bytes={offset}-{offset + memory.nbytes - 1}"
        answer = self._call(doing, "get_object", Key=self._address.key(name), Range=wanted)
        try:
            self._take(answer, name, offset, memory)
        except StoreError:
            raise
        except KeyError as error:
            raise StoreError(f"{self.where}: {doing}: the answer lacks {error}: not S3?", cause="server") from error
        except Exception as error:  # A foreign library's edge: StoreError alone gets out.
            failure = translated(error, doing, self._address)
            if failure.cause == "unreachable":
                failure = BrokenBodyError(str(failure), cause=failure.cause)
            raise failure from error
        finally:
            answer["Body"].close()

    def _take(self, answer: dict[str, Any], name: str, offset: int, memory: memoryview) -> None:
        """Copy the body of a ranged GET into ``memory``; where all of it came, skip what is before ``offset``."""
        body, length_bytes = answer["Body"], int(answer["ContentLength"])
        begin = _range_begin(str(answer.get("ContentRange", "")))
        skip_bytes = offset - begin
        if skip_bytes < 0:
            raise StoreError(f"{self.where}: GET {name}: the answer begins at {begin}, not at {offset}", cause="server")
        if length_bytes - skip_bytes < memory.nbytes:
            raise short_error(self.where, name, offset, memory.nbytes, max(0, length_bytes - skip_bytes))
        deadline_s = time.monotonic() + ATTEMPTS * self._tier.request_timeout_s
        while skip_bytes:
            got = body.read(min(skip_bytes, 1 << 20))
            skip_bytes -= len(got)
            self._go_on(len(got), name, deadline_s)
        while memory.nbytes:
            got_bytes = body.readinto(memory[: 1 << 20])
            memory = memory[got_bytes:]
            self._go_on(got_bytes, name, deadline_s)

    def _go_on(self, got_bytes: int, name: str, deadline_s: float) -> None:
        if not got_bytes:
            raise BrokenBodyError(f"{self.where}: GET {name}: the body ended early", cause="unreachable")
        if time.monotonic() > deadline_s:
            raise StoreError(f"{self.where}: GET {name}: the body comes too slowly", cause="timeout")

    def _info(self, name: str, found: dict[str, Any], size: str) -> ObjectInfo:
        try:
            info = ObjectInfo(name, int(found[size]), found["LastModified"].timestamp())
        except KeyError as error:
            told = printable(f"{self.where}: what is told of {name} lacks {error}: not S3?")
            raise StoreError(told, cause="server") from error
        if info.size_bytes < 0:
            told = printable(f"{self.where}: {name} has {info.size_bytes} bytes: not S3?")
            raise StoreError(told, cause="server")
        return info

    def _list_nothing(self, name: str) -> None:
        self._call("LIST", "list_objects_v2", Prefix=self._address.key(name), MaxKeys=1)

    def _call(self, doing: str, operation: str, **arguments: Any) -> Any:
        """Call the client for the bucket. Raises StoreError alone."""
        client: Any = None
        try:
            client = self._client()
            answer = getattr(client, operation)(Bucket=self._address.bucket, **arguments)
        except StoreError:
            raise
        except Exception as error:  # A foreign library's edge: StoreError alone gets out.
            if isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") == "NoSuchBucket":
                self._bucket_seen = False
            if self._closed:
                raise closed_error(self.where) from error
            failure = translated(error, doing, self._address)
            if client is None or failure.cause != "denied" or not self._renewed(client):
                raise failure from error
            return self._call(doing, operation, **arguments)
        self._bucket_seen = True
        return answer


def _range_begin(content_range: str) -> int:
    """Return where an answer begins, from "bytes 5-9/20"; without one it is the whole object."""
    begin = content_range.removeprefix("bytes ").partition("-")[0]
    return int(begin) if begin.isdigit() else 0
