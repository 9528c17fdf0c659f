"""What ``nixl-offload check`` finds of a bucket: credentials, region, rights under the prefix, movers and their speed.
``endpoint`` looks at the network before.

Threading: one thread, blocking calls with time limits; movers run in the child process. Ownership: probes write objects
called ``check-<random hex>``, directly under the prefix, and remove them; one that cannot be removed is reported, and
removed by a later check that has the right. Where every request is refused the section ends: that must be fixed first.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from nixl_offload.cli.check.child import Answer, ChildProcess
from nixl_offload.cli.check.endpoint import SYNC_CLOCKS, look_at_endpoint
from nixl_offload.cli.check.report import CheckProgress, Finding, Section, ok, speed_finding, unknown, warning, wrong
from nixl_offload.config import S3Config
from nixl_offload.errors import NotSupportedError, StoreError
from nixl_offload.stores.s3 import S3Address, open_store
from nixl_offload.types import PAGE_BYTES

REQUEST_LIMIT_S: Final = 5.0
LEFTOVER_S: Final = 60.0
"""Objects of checks that are younger may belong to one that runs now."""
_OURS: Final = re.compile(r"check-[0-9a-f]{16}")
_PIP: Final = "pip install boto3 obstore"
_EXPORT: Final = "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (and AWS_SESSION_TOKEN), or AWS_PROFILE"
_REFUSALS: Final = {
    "credentials": r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|TokenRefreshRequired|InvalidToken",
    "clock": "RequestTimeTooSkewed",
    "bucket": "there is no bucket",
    "region": "another region|AuthorizationHeaderMalformed|Redirect|IllegalLocationConstraint",
}
"""Why every request may be refused: the name of the probe, and how the error shows it."""
_DEFAULT_REGIONS: Final = (None, "aws-global", "us-east-1")
_ACTIONS: Final = {"put": "s3:PutObject", "get": "s3:GetObject", "delete": "s3:DeleteObject"}


def s3_section(
    tier: S3Config, child: ChildProcess, progress: CheckProgress, *, config_file: str, io: bool, piece_bytes: int
) -> Section:
    """Look at a tier. ``config_file`` is named in fixes; ``io``: measure, with objects of ``piece_bytes``."""
    address = S3Address.of(tier)
    section = Section(tier.kind, f"Tier s3 {address.where} (mover: {tier.mover})")
    section.facts = {"where": address.where, "mover": tier.mover, "region": None, "taken": None, "io": None}
    tier = tier.model_copy(update={"request_timeout_s": min(REQUEST_LIMIT_S, tier.request_timeout_s)})
    progress(f"asking the AWS chain for credentials for {address.where}")
    endpoint, signed, credentials = _find_credentials(tier, address)
    progress(f"reaching {endpoint}")
    reached = look_at_endpoint(section, tier, endpoint, REQUEST_LIMIT_S)
    section.add("credentials", credentials)
    if not reached.answers or credentials.state == "wrong":
        missing = "credentials" if reached.answers else "a connection"
        section.add("permissions", unknown(f"not tried without {missing}"))
        return section
    progress(f"trying what is allowed in {address.where}")
    section.facts["region"] = reached.region or signed
    try:
        section.add("region", _region(tier, signed, reached.region))
        works = try_rights(section, tier, config_file)
    except NotSupportedError as error:
        section.add("permissions", wrong(str(error), _PIP))
        return section
    except RefusedError as error:
        # An earlier finding of that name was wrong.
        section.findings = [found for found in section.findings if found.name != error.name]
        section.add(error.name, _refusal(tier, error, signed, reached.region, config_file))
        section.add("permissions", unknown("not tried before that is fixed"))
        return section
    if tier.ttl_s is None and tier.capacity_bytes is None:
        fix = f"ttl: 7d, then nixl-offload bucket init {config_file}; with capacity: 10TiB, gc by a timer, too"
        section.add("growth", warning("neither ttl nor capacity is set: nothing ever removes objects", fix))
    section.add("lifecycle", find_lifecycle(tier, config_file))
    if works:
        progress(f"trying movers with {address.where}", why_long="NIXL imports torch")
        _add_movers(section, tier, child.run("objects", tier=tier.to_dict(), io=io, piece_bytes=piece_bytes))
    else:
        section.add("movers", unknown("not tried: they put objects, get them and remove them"))
    return section


def _find_credentials(tier: S3Config, address: S3Address) -> tuple[str, str | None, Finding]:
    """Return the endpoint's URL, the region that is signed for, and which link of the AWS chain has credentials."""
    endpoint, region = address.endpoint or "https://s3.amazonaws.com", address.region
    try:
        from nixl_offload.stores.bucket import client_facts

        endpoint, region, source = client_facts(tier)
    except ImportError:
        return endpoint, region, unknown("cannot be looked for without boto3", _PIP)
    except StoreError as error:
        if error.__cause__ is None:  # No client could be made; the endpoint's finding says why.
            return endpoint, region, unknown("not looked for before that is fixed")
        profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
        fix = f"correct ~/.aws/config and ~/.aws/credentials, or unset AWS_PROFILE (now {profile}); or {_EXPORT}"
        return endpoint, region, wrong(f"cannot be had: {type(error.__cause__).__name__}", fix)
    if source is None:
        words = "none found: not in the environment, ~/.aws, nor by a role of this machine"
        return endpoint, region, wrong(words, f"{_EXPORT}, or run under a role")
    return endpoint, region, ok(f"found by the AWS chain: {source}")


def _region(tier: S3Config, signed: str | None, told: str | None) -> Finding:
    """Compare the region that is signed for with the bucket's. Raises RefusedError where servers are sent elsewhere."""
    if told is not None and (told == signed or (told in _DEFAULT_REGIONS and signed in _DEFAULT_REGIONS)):
        return ok(told)
    try:
        with closing(open_store(tier)) as store:  # obstore follows no redirects, boto3 does
            next(iter(store.list("check/")), None)
    except StoreError as error:
        if re.search(_REFUSALS["region"], str(error)):
            raise RefusedError(str(error), "region") from error
    if told is None:
        return ok(f"{signed or 'the default'}; the server names none of its own")
    words = f"the bucket is in {told}, and requests are signed for {signed}; this server does not mind"
    return warning(words, f"region: {told}")


def _refusal(tier: S3Config, error: RefusedError, signed: str | None, told: str | None, config_file: str) -> Finding:
    if error.name != "region":
        init = f"nixl-offload bucket init {config_file}"
        return wrong(str(error), {"credentials": _EXPORT, "clock": SYNC_CLOCKS, "bucket": init}[error.name])
    if told in (None, signed):
        try:
            from nixl_offload.stores.bucket import bucket_region

            told = bucket_region(tier)
        except (ImportError, StoreError):
            fix = f"region: what `aws s3api get-bucket-location --bucket {tier.bucket}` says"
            return wrong("the bucket is in another region, and the server does not say in which", fix)
    return wrong(f"the bucket is in {told}, and requests are signed for {signed}", f"region: {told}")


class RefusedError(Exception):
    """Every request is refused, for a reason that the finding ``name`` is about."""

    def __init__(self, words: str, name: str) -> None:
        super().__init__(words)
        self.name = name


def try_rights(section: Section, tier: S3Config, config_file: str) -> bool:
    """Do once what servers do. True: objects come back and can be removed, so movers may be tried.

    Raises NotSupportedError, and RefusedError where every request is refused.
    """
    name, content = f"check-{secrets.token_hex(8)}", memoryview(secrets.token_bytes(PAGE_BYTES))
    memory, sizes, leftovers = memoryview(bytearray(PAGE_BYTES)), list[int](), list[str]()

    def attempt(right: str, consequence: str, call: Callable[[], object], words: str = "allowed") -> bool:
        try:
            call()
        except StoreError as error:
            section.add(right, _failed(tier, right, consequence, error, config_file))
            return False
        section.add(right, ok(words))
        return True

    def list_leftovers() -> None:
        old_s = time.time() - LEFTOVER_S
        found = store.list("check-")
        leftovers.extend(each.name for each in found if _OURS.fullmatch(each.name) and each.modified_s < old_s)

    def get() -> None:
        store.read_into(name, 0, memory)
        info = store.head(name)
        sizes.append(0 if info is None else info.size_bytes)

    with closing(open_store(tier)) as store:
        attempt("list", "no gc", list_leftovers)
        section.add("bucket", ok(f"{tier.bucket} is there"))
        words = "an absent object is reported as absent"
        attempt("lookup", "servers cannot tell what is there", lambda: store.head(f"{name}-absent"), words)
        if not attempt("put", "nothing can be stored", lambda: store.write(name, content)):
            for right in ("get", "delete"):
                section.add(right, unknown("not tried: nothing could be put there"))
            return False
        same = False
        if attempt("get", "nothing can be loaded", get):
            same = memory == content and sizes == [PAGE_BYTES]
            words, fix = "other bytes come back than were sent", "a proxy in between, or a server that stores trailers"
            section.add("bytes", ok("they come back as they were sent") if same else wrong(words, fix))
        where = f"s3://{tier.bucket}/{S3Address.of(tier).key(name)}"
        consequence = f"damaged chunks stay and gc cannot remove any; {where} (4 KiB) of this check stays, too"
        more = f"; {len(leftovers)} that earlier checks had to leave removed" if leftovers else ""
        return attempt("delete", consequence, lambda: store.delete([name, *leftovers]), f"allowed{more}") and same


def _failed(tier: S3Config, right: str, consequence: str, error: StoreError, config_file: str) -> Finding:
    """Return a finding about ``right``. Raises RefusedError where the refusal is about something else."""
    said = str(error).partition(": ")[2].partition(": ")[2] or str(error)  # without address and request
    for name, pattern in _REFUSALS.items():
        if re.search(pattern, str(error)):
            raise RefusedError(said, name)
    if error.cause == "denied":
        # Of ListBucket no condition on the prefix: a HEAD has none, and is then answered 403 for what is absent.
        action, resource = _ACTIONS.get(right, "s3:ListBucket"), f"arn:aws:s3:::{tier.bucket}"
        resource += f"/{S3Address.of(tier).key('*')}" if right in _ACTIONS else ""
        statement = json.dumps({"Effect": "Allow", "Action": action, "Resource": resource})
        return wrong(f"{said}: {consequence}", f"add to the policy of these credentials: {statement}")
    if error.cause == "full":
        return wrong(f"the bucket is full: {said}", f"nixl-offload gc {config_file} --tier s3 --delete")
    return wrong(f"{said}: {consequence}", "look at the server's log and load; then run this check again")


def find_lifecycle(tier: S3Config, config_file: str) -> Finding:
    """Say whether the bucket removes what is older than the ttl by itself."""
    init = f"nixl-offload bucket init {config_file}"
    try:
        from nixl_offload.stores.bucket import plan_lifecycle

        plan = plan_lifecycle(tier)
    except ImportError:
        return unknown("cannot be looked at without boto3", _PIP)
    except NotSupportedError:
        words, gc = (
            "the server knows no lifecycle rules",
            f"nixl-offload gc {config_file} --tier s3 --delete, by a timer",
        )
        return ok(words) if tier.ttl_s is None else warning(f"{words}: gc has to keep to the ttl", gc)
    except StoreError as error:
        return unknown(f"cannot be told: {str(error).partition(': ')[2]}", f"{init}, with credentials that may")
    if plan.changes:
        return warning(f"the bucket lacks: {'; '.join(plan.changes)}", init)
    return ok("the bucket has the rule that the config asks for")


def _add_movers(section: Section, tier: S3Config, answer: Answer) -> None:
    if "failed" in answer:
        fix = "mover: auto" if tier.mover != "auto" else _PIP
        section.add("movers", wrong(f"none works: {answer['failed']}", fix))
        return
    taken = next((probe["name"] for probe in answer["movers"] if probe["ok"]), None)
    section.facts |= {"movers": answer["movers"], "taken": taken}
    for probe in answer["movers"]:
        passed_over = warning(f"passed over: {probe['reason']}", f"mover: {taken}, to try it alone")
        used = ok(f"{probe['reason']}: this is the one that the server takes")
        section.add(f"mover {probe['name']}", used if probe["ok"] else passed_over)
    if "io" in answer:
        section.facts["io"] = None if "failed" in answer["io"] else answer["io"]
        section.add("speed", speed_finding(answer["io"]))
