"""What the credentials of an S3 tier may do under its prefix: each thing that servers do is done once, with an object
of our own, which is removed again.

Threading: one thread, blocking calls. Ownership: objects are called ``check-<random hex>``, directly under the prefix;
one that cannot be removed is told, and removed by a later check that may.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from nixl_offload.cli.check.lines import Line, ok, unknown, warning, wrong
from nixl_offload.config import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import Store
from nixl_offload.stores.s3 import S3Address
from nixl_offload.types import PAGE_BYTES

LEFTOVER_S: Final = 60.0
"""Objects of checks that are younger may belong to one that runs now."""
_OURS: Final = re.compile(r"check-[0-9a-f]{16}")
_CREDENTIALS: Final = {
    "InvalidAccessKeyId": "the server does not know this access key",
    "SignatureDoesNotMatch": "the secret does not belong to this access key",
    "ExpiredToken": "these credentials have expired",
    "TokenRefreshRequired": "these credentials have expired",
    "InvalidToken": "the session token is not valid",
}
_REGION: Final = ("AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect", "IllegalLocationConstraint")
_ACTIONS: Final = {"put": "s3:PutObject", "get": "s3:GetObject", "delete": "s3:DeleteObject", "list": "s3:ListBucket"}


@dataclass(slots=True)
class Tried:
    """What came of it."""

    lines: list[Line] = field(default_factory=list)
    refusal: Line | None = None
    """What keeps every request from being heard: credentials, the clock, the region, the bucket."""
    region: str | None = None
    """The right one, where a refusal names it."""
    works: bool = False
    """Objects come back, and can be removed: movers may be tried, and nothing of theirs will stay."""


def try_rights(tier: S3Config, store: Store, config_file: str, clock_s: Callable[[], float]) -> Tried:
    """List, look up, put, get and delete. ``config_file`` is for the words of mends; ``clock_s`` the server's time."""
    tried = Tried()
    rights = _Rights(tier, store, config_file, tried)
    leftovers = rights.listed(clock_s)
    if tried.refusal is None:
        rights.looked_up()
        name = f"check-{secrets.token_hex(8)}"
        if rights.put(name):
            was_got = rights.got(name)
            tried.works = rights.deleted(name, leftovers) and was_got
        elif tried.refusal is None:
            tried.lines += [unknown(other, "not tried: nothing could be put there") for other in ("get", "delete")]
    return tried


class _Rights:
    def __init__(self, tier: S3Config, store: Store, config_file: str, tried: Tried) -> None:
        self._tier = tier
        self._store = store
        self._file = config_file
        self._tried = tried
        self._content = secrets.token_bytes(PAGE_BYTES)

    def listed(self, clock_s: Callable[[], float]) -> list[str]:
        """List what earlier checks left; return those that are old enough to be nobody's."""
        try:
            listed = list(self._store.list("check-"))
        except StoreError as error:
            self._failed("list", "what is there cannot be listed: no gc, no warm start", error)
            return []
        self._tried.lines.append(ok("list", "allowed"))
        old_s = clock_s() - LEFTOVER_S
        return [info.name for info in listed if _OURS.fullmatch(info.name) and info.modified_s < old_s]

    def looked_up(self) -> None:
        """Ask for an object that is not there, as servers do all the time."""
        try:
            self._store.head(f"check-{secrets.token_hex(8)}")
        except StoreError as error:
            if error.cause == "denied":
                words = "an object that is absent is answered 403, so servers cannot tell what is there"
                self._tried.lines.append(wrong("lookup", words, self._grant("list")))
            else:
                self._failed("lookup", "objects cannot be looked up", error)
            return
        self._tried.lines.append(ok("lookup", "an absent object is told as absent"))

    def put(self, name: str) -> bool:
        """Put an object; False when it is not there."""
        try:
            self._store.write(name, memoryview(self._content))
        except StoreError as error:
            self._failed("put", "nothing can be stored", error)
            return False
        self._tried.lines.append(ok("put", "allowed"))
        return True

    def got(self, name: str) -> bool:
        """Get it back, and compare: what a server makes of the SDK's checksums shows here."""
        memory = memoryview(bytearray(PAGE_BYTES))
        try:
            self._store.read_into(name, 0, memory)
            found = self._store.head(name)
        except StoreError as error:
            self._failed("get", "nothing can be loaded", error)
            return False
        self._tried.lines.append(ok("get", "allowed"))
        said = f"checksums: {self._tier.checksums}"
        if bytes(memory) == self._content and found is not None and found.size_bytes == PAGE_BYTES:
            self._tried.lines.append(ok("checksums", f"{said}: bytes come back as they were sent"))
            return True
        size = "" if found is None else f" ({found.size_bytes} bytes of {PAGE_BYTES})"
        words = f"{said}: other bytes come back than were sent{size}; the server stores the SDK's trailers as data"
        self._tried.lines.append(wrong("checksums", words, "checksums: when_required"))
        return False

    def deleted(self, name: str, leftovers: list[str]) -> bool:
        """Remove our object, and what earlier checks had to leave."""
        where = f"s3://{self._tier.bucket}/{S3Address.of(self._tier).key(name)}"
        try:
            self._store.delete([name])
            self._store.delete(leftovers)
        except StoreError as error:
            words = f"damaged chunks stay and gc cannot remove any; {where} (4 KiB) of this check stays, too"
            self._failed("delete", words, error)
            return False
        more = f"; {len(leftovers)} that earlier checks had to leave removed" if leftovers else ""
        self._tried.lines.append(ok("delete", f"allowed{more}"))
        return True

    def _failed(self, right: str, consequence: str, error: StoreError) -> None:
        """Note a line for a failed request: what it is about shows only in the answer."""
        tried, code = self._tried, code_of(error)
        said = f" (the server says {code})" if code else ""
        if code in _CREDENTIALS:
            mend = (
                "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (and AWS_SESSION_TOKEN), or AWS_PROFILE, anew"
            )
            tried.refusal = wrong("credentials", f"{_CREDENTIALS[code]}{said}", mend)
        elif code == "RequestTimeTooSkewed":
            words = f"this machine's clock is too far from the server's{said}"
            tried.refusal = wrong("clock", words, "chronyc makestep, or timedatectl set-ntp true")
        elif is_about_region(error):
            tried.region = region_of(error)
            tried.refusal = region_line(self._tier, None, tried.region)
        elif code == "NoSuchBucket" or "there is no bucket" in str(error):
            words = f"there is no bucket {self._tier.bucket!r}"
            tried.refusal = wrong("bucket", words, f"nixl-offload bucket init {self._file}")
        elif error.cause == "denied":
            tried.lines.append(wrong(right, f"refused{said}: {consequence}", self._grant(right)))
        elif error.cause == "full":
            tried.lines.append(wrong(right, f"the bucket is full{said}", f"nixl-offload gc {self._file} --delete"))
        else:
            words = {
                "timeout": "no answer in time",
                "unreachable": "the connection broke",
                "throttled": "the server asks to slow down",
                "server": "the server failed",
            }.get(error.cause, f"it failed: {_less_address(error)}")
            mend = "look at the server's log and load; then run this check again"
            tried.lines.append(wrong(right, f"{words}{said}: {consequence}", mend))

    def _grant(self, right: str) -> str:
        return f"add to the policy of these credentials: {grant(self._tier, right)}"


def grant(tier: S3Config, right: str) -> str:
    """Return the statement of an AWS policy that allows ``right``, in one line."""
    bucket = f"arn:aws:s3:::{tier.bucket}"
    # Of ListBucket no condition on the prefix: a HEAD has none, and is then answered 403 for what is absent.
    resource = bucket if right == "list" else f"{bucket}/{S3Address.of(tier).key('*')}"
    action = _ACTIONS["list" if right == "lookup" else right]
    return json.dumps({"Effect": "Allow", "Action": action, "Resource": resource})


def region_line(tier: S3Config, configured: str | None, right: str | None, *, works: bool = False) -> Line:
    """Say that the region is wrong; ``works``: the server does not mind."""
    signed = configured or tier.region or "another"
    if right is None:
        mend = f"region: what `aws s3api get-bucket-location --bucket {tier.bucket}` says"
        return wrong("region", "the bucket is in another region, and the server does not say in which", mend)
    words = f"the bucket is in {right}, and requests are signed for {signed}"
    if works:
        return warning("region", f"{words}; this server does not mind", f"region: {right}")
    return wrong("region", words, f"region: {right}")


def is_about_region(error: StoreError) -> bool:
    """Whether a server refuses because the bucket is in another region than the one signed for."""
    return code_of(error) in _REGION or any(word in str(error) for word in (*_REGION, "another region"))


def code_of(error: StoreError) -> str:
    """Return S3's own word; empty where the error is no answer of S3, or comes by another client than boto3."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def region_of(error: StoreError) -> str | None:
    """Return the region that a refusal names."""
    response = _response(error)
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    found = response.get("Error", {}).get("Region") or headers.get("x-amz-bucket-region")
    return str(found) if found else None


def _response(error: StoreError) -> dict[str, Any]:
    response = getattr(error.__cause__, "response", None)
    return response if isinstance(response, dict) else {}


def _less_address(error: StoreError) -> str:
    """The tier's name stands above the line."""
    return str(error).partition(": ")[2] or str(error)


def credentials_line(link: str | None) -> Line:
    """Say which link of the AWS chain has credentials, and nothing of them."""
    if link is None:
        mend = "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..., or AWS_PROFILE, or run under a role"
        return wrong("credentials", "none found: not in the environment, ~/.aws, nor by a role of this machine", mend)
    words = {
        "env": "from the environment (AWS_ACCESS_KEY_ID)",
        "shared-credentials-file": "from the file ~/.aws/credentials, or AWS_SHARED_CREDENTIALS_FILE",
        "config-file": "from the file ~/.aws/config",
        "assume-role": "by a role that the profile assumes",
        "assume-role-with-web-identity": "by the role of a service account (web identity)",
        "sso": "by single sign-on",
        "login": "by `aws login`",
        "custom-process": "from the profile's credential_process",
        "container-role": "by the container's role",
        "iam-role": "by the machine's role (instance metadata)",
    }.get(link, f"from {link}")
    return ok("credentials", words)


def no_credentials_line(error: StoreError) -> Line:
    """Say why the AWS chain broke off, instead of going on to its next link."""
    name, kind = "credentials", type(error.__cause__).__name__
    profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    if kind == "ProfileNotFound":
        words = f"AWS_PROFILE names {profile!r}, and neither ~/.aws/config nor ~/.aws/credentials has it"
        return wrong(name, words, f"unset AWS_PROFILE, or aws configure --profile {profile}")
    if kind == "PartialCredentialsError":
        words = "only half of them is there: a key without its secret, or the other way round"
        return wrong(name, words, "export both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or neither")
    why = str(error).partition("look for credentials: ")[2] or str(error)
    mend = "mend ~/.aws/config and AWS_PROFILE; aws sts get-caller-identity tells whether they work"
    return wrong(name, f"cannot be had: {why}", mend)


def lifecycle_lines(tier: S3Config, config_file: str) -> Iterator[Line]:
    """Yield whether the bucket removes what is older than the ttl by itself."""
    name = "lifecycle"
    init = f"nixl-offload bucket init {config_file}"
    if tier.ttl_s is None and tier.capacity_bytes is None:
        words = "neither ttl nor capacity is set: nothing ever removes objects"
        yield warning("growth", words, "ttl: 7d, then " + init + "; or capacity: 10TiB, and gc by a timer")
    try:
        from nixl_offload.errors import NotSupportedError
        from nixl_offload.stores.lifecycle import plan_lifecycle

        plan = plan_lifecycle(tier)
    except ImportError:
        yield unknown(name, "cannot be looked at without boto3", "pip install nixl-offload[s3]")
    except NotSupportedError:
        words = "the server knows no lifecycle rules"
        if tier.ttl_s is None:
            yield ok(name, words)
        else:
            yield warning(
                name, f"{words}: gc has to keep to the ttl", f"nixl-offload gc {config_file} --delete, by a timer"
            )
    except StoreError as error:
        why = "these credentials may not read the rules" if error.cause == "denied" else _less_address(error)
        yield unknown(name, f"cannot be told: {why}", f"{init}, with credentials that may")
    else:
        if plan.changes:
            yield warning(name, f"the bucket lacks: {'; '.join(plan.changes)}", init)
        else:
            yield ok(name, "the bucket has the rule that the config asks for")
