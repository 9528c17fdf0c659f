"""What the S3 stores have in common: how a tier's fields become keys, addresses and times; what an answer means.

Threading: ``BucketStore`` as ``base.Store``; the rest is frozen or pure. botocore, if there, reads AWS's files for all.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import ConfigError, StoreError
from nixl_offload.stores.base import Store

_COPIES_NOTHING: Final = frozenset({400, 405, 501})
"""How servers answer that refuse to copy an object onto itself."""

ATTEMPTS: Final = 3
"""Of one request, by the client library, with jittered pauses between them."""
CONNECT_TIMEOUT_S: Final = 3.0
"""To connect, at most: beside others a host may have a dead address. obstore divides it by their number."""
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


_C = TypeVar("_C")


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
        """Decide what the tier left open, for every client: by AWS's environment variables, then by the profile.

        Raises ConfigError where the endpoint found there is none.
        """
        endpoint, region = tier.endpoint, tier.region or _variable("AWS_REGION", "AWS_DEFAULT_REGION")
        profile = {} if endpoint and region else _profile()
        if endpoint is None:
            found = {name: _variable(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}
            found["endpoint_url in AWS's config file"] = profile.get("endpoint_url")
            endpoint = next((usable_endpoint(url, origin) for origin, url in found.items() if url), None)
        region = region or profile.get("region")
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


def _variable(*names: str) -> str | None:
    """Return the first environment variable that is not empty."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def _profile() -> Mapping[str, Any]:
    """Return the profile in use, of AWS's config file, with what it has for S3 alone. Empty where botocore cannot tell:
    who looks for credentials there says why.
    """
    try:
        from botocore.session import Session

        session = Session()
        profile = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(profile.get("services"), {})
        return {**profile, **services.get("s3", {})}
    except Exception:  # noqa: BLE001  a foreign library's edge
        return {}


def ca_bundle_of(tier: S3Config) -> str | None:
    """Return the file with the certificates to trust: the config's, that of ``AWS_CA_BUNDLE``, or the profile's."""
    return tier.ca_bundle or _variable("AWS_CA_BUNDLE") or _profile().get("ca_bundle")


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


class BucketStore(Store, Generic[_C]):
    """A bucket behind one client of a library, made at the first call that needs it.

    Clients renew keys that expire, but read those of the environment and of ``~/.aws/credentials`` once. So a client
    that is denied something is replaced, and asked again, if the AWS chain has other keys by then.
    """

    def __init__(self, tier: S3Config) -> None:
        """Reach nothing yet."""
        self._tier = tier
        self._address = S3Address.of(tier)
        self.where = self._address.where
        self._lock = threading.Lock()
        self._made: tuple[_C, Any] | None = None
        self._ask_again_s = 0.0
        """When the AWS chain may be asked once more, after it had no keys, or none but those in use."""
        self._closed = False
        self._bucket_seen = False
        """Whether something was answered that only an existing bucket gives."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.where})"

    def delete(self, names: Sequence[str]) -> None:
        first: StoreError | None = None
        for start in range(0, len(names), LIST_PAGE):
            batch = names[start : start + LIST_PAGE]
            try:
                self._delete(batch, f"DELETE {batch[0]}" + (f" and {len(batch) - 1} more" if len(batch) > 1 else ""))
            except StoreError as error:
                # Some servers answer 404 for the one object that they were asked to delete.
                if error.cause != "missing":
                    first = first or error
        if first is not None:
            raise first

    def read_into(self, name: str, offset: int, memory: memoryview) -> None:
        memory = memory.cast("B")
        if not memory.nbytes:
            found = self.head(name)
            if found is None:
                raise StoreError(f"{self.where}: GET {name}: no such object", cause="missing")
            if found.size_bytes < offset:
                raise short_error(self.where, name, offset, 0, found.size_bytes - offset)
            return
        try:
            self._get(name, offset, memory)
        except BrokenBodyError:
            # Clients try again what does not begin. A body that breaks off they leave, or take up by a range, which not
            # every server has.
            self._get(name, offset, memory)
        self._bucket_seen = True

    def refresh(self, name: str, size_bytes: int) -> bool:
        found = self.head(name)
        if found is None or found.size_bytes != size_bytes:
            return False
        try:
            try:
                self._copy(name)
            except StoreError as error:
                if error.cause not in ("io", "server") or error.status not in _COPIES_NOTHING:
                    raise
                content = memoryview(bytearray(size_bytes))
                self.read_into(name, 0, content)
                self.write(name, content)
        except StoreError as error:
            if error.cause not in ("missing", "short"):
                raise
            return False
        return True

    def close(self) -> None:
        with self._lock:
            self._closed, self._made = True, None

    @abstractmethod
    def _make(self) -> tuple[_C, Any]:
        """Return a client and botocore's credentials in it, None where it has none of botocore's."""

    @abstractmethod
    def _get(self, name: str, offset: int, memory: memoryview) -> None:
        """Ask for a range that is not empty. Raises BrokenBodyError where a body breaks off."""

    @abstractmethod
    def _copy(self, name: str) -> None:
        """Have the server copy the object onto itself. S3 refuses that unless it is asked to replace the metadata."""

    @abstractmethod
    def _delete(self, names: Sequence[str], doing: str) -> None:
        """Delete as many objects as one request takes."""

    @abstractmethod
    def _list_nothing(self, name: str) -> None:
        """List what begins with ``name``, which is nothing. Raises StoreError when there is no bucket."""

    def _client(self) -> _C:
        made = self._made
        if made is None:
            with self._lock:
                if self._closed:
                    raise closed_error(self.where)
                made = self._made = self._made or self._make()
        return made[0]

    def _renewed(self, denied: _C) -> bool:
        """Whether ``_client`` gives another one than ``denied`` now. Asks the AWS chain every few seconds at most."""
        with self._lock:
            if self._made is None or self._made[0] is not denied:
                return True
            used, now_s = self._made[1], time.monotonic()
            if hasattr(used, "refresh_needed") or now_s < self._ask_again_s:
                return False
            try:
                from botocore.session import Session

                found = Session().get_credentials()
                same = found is None or (used and found.get_frozen_credentials() == used.get_frozen_credentials())
            except Exception:  # noqa: BLE001  a foreign library's edge; the caller raises the denial
                same = True
            if same:
                self._ask_again_s = now_s + CREDENTIALS_RETRY_S
                return False
            self._made = None
            return True

    def _require_bucket(self) -> None:
        """Raise StoreError when there is no bucket. A HEAD answers 404 for that, too; a listing can tell."""
        if not self._bucket_seen:
            try:
                self._list_nothing(".nixl-offload-no-such-directory")
            except StoreError as error:
                if error.cause != "denied":  # Else there is something that may not be listed.
                    raise
            self._bucket_seen = True
