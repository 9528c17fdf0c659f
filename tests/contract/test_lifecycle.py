"""Lifecycle rules as moto keeps them: planned, applied, kept apart from other people's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.bucket import apply_lifecycle, plan_lifecycle, rule_id
from tests.s3.servers import MotoServer

OTHER = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}


class Bucket:
    """A bucket of moto's that may not exist yet, and a client that tells what is really there."""

    def __init__(self, server: MotoServer, name: str, client: Any) -> None:
        self.server, self.name, self.client = server, name, client

    def tier(self, **fields: object) -> S3Config:
        return S3Config.model_validate({**self.server.tier("kv/a"), "bucket": self.name, **fields})

    def rules(self) -> list[dict[str, Any]]:
        return list(self.client.get_bucket_lifecycle_configuration(Bucket=self.name)["Rules"])

    def put(self, *rules: dict[str, Any]) -> None:
        self.client.put_bucket_lifecycle_configuration(Bucket=self.name, LifecycleConfiguration={"Rules": list(rules)})


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture
def bucket(moto: MotoServer, monkeypatch: pytest.MonkeyPatch, numbers: Iterator[int]) -> Iterator[Bucket]:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    client = moto.client()
    yield Bucket(moto, f"bucket-{next(numbers)}", client)
    client.close()


@pytest.fixture(scope="module")
def numbers() -> Iterator[int]:
    return itertools.count()


def test_other_peoples_rules_are_kept(bucket: Bucket) -> None:
    """Whatever they say, while ours comes, changes and loses its expiry."""
    bucket.client.create_bucket(Bucket=bucket.name)
    wide = {**OTHER, "ID": "wide", "Filter": {"Prefix": "kv/"}, "Expiration": {"Days": 9}}
    bucket.put(OTHER, wide)
    for ttl, expiry in (("2d", {"Days": 2}), ("7d", {"Days": 7}), (None, None)):
        apply_lifecycle(plan_lifecycle(bucket.tier(ttl=ttl)))
        by_id = {rule["ID"]: rule for rule in bucket.rules()}
        assert set(by_id) == {"theirs", "wide", "nixl-offload:kv/a/"}
        assert by_id["theirs"] == OTHER
        assert by_id["nixl-offload:kv/a/"].get("Expiration") == expiry


def test_rules_of_the_old_form_get_ours_in_it(bucket: Bucket) -> None:
    """S3 refuses a mixture."""
    bucket.client.create_bucket(Bucket=bucket.name)
    bucket.put({"ID": "old", "Status": "Enabled", "Prefix": "logs/", "Expiration": {"Days": 3}})
    plan = plan_lifecycle(bucket.tier(ttl="1d"))
    ours = next(rule for rule in plan.after if rule["ID"] == "nixl-offload:kv/a/")
    theirs = next(rule for rule in plan.after if rule["ID"] == "old")
    assert ("Prefix" in ours) == ("Prefix" in theirs)


def test_a_bucket_with_versions_is_rid_of_them_too(bucket: Bucket) -> None:
    """Else what is deleted is billed for ever."""
    bucket.client.create_bucket(Bucket=bucket.name)
    bucket.client.put_bucket_versioning(Bucket=bucket.name, VersioningConfiguration={"Status": "Enabled"})
    plan = plan_lifecycle(bucket.tier(ttl="2d"))
    assert "versions" in plan.changes[0]
    apply_lifecycle(plan)
    (rule,) = bucket.rules()
    assert rule["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}
    assert rule["Expiration"] == {"Days": 2}
    assert plan_lifecycle(bucket.tier(ttl="2d")).changes == ()
    apply_lifecycle(plan_lifecycle(bucket.tier()))
    (rule,) = bucket.rules()
    assert rule["Expiration"] == {"ExpiredObjectDeleteMarker": True}
    assert plan_lifecycle(bucket.tier()).changes == ()


def test_rules_that_changed_since_are_not_overwritten(bucket: Bucket) -> None:
    """Planned, changed by somebody else, applied: refused, and theirs is there."""
    bucket.client.create_bucket(Bucket=bucket.name)
    plan = plan_lifecycle(bucket.tier(ttl="2d"))
    bucket.put(OTHER)
    with pytest.raises(StoreError, match="look again"):
        apply_lifecycle(plan)
    assert bucket.rules() == [OTHER]


def test_long_prefixes_have_ids_of_their_own() -> None:
    """IDs end at 255 characters."""
    ids = {rule_id(f"{'x' * 400}{number}/") for number in range(10)}
    assert len(ids) == 10
    assert max(map(len, ids)) <= 255
