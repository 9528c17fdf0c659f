"""A bucket's administration over boto3: the lifecycle rule that expires old objects.

Threading: blocking calls; a plan is immutable. Planning only reads. Other rules of the bucket are kept. Ours is
recognised by its ID, which contains the prefix.
"""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import NotSupportedError, StoreError
from nixl_offload.stores.s3 import ATTEMPTS, CONNECT_TIMEOUT_S, S3Address, answer_error, hush_botocore

Rule = dict[str, Any]
"""A lifecycle rule in the format of S3's API."""

_DAY_S: Final = 86400.0
_MAX_ID: Final = 255
_MINIMUM: Final = "TransitionDefaultMinimumObjectSize"
_UNKNOWN_TO_SERVER: Final = {"NotImplemented", "MethodNotAllowed", "NotSupported", "XNotImplemented"}


@dataclass(frozen=True)
class LifecyclePlan:
    """The changes to make to a bucket, and its present rules, to notice if they change before the plan is applied."""

    tier: S3Config
    where: str
    create_bucket: bool
    """Whether to make the bucket: private, in the tier's region."""
    before: tuple[Rule, ...]
    """All rules that the bucket has now."""
    after: tuple[Rule, ...]
    changes: tuple[str, ...]
    """The changes by ``apply_lifecycle``, a sentence each, for people. Empty if there is nothing to do."""


class _Bucket:
    """One boto3 client for a tier's bucket. Raises StoreError, ConfigError for an unusable endpoint."""

    def __init__(self, tier: S3Config) -> None:
        hush_botocore()
        self.address = S3Address.of(tier)
        self.address.require_ca_bundle()
        config = Config(
            connect_timeout=min(CONNECT_TIMEOUT_S, tier.request_timeout_s),
            read_timeout=tier.request_timeout_s,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            request_checksum_calculation="when_required",  # else boto3 sends trailers that some servers store as data
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if self.address.path_style else "virtual"},
        )
        try:
            session = boto3.session.Session(region_name=self.address.region)
            self.client = session.client(
                "s3", endpoint_url=self.address.endpoint, verify=self.address.ca_bundle, config=config
            )
        except Exception as error:
            raise self._unanswered("look for credentials", error) from error

    def close(self) -> None:
        self.client.close()

    def ask(self, doing: str, operation: str, absent: str = "", **arguments: Any) -> Any:
        """Call the client; return None for an error with the code ``absent``.

        Raises NotSupportedError when the server does not know the operation.
        """
        try:
            return getattr(self.client, operation)(Bucket=self.address.bucket, **arguments)
        except ClientError as error:
            said = error.response.get("Error", {})
            code, message = str(said.get("Code", "")), str(said.get("Message", ""))[:200]
            if absent and code == absent:
                return None
            if code in _UNKNOWN_TO_SERVER:
                raise self._unknown(doing) from error
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise answer_error(doing, self.address, status, code, message) from error
        except Exception as error:
            raise self._unanswered(doing, error) from error

    def rules(self) -> dict[str, Any]:
        """Return S3's answer; its "Rules" may be empty."""
        doing = "read the lifecycle rules"
        answer = self.ask(doing, "get_bucket_lifecycle_configuration", absent="NoSuchLifecycleConfiguration")
        if answer is not None and "Rules" not in answer:
            raise self._unknown(doing)  # rclone answers with a listing; its PUT would make a bucket
        return dict(answer or {"Rules": []})

    def _unknown(self, doing: str) -> NotSupportedError:
        text = "the server knows nothing of it; nixl-offload gc removes old objects"
        return NotSupportedError(f"{self.address.where}: cannot {doing}: {text}")

    def _unanswered(self, doing: str, error: Exception) -> StoreError:
        return StoreError(f"{self.address.where}: {doing}: no answer ({type(error).__name__})", cause="unreachable")


def plan_lifecycle(tier: S3Config) -> LifecyclePlan:
    """Read the bucket's rules and plan the changes. Changes nothing.

    Raises StoreError. Raises NotSupportedError if the server has no lifecycle rules.
    """
    with closing(_Bucket(tier)) as bucket:
        address = bucket.address
        missing = bucket.ask("look at the bucket", "head_bucket", absent="404") is None
        before: tuple[Rule, ...] = () if missing else tuple(bucket.rules()["Rules"])
    wanted = _wanted_rule(tier, address)
    own = next((rule for rule in before if rule.get("ID") == wanted["ID"]), None)
    if any("Prefix" in rule for rule in before if rule is not own):
        wanted["Prefix"] = wanted.pop("Filter")["Prefix"]  # S3 refuses to mix the old form with the new
    is_same = own is not None and _essence(own) == _essence(wanted)
    changes = []
    if missing:
        changes.append(f"make the bucket {address.bucket} ({address.region or 'in the default region'}, private)")
    if not is_same:
        what = f"objects under {address.prefix}" if address.prefix else "ALL objects in the bucket"
        days = wanted["Expiration"].get("Days")
        ends = f"removed {days} day{'s' * (days != 1)} after they were written" if days else "kept"
        changes.append(
            f"{'add' if own is None else 'replace'} the lifecycle rule {wanted['ID']!r}: {what} are {ends}; "
            "replaced and deleted versions, and broken uploads, after 1 day"
        )
    after = before if is_same else (*(rule for rule in before if rule is not own), wanted)
    return LifecyclePlan(tier, address.where, missing, before, after, tuple(changes))


def apply_lifecycle(plan: LifecyclePlan) -> None:
    """Apply the plan. Raises as ``plan_lifecycle``, and StoreError if the rules have changed since.

    S3 accepts only the whole set of rules, so a change between the check here and the write is lost.
    """
    with closing(_Bucket(plan.tier)) as bucket:
        if plan.create_bucket:
            region = bucket.client.meta.region_name
            is_default = region in (None, "us-east-1", "aws-global")
            where = {} if is_default else {"CreateBucketConfiguration": {"LocationConstraint": region}}
            bucket.ask("make the bucket", "create_bucket", absent="BucketAlreadyOwnedByYou", **where)
        if plan.after == plan.before:
            return
        now = bucket.rules()
        if tuple(now["Rules"]) != plan.before:
            text = f"{plan.where}: the lifecycle rules have changed since they were looked at; nothing done, look again"
            raise StoreError(text, cause="io")
        document: dict[str, Any] = {"LifecycleConfiguration": {"Rules": list(plan.after)}}
        if _MINIMUM in now:
            document[_MINIMUM] = now[_MINIMUM]  # a setting of others; a write without it would reset it
        bucket.ask("write the lifecycle rules", "put_bucket_lifecycle_configuration", **document)


def _wanted_rule(tier: S3Config, address: S3Address) -> Rule:
    days = None if tier.ttl_s is None else max(1, math.ceil(tier.ttl_s / _DAY_S))
    own_id = f"nixl-offload:{address.prefix}"
    if len(own_id) > _MAX_ID:
        own_id = f"{own_id[: _MAX_ID - 17]}-{hashlib.sha256(own_id.encode()).hexdigest()[:16]}"
    return {
        "ID": own_id,
        "Status": "Enabled",
        "Filter": {"Prefix": address.prefix},
        # With Days, S3 also removes the remaining delete markers in a bucket with versions.
        "Expiration": {"ExpiredObjectDeleteMarker": True} if days is None else {"Days": days},
        # Deleted versions (in a bucket with versions) and unfinished uploads of dead writers are billed until they are
        # removed.
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }


def _essence(rule: Rule) -> Rule:
    """Return the fields by which two rules are compared. Servers add fields, and spell the filter differently."""
    filters = rule.get("Filter") or {}
    prefix = filters.get("Prefix") or filters.get("And", {}).get("Prefix") or rule.get("Prefix") or ""
    fields = "Status", "Expiration", "NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload"
    return {"Prefix": prefix, **{field: rule.get(field) for field in fields}}
