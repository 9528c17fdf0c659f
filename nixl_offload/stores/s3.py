"""What the S3 stores have in common: how a tier's fields become keys, addresses and times; what an answer means.

Threading: frozen values and pure functions; ``MissingBucketGuard`` has a lock. No client library is imported here.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import ConfigError, StoreError
from nixl_offload.stores.base import Store

_COPIES_NOTHING: Final = frozenset({400, 405, 501})
"""How servers answer that refuse to copy an object onto itself."""

ATTEMPTS: Final = 3
"""Of one request, by the client library, with jittered pauses between them."""
LIST_PAGE: Final = 1000
"""Objects per page of a listing, and per bulk delete: what S3 gives and takes at most."""
CREDENTIALS_RETRY_S: Final = 5.0
"""How soon the AWS chain is asked again after it had no credentials; asking may take seconds."""

NO_CREDENTIALS: Final = (
    "no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run under a role"
)
_DENIED_CODES: Final = frozenset(
    {"AccessDenied", "ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "TokenRefreshRequired"}
)
_THROTTLED_CODES: Final = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"})
_FULL: Final = re.compile(r"Quota|StorageFull|InsufficientCapacity")

_TALKATIVE: Final = tuple(f"botocore.{part}" for part in ("auth", "endpoint", "handlers", "parsers", "utils"))
"""Loggers that write signed headers, or what a server answers to them, at DEBUG."""


def key_prefix(prefix: str) -> str:
    """Return what comes before every name in the bucket: empty, or ending in one slash. Used for data and control."""
    parts = [part for part in prefix.split("/") if part]
    return "/".join(parts) + "/" if parts else ""


@dataclass(frozen=True)
class S3Address:
    """Where a tier's objects are, with all that the config left open decided. Holds no credentials."""

    bucket: str
    prefix: str
    """As ``key_prefix`` has it."""
    endpoint: str | None
    region: str | None
    path_style: bool

    @classmethod
    def of(cls, tier: S3Config) -> S3Address:
        """Decide what the tier left open. An endpoint in AWS's environment variables counts like one in the config.

        Raises ConfigError where such a variable is no endpoint.
        """
        variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        named = next((name for name in variables if os.environ.get(name)), None)
        endpoint = tier.endpoint
        if endpoint is None and named is not None:
            endpoint = usable_endpoint(os.environ[named], named)
        region = tier.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or None
        if tier.addressing == "auto":
            # A bucket with dots has no certificate as a host name.
            path_style = endpoint is not None or "." in tier.bucket
        else:
            path_style = tier.addressing == "path"
        return cls(tier.bucket, key_prefix(tier.prefix), endpoint, region, path_style)

    @property
    def where(self) -> str:
        """For people, as ``Store.where``."""
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/") + at

    @property
    def virtual_endpoint(self) -> str | None:
        """The endpoint with the bucket as part of the host name; None without an endpoint."""
        if self.endpoint is None:
            return None
        parts = urlsplit(self.endpoint)
        return urlunsplit(parts._replace(netloc=f"{self.bucket}.{parts.netloc}"))

    @property
    def plain_http(self) -> bool:
        """Whether the endpoint is reached without TLS."""
        return self.endpoint is not None and urlsplit(self.endpoint).scheme == "http"

    def key(self, name: str) -> str:
        """Return the object's key in the bucket."""
        return self.prefix + name

    def name(self, key: str) -> str:
        """Return the name that ``key`` has in the store."""
        return key[len(self.prefix) :]


def usable_endpoint(url: str, origin: str) -> str:
    """Return the endpoint ``url``, which did not come from the config. Raises ConfigError, which names the ``origin``
    and does not repeat what may be a password.
    """
    try:
        parts = urlsplit(url)
        is_endpoint = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_endpoint = False
    if not is_endpoint:
        raise ConfigError(f"{origin} is not an endpoint; allowed: http(s)://host[:port]")
    if "@" in parts.netloc:
        raise ConfigError(f"{origin} must not carry credentials; allowed: http(s)://host[:port]")
    return url


def ca_bundle_of(tier: S3Config) -> str | None:
    """Return the file with the certificates to trust: the config's, or that of ``AWS_CA_BUNDLE``."""
    return tier.ca_bundle or os.environ.get("AWS_CA_BUNDLE") or None


def proxy_of(url: SplitResult) -> str | None:
    """Return the proxy that the environment has for an address; None where ``NO_PROXY`` names the host."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return None if proxy is None or proxy_bypass(url.netloc) else proxy


def readable_ca_bundle(tier: S3Config) -> str | None:
    """Return the same. Raises StoreError when it cannot be read: clients say so late, or in other words."""
    bundle = ca_bundle_of(tier)
    if bundle is not None and not (os.path.isfile(bundle) and os.access(bundle, os.R_OK)):
        raise StoreError(f"{S3Address.of(tier).where}: cannot read the CA bundle {bundle}", cause="io")
    return bundle


def answer_error(doing: str, address: S3Address, status: int, code: str, message: str) -> StoreError:
    """Translate an HTTP answer that is a failure.

    ``doing`` says what was asked ("HEAD x"); ``code`` and ``message`` are S3's own words, empty where the answer had no
    body, as that of a HEAD has none. No other part of an answer gets into the text: a server that refuses a signature
    quotes the request, session token and all.
    """
    said = ": ".join(part for part in (code, message) if part and part != str(status))
    text = printable(f"{address.where}: {doing}: HTTP {status}{f' ({said})' if said else ''}")
    if code == "NoSuchBucket":
        return no_bucket(doing, address)
    if _FULL.search(code) or status == 507:
        return StoreError(text, cause="full")
    if status in (401, 403) or code in _DENIED_CODES:
        hint = ""
        if doing.startswith("HEAD"):
            hint = "; S3 answers so for an absent object too where the credentials may not list the bucket"
        return StoreError(f"{text}; the credentials do not allow this{hint}", cause="denied")
    if status == 404:
        return StoreError(text, cause="missing")
    if status == 416:
        return StoreError(f"{text}; the object ends before the range asked for", cause="short")
    if status in (429, 503) or code in _THROTTLED_CODES:
        return StoreError(f"{text}; the server asks to slow down", cause="throttled")
    if status == 408 or code == "RequestTimeout":
        return StoreError(text, cause="timeout")
    if status >= 500:
        return StoreError(text, cause="server", status=status)
    if 300 <= status < 400:
        text += "; the bucket may be in another region: set region"
    return StoreError(text, cause="io", status=status)


def printable(text: str) -> str:
    """Return ``text`` less what terminals would obey: servers may send anything."""
    return "".join(char if char.isprintable() else "?" for char in text)


def no_bucket(doing: str, address: S3Address) -> StoreError:
    """Return the error for a bucket that does not exist: not ``missing``, as that says something of one object."""
    text = f"{address.where}: {doing}: there is no bucket {address.bucket!r}; nixl-offload bucket init makes it"
    return StoreError(text, cause="io")


class BrokenBodyError(StoreError):
    """An answer began well and broke off."""


def read_object(
    store: Store, name: str, offset: int, memory: memoryview, read: Callable[[str, int, memoryview], None]
) -> None:
    """Do as ``Store.read_into``. ``read`` asks for a range that is not empty; once more where its answer broke off.

    Clients try again what does not begin. A body that breaks off they leave, or take up by a range, which not every
    server has.
    """
    memory = memory.cast("B")
    if not memory.nbytes:
        found = store.head(name)
        if found is None:
            raise StoreError(f"{store.where}: GET {name}: no such object", cause="missing")
        if found.size_bytes < offset:
            raise short_error(store.where, name, offset, 0, found.size_bytes - offset)
        return
    try:
        read(name, offset, memory)
    except BrokenBodyError:
        read(name, offset, memory)


def refresh_by_copy(store: Store, name: str, size_bytes: int, copy: Callable[[], object]) -> bool:
    """Do as ``Store.refresh``. ``copy`` has the server copy the object onto itself, and raises StoreError.

    S3 refuses such a copy unless it is told to replace the metadata, and some servers refuse it however they are
    asked: from those the object is read, and written again. After any other failure the object is left alone.
    """
    found = store.head(name)
    if found is None or found.size_bytes != size_bytes:
        return False
    try:
        try:
            copy()
        except StoreError as error:
            if error.cause not in ("io", "server") or error.status not in _COPIES_NOTHING:
                raise
            content = memoryview(bytearray(size_bytes))
            store.read_into(name, 0, content)
            store.write(name, content)
    except StoreError as error:
        if error.cause not in ("missing", "short"):
            raise
        return False
    return True


def closed_error(where: str) -> StoreError:
    """Return what every call on a closed store raises."""
    return StoreError(f"{where}: the store is closed", cause="io")


def short_error(where: str, name: str, offset: int, wanted_bytes: int, got_bytes: int) -> StoreError:
    """Return the error for an object that ends inside the range asked for."""
    text = f"{where}: GET {name}: {wanted_bytes} bytes asked for at offset {offset}, there are {got_bytes}"
    return StoreError(text, cause="short")


def stuck_error(where: str, doing: str) -> StoreError:
    """Return the error for a listing whose next page would be one that was there: it would never end."""
    return StoreError(
        f"{where}: {doing}: the server begins again with a page that it has sent: not S3?", cause="server"
    )


def hush_botocore() -> None:
    """Keep botocore's DEBUG logs from telling session tokens. A level that somebody set on purpose stays."""
    for name in _TALKATIVE:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


class MissingBucketGuard:
    """Tells an absent object from an absent bucket where a HEAD answers 404 for both.

    The first 404 asks for the bucket, once; any answer that only a bucket can give settles it without asking. A bucket
    that vanishes later shows at the next request with a body (``lost``).
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        """``ask`` raises StoreError when there is no bucket, or when nobody can tell."""
        self._ask = ask
        self._lock = threading.Lock()
        self._seen = False

    def seen(self) -> None:
        """Take note of an answer that only an existing bucket gives."""
        self._seen = True

    def lost(self) -> None:
        """Take note of an answer saying that there is no bucket."""
        self._seen = False

    def check(self) -> None:
        """Return when the bucket is known to exist, else raise what ``ask`` raises."""
        if self._seen:
            return
        with self._lock:
            if not self._seen:
                self._ask()
                self._seen = True
