"""A bucket's lifecycle rules: what ``nixl-offload bucket init`` would change, and changing it. Over boto3.

Threading: blocking calls; a plan is frozen. Planning only reads. Rules of other people are kept as they are: ours is
known by its ID, which names the prefix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import NotSupportedError, StoreError
from nixl_offload.stores.boto3 import error_code, make_client, translated
from nixl_offload.stores.s3 import S3Address
from nixl_offload.units import format_duration

Rule = dict[str, Any]
"""A lifecycle rule as S3's API has it."""

_DAY_S: Final = 86400.0
_UPLOAD_DAYS: Final = 1
"""What a writer that died left of a multipart upload is billed, and invisible, until somebody aborts it."""
_NONCURRENT_DAYS: Final = 1
_MAX_ID: Final = 255
_MINIMUM: Final = "TransitionDefaultMinimumObjectSize"
_UNKNOWN_TO_SERVER: Final = frozenset({"NotImplemented", "MethodNotAllowed", "NotSupported", "XNotImplemented"})
_OUR_FIELDS: Final = ("Status", "Expiration", "NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload")


@dataclass(frozen=True)
class LifecyclePlan:
    """What would be changed, and enough of what is there to notice when it changes meanwhile."""

    tier: S3Config
    where: str
    create_bucket: bool
    """The bucket does not exist; ``apply_lifecycle`` makes it, private, in the tier's region."""
    before: tuple[Rule, ...]
    """All rules of the bucket, ours and others'."""
    after: tuple[Rule, ...]
    changes: tuple[str, ...]
    """What ``apply_lifecycle`` does, a sentence each, for people. Empty: there is nothing to do."""
    notes: tuple[str, ...]
    """What people should know that nobody changes."""


def plan_lifecycle(tier: S3Config) -> LifecyclePlan:
    """Read what the bucket has and say what would change. Changes nothing.

    Raises StoreError, as ``stores.base``; NotSupportedError when the server knows no lifecycle rules.
    """
    address = S3Address.of(tier)
    with closing(make_client(tier)[0]) as client:
        missing = not _bucket_exists(client, address)
        before: tuple[Rule, ...] = () if missing else tuple(_configuration(client, address)["Rules"])
        versioned = not missing and _is_versioned(client, address)
    own_id = rule_id(address.prefix)
    own = next((rule for rule in before if rule.get("ID") == own_id), None)
    others = tuple(rule for rule in before if rule.get("ID") != own_id)
    wanted = _wanted_rule(tier, address, versioned)
    if any("Prefix" in rule for rule in others):
        wanted["Prefix"] = wanted.pop("Filter")["Prefix"]  # S3 takes rules of the old form and the new only apart.
    changes = []
    if missing:
        changes.append(f"make the bucket {address.bucket} ({address.region or 'in the default region'}, private)")
    same = own is not None and _essence(own) == _essence(wanted)
    if not same:
        changes.append(
            f"{'add' if own is None else 'replace'} the lifecycle rule {own_id!r}: {_in_words(wanted, address)}"
        )
    after = before if same else (*others, wanted)
    return LifecyclePlan(
        tier, address.where, missing, before, after, tuple(changes), tuple(_notes(tier, address, versioned, others))
    )


def apply_lifecycle(plan: LifecyclePlan) -> None:
    """Do what the plan says. Raises as ``plan_lifecycle``.

    Raises StoreError ``io`` without a change when somebody else has changed the rules since: plan again. S3 takes the
    rules only as a whole, so between this look and the write there is a moment in which another's change would be lost.
    """
    address = S3Address.of(plan.tier)
    with closing(make_client(plan.tier)[0]) as client:
        if plan.create_bucket:
            _create_bucket(client, address)
        if plan.after == plan.before:
            return
        now = _configuration(client, address)
        if tuple(now["Rules"]) != plan.before:
            text = f"{plan.where}: the lifecycle rules have changed since they were looked at; nothing done, look again"
            raise StoreError(text, cause="io")
        document: dict[str, Any] = {"LifecycleConfiguration": {"Rules": list(plan.after)}}
        if _MINIMUM in now:
            document[_MINIMUM] = now[_MINIMUM]  # Not ours, and reset by a write that leaves it out.
        _ask(client, address, "write the lifecycle rules", "put_bucket_lifecycle_configuration", **document)


def rule_id(prefix: str) -> str:
    """Return the ID of our rule for a tier's prefix (empty: the whole bucket)."""
    own_id = f"nixl-offload:{prefix}"
    if len(own_id) <= _MAX_ID:
        return own_id
    digest = hashlib.sha256(prefix.encode()).hexdigest()[:16]
    return f"{own_id[: _MAX_ID - 17]}-{digest}"


def _wanted_rule(tier: S3Config, address: S3Address, versioned: bool) -> Rule:
    rule: Rule = {
        "ID": rule_id(address.prefix),
        "Status": "Enabled",
        "Filter": {"Prefix": address.prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _UPLOAD_DAYS},
    }
    if tier.ttl_s is not None:
        # With Days, S3 also removes the delete markers that are left over in a bucket with versions.
        rule["Expiration"] = {"Days": max(1, math.ceil(tier.ttl_s / _DAY_S))}
    elif versioned:
        rule["Expiration"] = {"ExpiredObjectDeleteMarker": True}
    if versioned:
        rule["NoncurrentVersionExpiration"] = {"NoncurrentDays": _NONCURRENT_DAYS}
    return rule


def _in_words(rule: Rule, address: S3Address) -> str:
    days = rule.get("Expiration", {}).get("Days")
    what = f"objects under {address.prefix}" if address.prefix else "ALL objects in the bucket"
    words = [
        f"{what} are removed {days} day{'s' * (days > 1)} after they were written or refreshed"
        if days
        else f"{what} are kept"
    ]
    if "NoncurrentVersionExpiration" in rule:
        words.append(f"versions that were replaced or deleted are removed after {_NONCURRENT_DAYS} day")
    words.append(f"what is left of broken uploads is removed after {_UPLOAD_DAYS} day")
    return "; ".join(words)


def _notes(tier: S3Config, address: S3Address, versioned: bool, others: tuple[Rule, ...]) -> Iterator[str]:
    if not address.prefix:
        yield "the tier has no prefix: the rule is for every object in the bucket, whoever wrote it; set prefix"
    if tier.ttl_s is not None and tier.ttl_s % _DAY_S:
        yield f"rules know whole days: until then, what is older than {format_duration(tier.ttl_s)} counts as absent"
    if versioned:
        yield "the bucket keeps versions: what is replaced or deleted is billed for a day more"
    for rule in others:
        theirs = _prefix_of(rule)
        overlaps = theirs.startswith(address.prefix) or address.prefix.startswith(theirs)
        if rule.get("Status") == "Enabled" and overlaps and ("Transitions" in rule or "Expiration" in rule):
            yield f"the rule {rule.get('ID', '?')!r}, which is kept, also touches these objects"


def _essence(rule: Rule) -> dict[str, Any]:
    """Return what two rules must share to be the same: servers add fields, and spell the filter in several ways."""
    return {"Prefix": _prefix_of(rule), **{field: rule.get(field) for field in _OUR_FIELDS}}


def _prefix_of(rule: Rule) -> str:
    filters = rule.get("Filter") or {}
    return str(filters.get("Prefix") or filters.get("And", {}).get("Prefix") or rule.get("Prefix") or "")


def _bucket_exists(client: Any, address: S3Address) -> bool:
    try:
        _ask(client, address, "look at the bucket", "head_bucket")
    except StoreError as error:
        if error.cause != "missing":
            raise
        return False
    return True


def _configuration(client: Any, address: S3Address) -> dict[str, Any]:
    """Return S3's answer, in which "Rules" may be empty."""
    doing = "read the lifecycle rules"
    try:
        answer: dict[str, Any] = _ask(client, address, doing, "get_bucket_lifecycle_configuration")
    except StoreError as error:
        if error_code(error) != "NoSuchLifecycleConfiguration":
            raise
        return {"Rules": []}
    if "Rules" not in answer:
        raise _unknown(doing, address)  # rclone answers with a listing; its PUT would make a bucket.
    return answer


def _unknown(doing: str, address: S3Address) -> NotSupportedError:
    text = f"{address.where}: cannot {doing}: the server knows nothing of it; nixl-offload gc removes old objects"
    return NotSupportedError(text)


def _is_versioned(client: Any, address: S3Address) -> bool:
    """Whether the bucket has versions, or had: those of a suspended bucket are still there."""
    try:
        answer = _ask(client, address, "read whether the bucket keeps versions", "get_bucket_versioning")
    except NotSupportedError:
        return False
    return answer.get("Status") in ("Enabled", "Suspended")


def _create_bucket(client: Any, address: S3Address) -> None:
    region = client.meta.region_name
    where: dict[str, Any] = {}
    if region not in (None, "us-east-1", "aws-global"):
        where["CreateBucketConfiguration"] = {"LocationConstraint": region}
    try:
        _ask(client, address, "make the bucket", "create_bucket", **where)
    except StoreError as error:
        if error_code(error) != "BucketAlreadyOwnedByYou":
            raise


def _ask(client: Any, address: S3Address, doing: str, operation: str, **arguments: Any) -> Any:
    try:
        return getattr(client, operation)(Bucket=address.bucket, **arguments)
    except Exception as error:  # A foreign library's edge.
        failure = translated(error, doing, address)
        failure.__cause__ = error
        if error_code(failure) in _UNKNOWN_TO_SERVER:
            raise _unknown(doing, address) from error
        raise failure from error
