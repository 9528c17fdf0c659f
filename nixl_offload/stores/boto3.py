"""A bucket over boto3: the client that is everywhere, for where obstore is not. The only store that knows it.

Threading: as ``base.Store``; boto3's clients may be shared by threads. Ownership: a call holds the caller's memory no
longer than it lasts. botocore logs signed requests at DEBUG, session token and all: see ``s3.hush_botocore``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final, NamedTuple

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
from nixl_offload.stores.base import ObjectInfo, Store
from nixl_offload.stores.s3 import (
    ATTEMPTS,
    CREDENTIALS_RETRY_S,
    LIST_PAGE,
    NO_CREDENTIALS,
    BrokenBodyError,
    MissingBucketGuard,
    S3Address,
    answer_error,
    closed_error,
    hush_botocore,
    printable,
    read_object,
    readable_ca_bundle,
    refresh_by_copy,
    short_error,
    stuck_error,
    usable_endpoint,
)


def make_client(tier: S3Config) -> Any:
    """Return a boto3 client for the tier's bucket. Raises what boto3 raises; see ``translated``."""
    hush_botocore()
    address = S3Address.of(tier)
    config = Config(
        connect_timeout=tier.request_timeout_s,
        read_timeout=tier.request_timeout_s,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=tier.connections,
        request_checksum_calculation=tier.checksums,
        response_checksum_validation=tier.checksums,
        s3={"addressing_style": "path" if address.path_style else "virtual"},
    )
    session = boto3.session.Session(region_name=address.region)
    bundle = readable_ca_bundle(tier)
    return session.client("s3", endpoint_url=address.endpoint, verify=bundle, config=config)


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


class ClientFacts(NamedTuple):
    """What boto3 makes of a tier and of the AWS chain. Holds no credentials."""

    endpoint: str
    region: str | None
    credentials: str | None
    """botocore's name of the link of the chain that has some: ``env``, ``iam-role`` ...; None where none has."""


def client_facts(tier: S3Config) -> ClientFacts:
    """Return what a client would use. Asks for credentials where the chain leads, which may take seconds.

    Raises StoreError, and ConfigError for an endpoint that is none.
    """
    try:
        with closing(make_client(tier)) as client:
            endpoint = usable_endpoint(str(client.meta.endpoint_url), "the endpoint_url of AWS's own configuration")
            region = client.meta.region_name
        credentials = boto3.session.Session().get_credentials()
    except StoreError:
        raise
    except Exception as error:  # A foreign library's edge.
        raise translated(error, "look for credentials", S3Address.of(tier)) from error
    return ClientFacts(endpoint, region, None if credentials is None else str(credentials.method))


def bucket_region(tier: S3Config) -> str | None:
    """Return the region in which the bucket is, whichever the tier says: boto3 goes where it is sent.

    None where the server's answer names none. Raises StoreError.
    """
    address = S3Address.of(tier)
    try:
        with closing(make_client(tier)) as client:
            found = client.get_bucket_location(Bucket=address.bucket).get("LocationConstraint")
    except StoreError:
        raise
    except Exception as error:  # A foreign library's edge.
        raise translated(error, "ask where the bucket is", address) from error
    # S3 has no word for its first region, and an old one for its second.
    return "us-east-1" if found is None else "eu-west-1" if found == "EU" else str(found)


class Boto3Store(Store):
    """An S3 bucket behind one boto3 client, made at the first call that needs it.

    Credentials come from boto3's chain. Where there are none, calls fail as ``denied``, and the chain is asked again
    every few seconds. A server that trickles its answer's headers is not broken off; a body is, after ``ATTEMPTS``
    times the request timeout.
    """

    name = "boto3"

    def __init__(self, tier: S3Config) -> None:
        """Reach nothing yet."""
        self._tier = tier
        self._address = S3Address.of(tier)
        self.where = self._address.where
        self._lock = threading.Lock()
        self._client: Any = None
        self._client_made_s = 0.0
        self._closed = False
        self._bucket = MissingBucketGuard(self._ask_for_bucket)

    def __repr__(self) -> str:
        return f"Boto3Store({self.where})"

    def head(self, name: str) -> ObjectInfo | None:
        try:
            found = self._call(f"HEAD {name}", "head_object", Key=self._address.key(name))
            return self._info(name, found, "ContentLength")
        except StoreError as error:
            if error.cause != "missing":
                raise
        self._bucket.check()
        return None

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        read_object(self, name, offset, memory, self._read_into)

    def write(self, name: str, memory: memoryview) -> None:
        # boto3 takes no memoryview; a file-like around one would go out in pieces of 16 KiB.
        self._call(f"PUT {name}", "put_object", Key=self._address.key(name), Body=bytes(memory))

    def delete(self, names: Sequence[str]) -> None:
        first: StoreError | None = None
        for start in range(0, len(names), LIST_PAGE):
            batch = names[start : start + LIST_PAGE]
            wanted = {"Objects": [{"Key": self._address.key(name)} for name in batch], "Quiet": True}
            doing = f"DELETE {batch[0]}" + (f" and {len(batch) - 1} more" if len(batch) > 1 else "")
            try:
                answer = self._call(doing, "delete_objects", Delete=wanted)
            except StoreError as error:
                first = first or error
                continue
            for failed in answer.get("Errors", ()):
                code, name = str(failed.get("Code", "")), self._address.name(str(failed.get("Key", "")))
                if code not in ("NoSuchKey", "NoSuchVersion") and first is None:
                    status = 403 if code == "AccessDenied" else 500
                    first = answer_error(f"DELETE {name}", self._address, status, code, str(failed.get("Message", "")))
        if first is not None:
            raise first

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

    def refresh(self, name: str, size_bytes: int) -> bool:
        key = self._address.key(name)
        source = {"Bucket": self._address.bucket, "Key": key}
        copy = partial(self._call, f"COPY {name}", "copy_object", Key=key, CopySource=source)
        return refresh_by_copy(self, name, size_bytes, partial(copy, MetadataDirective="REPLACE"))

    def close(self) -> None:
        with self._lock:
            client, self._client, self._closed = self._client, None, True
        if client is not None:
            client.close()

    def _read_into(self, name: str, offset: int, memory: memoryview) -> None:
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

    def _ask_for_bucket(self) -> None:
        """Raise StoreError when there is no bucket: a HEAD cannot tell, a listing can."""
        try:
            self._call(
                "LIST", "list_objects_v2", Prefix=self._address.key(".nixl-offload-no-such-directory"), MaxKeys=1
            )
        except StoreError as error:
            if error.cause != "denied":  # Else there is something that may not be listed.
                raise

    def _call(self, doing: str, operation: str, **arguments: Any) -> Any:
        """Call the client for the bucket. Raises StoreError alone."""
        try:
            answer = getattr(self._open(), operation)(Bucket=self._address.bucket, **arguments)
        except StoreError:
            raise
        except Exception as error:  # A foreign library's edge: StoreError alone gets out.
            if isinstance(error, NoCredentialsError):
                self._forget_client()
            if isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") == "NoSuchBucket":
                self._bucket.lost()
            if self._closed:
                raise closed_error(self.where) from error
            raise translated(error, doing, self._address) from error
        self._bucket.seen()
        return answer

    def _open(self) -> Any:
        client = self._client
        if client is not None:
            return client
        with self._lock:
            if self._closed:
                raise closed_error(self.where)
            if self._client is None:
                self._client, self._client_made_s = make_client(self._tier), time.monotonic()
            return self._client

    def _forget_client(self) -> None:
        """Have the next call make a client anew: a client without credentials stays without."""
        with self._lock:
            if time.monotonic() - self._client_made_s > CREDENTIALS_RETRY_S:
                self._client = None


def _range_begin(content_range: str) -> int:
    """Return where an answer begins, from "bytes 5-9/20"; without one it is the whole object."""
    begin = content_range.removeprefix("bytes ").partition("-")[0]
    return int(begin) if begin.isdigit() else 0
