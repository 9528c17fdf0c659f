"""Checks a bucket for ``nixl-offload check``: connection, credentials, rights under the prefix, movers, speed.

Threading: one thread, blocking calls with time limits; movers run in the child process. Ownership: probes write objects
named ``check-<random hex>`` directly under the prefix, and remove them; one that cannot be removed is reported. If
every request is refused, the section ends there.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final
from urllib.parse import urlsplit

from nixl_offload.cli.check.child import ChildProcess, try_object_movers
from nixl_offload.cli.check.findings import Finding, mover_findings
from nixl_offload.config import S3Config
from nixl_offload.errors import NotSupportedError, StoreError
from nixl_offload.stores.s3 import S3Address, open_store, proxy_of
from nixl_offload.types import PAGE_BYTES

REQUEST_LIMIT_S: Final = 5.0
_PIP: Final = "pip install boto3 obstore"
_EXPORT: Final = "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (and AWS_SESSION_TOKEN), or AWS_PROFILE"
_SYNC_CLOCKS: Final = "chronyc makestep, or timedatectl set-ntp true, on whichever machine is wrong (date -u tells)"
_REFUSALS: Final = {
    "credentials": "no AWS credentials found|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken",
    "clock": "RequestTimeTooSkewed",
    "bucket": "there is no bucket",
    "region": "another region|AuthorizationHeaderMalformed|Redirect|IllegalLocationConstraint",
}
"""Reasons why every request may be refused: the finding's name, and a pattern of the error."""
_ACTIONS: Final = {"put": "s3:PutObject", "get": "s3:GetObject", "delete": "s3:DeleteObject"}


def look_at_bucket(tier: S3Config, child: ChildProcess, *, config_file: str) -> Iterator[Finding]:
    """Check a tier. ``config_file``: its name for fixes."""
    tier = tier.model_copy(update={"request_timeout_s": min(REQUEST_LIMIT_S, tier.request_timeout_s)})
    address = S3Address.of(tier)
    endpoint = address.endpoint or "https://s3.amazonaws.com"
    try:
        refusal = _refusal(tier, endpoint, config_file)
    except NotSupportedError as error:
        yield Finding("permissions", "wrong", str(error), _PIP)
        return
    if refusal is not None:
        yield refusal
        yield Finding("permissions", "unknown", "not tried before that is fixed")
        return
    signed = f" signed for {address.region}" if address.region else ""
    yield Finding("endpoint", "ok", f"{endpoint} answers requests{signed}")
    yield Finding("credentials", "ok", "the server takes those that the AWS chain found")
    yield Finding("bucket", "ok", f"{tier.bucket} is there")
    works = True
    for found in try_rights(tier, config_file):
        works = works and (found.state == "ok" or found.name in ("list", "lookup"))
        yield found
    if tier.ttl_s is None and tier.capacity_bytes is None:
        fix = f"ttl: 7d, then nixl-offload bucket init {config_file}; with capacity: 10TiB, gc by a timer, too"
        yield Finding("growth", "warning", "neither ttl nor capacity is set: nothing ever removes objects", fix)
    yield find_lifecycle(tier, config_file)
    if works:
        yield from mover_findings(tier.mover, child.run(try_object_movers, tier=tier))
    else:
        yield Finding("movers", "unknown", "not tried: they put objects, get them and remove them")


def _refusal(tier: S3Config, endpoint: str, config_file: str) -> Finding | None:
    """Return a finding if the server is unreachable or refuses every request, else None. Raises NotSupportedError."""
    try:
        with closing(open_store(tier)) as store:  # the store does not follow redirects to other regions
            next(iter(store.list("check/")), None)
    except StoreError as error:
        name = next((each for each, pattern in _REFUSALS.items() if re.search(pattern, str(error))), None)
        if name is not None:
            init = f"nixl-offload bucket init {config_file}"
            region = f"region: what `aws s3api get-bucket-location --bucket {tier.bucket}` says"
            fixes = {"credentials": _EXPORT, "clock": _SYNC_CLOCKS, "bucket": init, "region": region}
            return Finding(name, "wrong", _said(error), fixes[name])
        if error.cause in ("unreachable", "timeout", "io"):
            parts = urlsplit(endpoint)
            fix = f"start the server, or correct endpoint: in the config; curl -sv {endpoint} says more"
            if parts.scheme == "https":
                fix += "; ca_bundle: the path of a PEM file that this user can read, for an authority of your own"
            if proxy := proxy_of(parts):
                fix += f"; export NO_PROXY={parts.hostname}, if it should not go by {urlsplit(proxy).hostname}"
            return Finding("endpoint", "wrong", f"{endpoint}: {_said(error)}", fix)
    return None


def _said(error: StoreError) -> str:
    """Return the error's text without address and request."""
    return str(error).partition(": ")[2].partition(": ")[2] or str(error)


def try_rights(tier: S3Config, config_file: str) -> Iterator[Finding]:
    """Make each kind of request that servers make, once."""
    name, content = f"check-{secrets.token_hex(8)}", memoryview(secrets.token_bytes(PAGE_BYTES))
    memory = memoryview(bytearray(PAGE_BYTES))

    def attempt(right: str, consequence: str, call: Callable[[], object], words: str = "allowed") -> Finding:
        try:
            call()
        except StoreError as error:
            return _failed(tier, right, consequence, error, config_file)
        return Finding(right, "ok", words)

    with closing(open_store(tier)) as store:
        yield attempt("list", "no gc", lambda: next(store.list("check/"), None))
        words = "an absent object is reported as absent"
        yield attempt("lookup", "servers cannot tell what is there", lambda: store.head(f"{name}-absent"), words)
        put = attempt("put", "nothing can be stored", lambda: store.write(name, content))
        yield put
        if put.state != "ok":
            for right in ("get", "delete"):
                yield Finding(right, "unknown", "not tried: nothing could be put there")
            return
        get = attempt("get", "nothing can be loaded", lambda: store.read_into(name, 0, memory))
        yield get
        if get.state == "ok" and memory == content:
            yield Finding("bytes", "ok", "they come back as they were sent")
        elif get.state == "ok":
            fix = "a proxy in between, or a server that stores trailers"
            yield Finding("bytes", "wrong", "other bytes come back than were sent", fix)
        where = f"s3://{tier.bucket}/{S3Address.of(tier).key(name)}"
        consequence = f"damaged chunks stay and gc cannot remove any; {where} (4 KiB) of this check stays, too"
        yield attempt("delete", consequence, lambda: store.delete([name]))


def _failed(tier: S3Config, right: str, consequence: str, error: StoreError, config_file: str) -> Finding:
    said, fix = _said(error), "look at the server's log and load; then run this check again"
    if error.cause == "denied":
        # No prefix condition on ListBucket: a HEAD has no prefix, so S3 would answer 403 for absent objects.
        action, resource = _ACTIONS.get(right, "s3:ListBucket"), f"arn:aws:s3:::{tier.bucket}"
        resource += f"/{S3Address.of(tier).key('*')}" if right in _ACTIONS else ""
        statement = json.dumps({"Effect": "Allow", "Action": action, "Resource": resource})
        fix = f"add to the policy of these credentials: {statement}"
    elif error.cause == "full":
        said, fix = f"the bucket is full: {said}", f"nixl-offload gc {config_file} --tier s3 --delete"
    return Finding(right, "wrong", f"{said}: {consequence}", fix)


def find_lifecycle(tier: S3Config, config_file: str) -> Finding:
    """Check that the bucket has the lifecycle rule that removes objects older than the ttl."""
    name, init = "lifecycle", f"nixl-offload bucket init {config_file}"
    try:
        from nixl_offload.stores.lifecycle import plan_lifecycle

        plan = plan_lifecycle(tier)
    except ImportError:
        return Finding(name, "unknown", "cannot be looked at without boto3", _PIP)
    except NotSupportedError:
        words = "the server knows no lifecycle rules"
        if tier.ttl_s is None:
            return Finding(name, "ok", words)
        gc = f"nixl-offload gc {config_file} --tier s3 --delete, by a timer"
        return Finding(name, "warning", f"{words}: gc has to keep to the ttl", gc)
    except StoreError as error:
        words = f"cannot be read: {str(error).partition(': ')[2]}"
        return Finding(name, "unknown", words, f"{init}, with credentials that may")
    if plan.changes:
        return Finding(name, "warning", f"the bucket lacks: {'; '.join(plan.changes)}", init)
    return Finding(name, "ok", "the bucket has the rule that the config asks for")
