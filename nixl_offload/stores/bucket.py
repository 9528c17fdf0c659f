"""A bucket's administration over boto3: its region, and the lifecycle rule that expires old objects.

Threading: blocking calls; a plan is frozen. Planning only reads. Other people's rules are kept: ours is known by its
ID, which has the prefix in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import NixlOffloadError, NotSupportedError, StoreError
from nixl_offload.stores.s3 import (
    ATTEMPTS,
    CONNECT_TIMEOUT_S,
    S3Address,
    answer_error,
    hush_botocore,
    readable_ca_bundle,
)

Rule = dict[str, Any]
"""A lifecycle rule as S3's API has it."""

_DAY_S: Final = 86400.0
_MAX_ID: Final = 255
_MINIMUM: Final = "TransitionDefaultMinimumObjectSize"
_UNKNOWN_TO_SERVER: Final = {"NotImplemented", "MethodNotAllowed", "NotSupported", "XNotImplemented"}


@dataclass(frozen=True)
class LifecyclePlan:
    """What would be changed, and the rules that are there now, to notice when they change meanwhile."""

    tier: S3Config
    where: str
    create_bucket: bool
    """Private, in the tier's region."""
    before: tuple[Rule, ...]
    """All rules of the bucket."""
    after: tuple[Rule, ...]
    changes: tuple[str, ...]
    """What ``apply_lifecycle`` does, a sentence each, for people. Empty: nothing to do."""


class _Bucket:
    """One boto3 client for a tier's bucket. Raises StoreError, ConfigError for an unusable endpoint."""

    def __init__(self, tier: S3Config) -> None:
        hush_botocore()
        self.address = S3Address.of(tier)
        bundle = readable_ca_bundle(tier)
        config = Config(
            connect_timeout=min(CONNECT_TIMEOUT_S, tier.request_timeout_s),
            read_timeout=tier.request_timeout_s,
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
            request_checksum_calculation="when_required",  # else it sends trailers that some servers store as data
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if self.address.path_style else "virtual"},
        )
        with self._translating("look for credentials"):
            session = boto3.session.Session(region_name=self.address.region)
            self.client = session.client("s3", endpoint_url=self.address.endpoint, verify=bundle, config=config)

    def close(self) -> None:
        self.client.close()

    def ask(self, doing: str, operation: str, absent: str = "", **arguments: Any) -> Any:
        """Call the client; return None for an error with the code ``absent``.

        Raises NotSupportedError when the server does not know the operation.
        """
        with self._translating(doing):
            try:
                return getattr(self.client, operation)(Bucket=self.address.bucket, **arguments)
            except ClientError as error:
                said = error.response.get("Error", {})
                code, message = str(said.get("Code", "")), str(said.get("Message", ""))[:200]
                if code == absent:
                    return None
                if code in _UNKNOWN_TO_SERVER:
                    raise self._unknown(doing) from error
                status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
                raise answer_error(doing, self.address, status, code, message) from error

    def rules(self) -> dict[str, Any]:
        """Return S3's answer, in which "Rules" may be empty."""
        doing = "read the lifecycle rules"
        answer = self.ask(doing, "get_bucket_lifecycle_configuration", absent="NoSuchLifecycleConfiguration")
        if answer is not None and "Rules" not in answer:
            raise self._unknown(doing)  # rclone answers with a listing; its PUT would make a bucket
        return dict(answer or {"Rules": []})

    def create(self) -> None:
        """Make the bucket; one that we have is fine."""
        region, where = self.client.meta.region_name, {}
        if region not in (None, "us-east-1", "aws-global"):
            where["CreateBucketConfiguration"] = {"LocationConstraint": region}
        self.ask("make the bucket", "create_bucket", absent="BucketAlreadyOwnedByYou", **where)

    def _unknown(self, doing: str) -> NotSupportedError:
        text = "the server knows nothing of it; nixl-offload gc removes old objects"
        return NotSupportedError(f"{self.address.where}: cannot {doing}: {text}")

    @contextmanager
    def _translating(self, doing: str) -> Iterator[None]:
        """The edge of a foreign library. What is no answer of S3 is ``unreachable``."""
        try:
            yield
        except NixlOffloadError:
            raise
        except Exception as error:
            text = f"{self.address.where}: {doing}: no answer ({type(error).__name__})"
            raise StoreError(text, cause="unreachable") from error


def bucket_region(tier: S3Config) -> str:
    """Return the bucket's region, which may be another one than the tier's: boto3 follows redirects."""
    with closing(_Bucket(tier)) as bucket:
        found = bucket.ask("ask where the bucket is", "get_bucket_location").get("LocationConstraint")
    # S3 has no word for its first region, and an old one for its second.
    return "us-east-1" if found is None else "eu-west-1" if found == "EU" else str(found)


def plan_lifecycle(tier: S3Config) -> LifecyclePlan:
    """Read what the bucket has and say what would change. Changes nothing.

    Raises StoreError; NotSupportedError when the server knows no lifecycle rules.
    """
    with closing(_Bucket(tier)) as bucket:
        address = bucket.address
        missing = bucket.ask("look at the bucket", "head_bucket", absent="404") is None
        before: tuple[Rule, ...] = () if missing else tuple(bucket.rules()["Rules"])
    wanted = _wanted_rule(tier, address)
    own = next((rule for rule in before if rule.get("ID") == wanted["ID"]), None)
    if any("Prefix" in rule for rule in before if rule is not own):
        wanted["Prefix"] = wanted.pop("Filter")["Prefix"]  # S3 refuses a mixture of the old form and the new
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
    """Do what the plan says. Raises as ``plan_lifecycle``, and StoreError when the rules have changed since.

    S3 takes rules only as a whole, so a change between this look and the write would be lost.
    """
    with closing(_Bucket(plan.tier)) as bucket:
        if plan.create_bucket:
            bucket.create()
        if plan.after == plan.before:
            return
        now = bucket.rules()
        if tuple(now["Rules"]) != plan.before:
            text = f"{plan.where}: the lifecycle rules have changed since they were looked at; nothing done, look again"
            raise StoreError(text, cause="io")
        document: dict[str, Any] = {"LifecycleConfiguration": {"Rules": list(plan.after)}}
        if _MINIMUM in now:
            document[_MINIMUM] = now[_MINIMUM]  # not ours, and reset by a write without it
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
        # With Days, S3 also removes delete markers that are left over in a bucket with versions.
        "Expiration": {"ExpiredObjectDeleteMarker": True} if days is None else {"Days": days},
        # In a bucket with versions what is deleted, and everywhere what a dead writer left of an upload, is billed
        # until it is removed.
        "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }


def _essence(rule: Rule) -> Rule:
    """Return what makes two rules the same: servers add fields, and spell the filter in several ways."""
    filters = rule.get("Filter") or {}
    prefix = filters.get("Prefix") or filters.get("And", {}).get("Prefix") or rule.get("Prefix") or ""
    fields = "Status", "Expiration", "NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload"
    return {"Prefix": prefix, **{field: rule.get(field) for field in fields}}
