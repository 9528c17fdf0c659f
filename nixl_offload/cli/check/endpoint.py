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
from collections.abc import Callable
from contextlib import closing
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from nixl_offload.cli.check.report import Finding, Section, ok, unknown, warning, wrong
from nixl_offload.config import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.s3 import S3Address, proxy_of, readable_ca_bundle

SYNC_CLOCKS: Final = "chronyc makestep, or timedatectl set-ntp true, on whichever machine is wrong (date -u tells)"
_SKEW_LIMIT_S: Final = 900.0
"""S3 refuses what is signed by a clock that differs by more."""
_SKEW_WARNING_S: Final = 30.0
_EXPIRED: Final = 10
_OTHER_NAME: Final = (62, 64)
"""OpenSSL's codes."""


class EndpointAnswer(NamedTuple):
    """Whether the other end speaks HTTP (assumed behind a proxy), and the bucket's region, where it tells everybody."""

    answers: bool
    region: str | None = None


def look_at_endpoint(
    section: Section, tier: S3Config, endpoint: str, limit_s: float, clock: Callable[[], float] = time.time
) -> EndpointAnswer:
    """Go as far as an unsigned answer. ``endpoint`` is the URL that clients use; ``clock`` this machine's time."""
    path_style, parts = S3Address.of(tier).path_style, urlsplit(endpoint)
    if not path_style and not parts.netloc.startswith(f"{tier.bucket}."):
        parts = parts._replace(netloc=f"{tier.bucket}.{parts.netloc}")
    host, tls = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    proxy = proxy_of(parts)
    if proxy:
        words = f"goes by the proxy {urlsplit(proxy).hostname} of the environment, so the connection was not tried"
        fix = f"export NO_PROXY={host}, if it should go straight; curl -sv {endpoint}"
        section.add("endpoint", unknown(words, fix))
        return EndpointAnswer(answers=True)
    began_s, before_s = time.perf_counter(), clock()
    try:
        with closing(_connection(tier, host, port, limit_s, tls=tls)) as connection:
            connection.request("HEAD", f"/{tier.bucket}" if path_style else "/")
            answer = connection.getresponse()
            answer.read()
        if answer.status == http.client.BAD_REQUEST and "xml" not in answer.getheader("Content-Type", "") and not tls:
            raise http.client.HTTPException  # as servers that speak TLS alone answer plain HTTP
    except (StoreError, OSError, http.client.HTTPException) as error:
        section.add("endpoint", wrong(*_no_answer(tier, f"{host}:{port}", limit_s, error, tls=tls)))
        return EndpointAnswer(answers=False)
    took_ms, now_s = (time.perf_counter() - began_s) * 1e3, (before_s + clock()) / 2
    secured = "by TLS, with a certificate that is trusted" if tls else "without TLS"
    section.add("endpoint", ok(f"{host}:{port} answers in {took_ms:.1f} ms, {secured}"))
    section.add("clock", _clock(answer.getheader("Date"), now_s))
    return EndpointAnswer(True, answer.getheader("x-amz-bucket-region"))


def _connection(tier: S3Config, host: str, port: int, limit_s: float, *, tls: bool) -> http.client.HTTPConnection:
    if not tls:
        return http.client.HTTPConnection(host, port, timeout=limit_s)
    bundle = readable_ca_bundle(tier)
    try:
        context = ssl.create_default_context(cafile=bundle)
    except OSError as error:
        raise StoreError(f"{bundle}: holds no certificates", cause="io") from error
    return http.client.HTTPSConnection(host, port, timeout=limit_s, context=context)


def _no_answer(tier: S3Config, at: str, limit_s: float, error: Exception, *, tls: bool) -> tuple[str, str]:
    """Return what stands between us and the server, and the fix."""
    curl, show = f"curl -sv {'https' if tls else 'http'}://{at}", f"openssl s_client -connect {at} -showcerts"
    host = at.rpartition(":")[0]
    if isinstance(error, StoreError):
        return str(error), "ca_bundle: the path of a PEM file with the authority's certificate that this user can read"
    if isinstance(error, socket.gaierror | UnicodeError):
        words = f"the name {host} cannot be resolved"
        if host.startswith(f"{tier.bucket}.") and tier.endpoint is not None:
            return f"{words}, in which the bucket is part of the name", "addressing: path"
        return words, f"correct endpoint: in the config, or DNS; getent hosts {host}"
    if isinstance(error, ConnectionRefusedError):
        fix = f"start the server, or correct endpoint: in the config; then {curl} answers"
        return f"nothing listens at {at} (connection refused)", fix
    if isinstance(error, TimeoutError):
        return f"{at} does not answer within {limit_s:g} s: a firewall, or a server that hangs", curl
    if isinstance(error, ssl.SSLCertVerificationError):
        fix = f"ca_bundle: the path of a PEM file with its authority's certificate; {show}"
        if error.verify_code == _EXPIRED:
            fix = "renew it on the server; here: date -u"
        elif error.verify_code in _OTHER_NAME:
            fix = f"endpoint: https:// and the name that the certificate is for; {show}"
        return f"the certificate of {at} is not trusted: {error.verify_message}", fix
    if isinstance(error, ssl.SSLError):
        fix = f"endpoint: http://{at}, if it speaks no TLS; {show}"
        return f"no TLS connection to {at} ({error.reason or error})", fix
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return f"{at} cannot be reached ({error.strerror})", f"{curl}; ip route get {host}"
    said, other = ("https", "http") if tls else ("http", "https")
    return f"{at} does not speak {said}, or is no S3 server", f"endpoint: {other}://{at}; {curl}"


def _clock(date: str | None, now_s: float) -> Finding:
    try:
        server_s = email.utils.parsedate_to_datetime(date or "").timestamp()
    except (TypeError, ValueError):
        return unknown("the server tells no date", "date -u, here and there")
    skew_s = now_s - server_s
    words = f"this machine's clock is {abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"
    if abs(skew_s) > _SKEW_LIMIT_S:
        return wrong(f"{words}; S3 takes no request that is more than {_SKEW_LIMIT_S:.0f} s off", SYNC_CLOCKS)
    if abs(skew_s) > _SKEW_WARNING_S:
        return warning(f"{words}, of at most {_SKEW_LIMIT_S:.0f} s; ages (ttl, gc) are off by as much", SYNC_CLOCKS)
    return ok("this machine's and the server's agree")
