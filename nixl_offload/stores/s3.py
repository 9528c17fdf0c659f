"""Shared by all S3 clients: the tier's address, certificates and proxy, and HTTP answers as errors.

Threading: pure, or reads the environment and AWS's config file. Nothing here reaches a server.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import TypeAdapter

from nixl_offload.config.schema import ALLOWED, EndpointUrl, S3Config
from nixl_offload.errors import ConfigError, NotSupportedError, StoreError
from nixl_offload.stores.base import Store

ATTEMPTS: Final = 3
"""Attempts per request, by the client library, with jittered pauses between them."""
CONNECT_TIMEOUT_S: Final = 3.0
"""Short, because a host may have dead addresses. obstore divides it by the number of addresses."""
NO_CREDENTIALS: Final = (
    "no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or run under a role"
)
_ENDPOINT: Final = TypeAdapter[str](EndpointUrl)
_DENIED: Final = "AccessDenied|ExpiredToken|InvalidToken|InvalidAccessKeyId|TokenRefreshRequired"
_THROTTLED: Final = "SlowDown|Throttling|ThrottlingException|RequestLimitExceeded"
_ANSWERS: Final[Sequence[tuple[str, Container[int], str, str]]] = (
    ("full", {507}, ".*(Quota|StorageFull|InsufficientCapacity).*", ""),
    ("denied", {401, 403}, _DENIED, "; the credentials do not allow this"),
    ("missing", {404}, "NoSuchKey|NoSuchVersion", ""),
    ("short", {416}, "InvalidRange", "; the object ends before the range asked for"),
    ("throttled", {429, 503}, _THROTTLED, "; the server asks to slow down"),
    ("timeout", {408}, "RequestTimeout", ""),
    ("server", range(500, 600), "InternalError", ""),
    ("io", range(300, 400), "PermanentRedirect", "; the bucket may be in another region: set region"),
)
"""Rows: a StoreError's cause, HTTP statuses, S3 codes, and a hint to add. The first row that matches counts."""


def open_store(tier: S3Config) -> Store:
    """Return the store of a bucket; the caller closes it. Does not access the network.

    Raises NotSupportedError if the client libraries are not installed, ConfigError for an unusable endpoint.
    """
    try:
        from nixl_offload.stores.obstore import BucketStore
    except ImportError as error:
        raise NotSupportedError(f"S3 needs obstore and boto3 ({error}); pip install obstore boto3") from error
    return BucketStore(tier)


@dataclass(frozen=True)
class S3Address:
    """Where a tier's objects are and whom to trust, with defaults filled in. Contains no credentials."""

    bucket: str
    prefix: str
    """Empty, or ends in one slash."""
    endpoint: str | None
    region: str | None
    path_style: bool
    ca_bundle: str | None
    """The file of trusted certificates; None: only the system's."""

    @classmethod
    def of(cls, tier: S3Config) -> S3Address:
        """Fill in missing values: from AWS's environment variables, then from the profile.

        Raises ConfigError if the endpoint found there is unusable.
        """
        prefix = "".join(f"{part}/" for part in tier.prefix.split("/") if part)
        profile, endpoint = _profile(), tier.endpoint
        region = tier.region or _variable("AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region")
        ca_bundle = tier.ca_bundle or _variable("AWS_CA_BUNDLE") or profile.get("ca_bundle")
        if endpoint is None:
            found = {name: _variable(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}
            found["endpoint_url in AWS's config file"] = profile.get("endpoint_url")
            endpoint = next((_checked_endpoint(url, origin) for origin, url in found.items() if url), None)
        # If the bucket's name has dots, no wildcard certificate covers it as a host name.
        path_style = endpoint is not None or "." in tier.bucket
        if tier.addressing != "auto":
            path_style = tier.addressing == "path"
        return cls(tier.bucket, prefix, endpoint, region, path_style, ca_bundle)

    @property
    def where(self) -> str:
        """The bucket and prefix for people, as ``Store.where``."""
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/") + at

    @property
    def virtual_endpoint(self) -> str | None:
        """The endpoint with the bucket as part of the host name; None without an endpoint."""
        return self.endpoint and self.endpoint.replace("://", f"://{self.bucket}.", 1)

    @property
    def plain_http(self) -> bool:
        """Whether the endpoint is used without TLS."""
        return self.endpoint is not None and urlsplit(self.endpoint).scheme == "http"

    def key(self, name: str) -> str:
        """Return the object's key in the bucket."""
        return self.prefix + name

    def require_ca_bundle(self) -> None:
        """Raise StoreError if ``ca_bundle`` cannot be read, which clients would report late and unclearly."""
        if self.ca_bundle and not (os.path.isfile(self.ca_bundle) and os.access(self.ca_bundle, os.R_OK)):
            raise StoreError(f"{self.where}: cannot read the CA bundle {self.ca_bundle}", cause="io")

    def tls_context(self) -> ssl.SSLContext:
        """Return a context that trusts the system's authorities and the tier's. Raises OSError."""
        context = ssl.create_default_context()
        if self.ca_bundle:
            context.load_verify_locations(self.ca_bundle)
        return context


def _checked_endpoint(url: str, origin: str) -> str:
    """Return a valid ``url``; else raise ConfigError. It names ``origin``, not ``url``, which may hold a password."""
    try:
        _ = urlsplit(url).port  # raises where it is above 65535
        return _ENDPOINT.validate_python(url)
    except ValueError:
        raise ConfigError(f"{origin} is not an endpoint; allowed: {ALLOWED['endpoint']}") from None


def _variable(*names: str) -> str | None:
    """Return the first environment variable that is not empty."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def _profile() -> Mapping[str, Any]:
    """Return the profile of AWS's config file, with its settings for S3; empty if botocore cannot read it."""
    try:
        from botocore.session import Session

        session = Session()
        profile = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(profile.get("services"), {})
        return {**profile, **services.get("s3", {})}
    except Exception:  # noqa: BLE001  botocore may raise anything
        return {}


def proxy_of(url: SplitResult) -> str | None:
    """Return the environment's proxy for a URL; None without one, or if ``NO_PROXY`` names the host."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return None if proxy is None or proxy_bypass(url.netloc) else proxy


def answer_error(doing: str, address: S3Address, status: int, code: str, message: str) -> StoreError:
    """Translate a failed HTTP answer.

    ``doing`` is the request ("HEAD x"). ``code`` and ``message`` are S3's, empty if the answer has no body. The text
    contains nothing else of the answer: a server that refuses a signature quotes the request, with its session token.
    """
    said = ": ".join(part for part in (code, message) if part and part != str(status))
    text = f"{address.where}: {doing}: HTTP {status}{f' ({said})' if said else ''}"
    if code == "NoSuchBucket":  # not ``missing``, which is about one object
        text = f"{address.where}: {doing}: there is no bucket {address.bucket!r}; nixl-offload bucket init makes it"
        return StoreError(text, cause="io")
    rows = (row for row in _ANSWERS if status in row[1] or re.fullmatch(row[2], code))
    cause, _, _, hint = next(rows, ("io", (), "", ""))
    if cause == "denied" and doing.startswith("HEAD"):
        hint += "; S3 answers so for an absent object too where the credentials may not list the bucket"
    return StoreError(printable(text) + hint, cause=cause)


def printable(text: str) -> str:
    """Return ``text`` with control characters replaced, so that a server cannot control an operator's terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def hush_botocore() -> None:
    """Keep session tokens out of botocore's DEBUG logs. Levels that were set explicitly stay."""
    for name in ("auth", "endpoint", "handlers", "parsers", "utils"):
        logger = logging.getLogger(f"botocore.{name}")
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
