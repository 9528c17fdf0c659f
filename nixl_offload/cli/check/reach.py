"""Whether an S3 server answers at all: name, connection, TLS, HTTP, its clock, the bucket's region. Nothing is signed.

Threading: one thread; each step has a time limit. Standard library alone, so that what is said is about the network and
not about a client library.
"""

from __future__ import annotations

import email.utils
import http.client
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from nixl_offload.cli.check.lines import Line, ok, unknown, warning, wrong
from nixl_offload.config import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.s3 import S3Address, readable_ca_bundle

SKEW_LIMIT_S: Final = 900.0
"""S3 refuses what is signed by a clock that differs by more."""
SKEW_TOLD_S: Final = 30.0
_HOST_MISMATCH: Final = (62, 64)
_EXPIRED: Final = 10
_NO_AUTHORITY: Final = (18, 19, 20, 21)
_SYNC: Final = "chronyc makestep, or timedatectl set-ntp true, on whichever machine is wrong (date -u tells)"


@dataclass(slots=True)
class Reached:
    """What an answer told."""

    lines: list[Line]
    answers: bool = False
    """Somebody at the other end speaks HTTP; by a proxy nobody looked, and it counts as True."""
    region: str | None = None
    """The bucket's, where the server tells it to everybody."""
    redirects: bool = False
    """The server sends requests for this bucket elsewhere."""


def reach(tier: S3Config, endpoint: str, limit_s: float, clock: Callable[[], float] = time.time) -> Reached:
    """Go as far as an unsigned answer. ``endpoint`` is the URL that clients use; ``clock`` this machine's time."""
    address = S3Address.of(tier)
    parts = urlsplit(endpoint)
    host, tls = parts.hostname or "", parts.scheme == "https"
    if not address.path_style and not host.startswith(f"{tier.bucket}."):
        host = f"{tier.bucket}.{host}"
    port = parts.port or (443 if tls else 80)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        words = f"goes by the proxy {urlsplit(proxy).hostname} of the environment, so the way was not looked at"
        mend = f"export NO_PROXY={host}, if it should go straight; curl -sv {endpoint}"
        return Reached([unknown("endpoint", words, mend)], answers=True)
    url = f"{parts.scheme}://{host}:{port}"
    try:
        return _ask(tier, address, url, limit_s, clock)
    except _UnreachableError as error:
        return Reached([error.line])


class _UnreachableError(Exception):
    def __init__(self, words: str, mend: str) -> None:
        super().__init__(words)
        self.line = wrong("endpoint", words, mend)


def _ask(tier: S3Config, address: S3Address, url: str, limit_s: float, clock: Callable[[], float]) -> Reached:
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 0)
    _resolve(tier, address, host, port)
    path = f"/{tier.bucket}" if address.path_style else "/"
    began_s, before_s = time.perf_counter(), clock()
    with closing(_connection(tier, url, limit_s)) as connection:
        try:
            connection.request("HEAD", path)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise _translated(tier, url, limit_s, error) from error
    took_s, now_s = time.perf_counter() - began_s, (before_s + clock()) / 2
    refused = answer.status == http.client.BAD_REQUEST and "xml" not in answer.getheader("Content-Type", "")
    if parts.scheme == "http" and refused and _speaks_tls(host, port, limit_s):
        raise _UnreachableError(f"{host}:{port} speaks TLS", f"endpoint: https://{host}:{port}")
    secured = "by TLS, with a certificate that is trusted" if parts.scheme == "https" else "without TLS"
    lines = [ok("endpoint", f"{host}:{port} answers in {took_s * 1e3:.1f} ms, {secured}")]
    lines += _clock_lines(answer.getheader("Date"), now_s)
    redirects = 300 <= answer.status < 400
    return Reached(lines, True, answer.getheader("x-amz-bucket-region"), redirects)


def _resolve(tier: S3Config, address: S3Address, host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        words = f"the name {host} cannot be resolved"
        if not address.path_style and address.endpoint is not None:
            raise _UnreachableError(f"{words}, in which the bucket is part of the name", "addressing: path") from error
        raise _UnreachableError(words, f"mend endpoint: in the config, or DNS; getent hosts {host}") from error


def _connection(tier: S3Config, url: str, limit_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port
    if parts.scheme != "https":
        return http.client.HTTPConnection(host, port, timeout=limit_s)
    try:
        context = ssl.create_default_context(cafile=readable_ca_bundle(tier))
    except StoreError as error:
        words = str(error).rpartition(": ")[2]
        raise _UnreachableError(words, "ca_bundle: the path of a file that this user can read") from error
    except (OSError, ssl.SSLError) as error:
        words = f"{tier.ca_bundle or 'AWS_CA_BUNDLE'} holds no certificates"
        raise _UnreachableError(words, "ca_bundle: a file with the authority's certificate, in PEM") from error
    return http.client.HTTPSConnection(host, port, timeout=limit_s, context=context)


def _translated(tier: S3Config, url: str, limit_s: float, error: Exception) -> _UnreachableError:
    """Return what stands between us and the server, in our words."""
    parts = urlsplit(url)
    host, port = str(parts.hostname), int(parts.port or 0)
    at, curl = f"{host}:{port}", f"curl -sv {url}"
    if isinstance(error, ConnectionRefusedError):
        mend = f"start the server, or mend endpoint: in the config; then {curl} answers"
        return _UnreachableError(f"nothing listens at {at} (connection refused)", mend)
    if isinstance(error, TimeoutError):
        return _UnreachableError(f"{at} does not answer within {limit_s:g} s: a firewall, or a server that hangs", curl)
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate(tier, host, at, error)
    if isinstance(error, ssl.SSLError):
        if _speaks_http(host, port, limit_s):
            return _UnreachableError(f"{at} does not speak TLS", f"endpoint: http://{at}")
        return _UnreachableError(
            f"no TLS connection to {at} ({error.reason or error})", f"openssl s_client -connect {at}"
        )
    if parts.scheme == "http" and _speaks_tls(host, port, limit_s):
        return _UnreachableError(f"{at} speaks TLS", f"endpoint: https://{at}")
    if isinstance(error, OSError) and error.errno:
        return _UnreachableError(f"{at} cannot be reached ({error.strerror})", f"{curl}; ip route get {host}")
    return _UnreachableError(f"{at} broke the connection off: not an S3 server?", curl)


def _certificate(tier: S3Config, host: str, at: str, error: ssl.SSLCertVerificationError) -> _UnreachableError:
    show = f"openssl s_client -connect {at} -showcerts"
    if error.verify_code in _HOST_MISMATCH:
        words = f"the certificate of {at} is for another name than {host}"
        return _UnreachableError(words, "endpoint: https:// and the name that the certificate is for; " + show)
    if error.verify_code == _EXPIRED:
        return _UnreachableError(f"the certificate of {at} has expired", "renew it on the server; here: date -u")
    if error.verify_code in _NO_AUTHORITY:
        words = f"the certificate of {at} is signed by nobody whom this machine trusts"
        return _UnreachableError(words, "ca_bundle: the path of a PEM file with its authority's certificate; " + show)
    return _UnreachableError(f"the certificate of {at} is refused: {error.verify_message}", show)


def _clock_lines(date: str | None, now_s: float) -> Iterator[Line]:
    name = "clock"
    try:
        server_s = email.utils.parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        yield unknown(name, "the server tells no date", "date -u, here and there")
        return
    skew_s = now_s - server_s
    words = f"this machine's clock is {abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"
    if abs(skew_s) > SKEW_LIMIT_S:
        yield wrong(name, f"{words}; S3 takes no request that is more than {SKEW_LIMIT_S:.0f} s off", _SYNC)
    elif abs(skew_s) > SKEW_TOLD_S:
        yield warning(name, f"{words}, of at most {SKEW_LIMIT_S:.0f} s; ages (ttl, gc) are off by as much", _SYNC)
    else:
        yield ok(name, "this machine's and the server's agree")


def _speaks_tls(host: str, port: int, limit_s: float) -> bool:
    """Whether a TLS handshake succeeds, whatever the certificate is worth: nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), limit_s) as plain, context.wrap_socket(plain, server_hostname=host):
            return True
    except OSError:
        return False


def _speaks_http(host: str, port: int, limit_s: float) -> bool:
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=limit_s)) as connection:
            connection.request("HEAD", "/")
            connection.getresponse()
            return True
    except (OSError, http.client.HTTPException):
        return False
