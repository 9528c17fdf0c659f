"""``nixl-offload bucket init`` against moto: it shows, asks, applies once; it prints no secret."""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError

from nixl_offload.cli.main import main
from nixl_offload.config.schema import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.lifecycle import apply_lifecycle, plan_lifecycle

from .servers import MotoServer, RcloneServer, S3Server

OTHER = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}


@pytest.fixture
def client(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    with closing(moto.client()) as client:
        yield client


@pytest.fixture
def bucket() -> str:
    """The name of a bucket of this test's own, which does not exist yet."""
    return f"kv-{secrets.token_hex(4)}"


@pytest.fixture
def made(client: Any, bucket: str) -> str:
    """The same bucket, made."""
    client.create_bucket(Bucket=bucket)
    return bucket


def write(tmp_path: Path, server: S3Server, bucket: str, **fields: Any) -> str:
    path = tmp_path / "kv.yaml"
    path.write_text(yaml.safe_dump({"tiers": [{**server.tier("prod"), "bucket": bucket, "ttl": "36h", **fields}]}))
    return str(path)


def tier_of(server: MotoServer, bucket: str, prefix: str = "prod") -> S3Config:
    return S3Config.model_validate({**server.tier(prefix), "bucket": bucket, "ttl": "1d"})


def rules(client: Any, bucket: str) -> list[dict[str, Any]]:
    try:
        return list(client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"])
    except ClientError:
        return []


def put(client: Any, bucket: str, *new: dict[str, Any]) -> None:
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": list(new)})


def test_a_missing_bucket_is_made_with_its_rule_and_the_second_run_has_nothing_to_do(
    tmp_path: Path, client: Any, bucket: str, moto: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, moto, bucket)
    assert main(["bucket", "init", file, "--yes"]) == 0
    shown = capsys.readouterr()
    assert f"make the bucket {bucket}" in shown.out
    assert "objects under prod/ are removed 2 days after" in shown.out, "36 h, in whole days"
    assert shown.out.endswith("Done.\n")
    (rule,) = rules(client, bucket)
    assert (rule["Status"], rule["Expiration"]) == ("Enabled", {"Days": 2})
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert (rule.get("Filter") or rule)["Prefix"] == "prod/"

    assert main(["bucket", "init", file]) == 0
    again = capsys.readouterr()
    assert f"s3://{bucket}/prod at {moto.endpoint}: nothing to do.\n" in again.out
    for text in (shown.out, shown.err, again.out, again.err):
        assert moto.secret_access_key not in text
        assert moto.access_key_id not in text


@pytest.mark.parametrize(
    ("said", "at_terminal", "words"),
    [
        ("", True, "Apply? [y/N] Nothing was changed"),
        ("y\n", False, "--yes applies it"),
        ("y\n", True, "Apply? [y/N] Done."),
    ],
)
def test_only_a_yes_at_a_terminal_applies_it(
    said: str,
    at_terminal: bool,
    words: str,
    tmp_path: Path,
    moto: MotoServer,
    client: Any,
    made: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stdin = io.StringIO(said)
    monkeypatch.setattr(stdin, "isatty", lambda: at_terminal)
    monkeypatch.setattr("sys.stdin", stdin)
    applied = "Done" in words
    assert main(["bucket", "init", write(tmp_path, moto, made)]) == (0 if applied else 1)
    assert words in capsys.readouterr().out
    assert len(rules(client, made)) == applied


def test_other_peoples_rules_are_kept_while_ours_comes_changes_and_loses_its_expiry(
    tmp_path: Path, moto: MotoServer, client: Any, made: str
) -> None:
    """In a bucket with versions those go too: else what is deleted is billed for ever."""
    client.put_bucket_versioning(Bucket=made, VersioningConfiguration={"Status": "Enabled"})
    wide = {**OTHER, "ID": "wide", "Filter": {"Prefix": "prod"}, "Expiration": {"Days": 9}}
    put(client, made, OTHER, wide)
    for ttl, expiry in (("2d", {"Days": 2}), ("7d", {"Days": 7}), (None, {"ExpiredObjectDeleteMarker": True})):
        assert main(["bucket", "init", write(tmp_path, moto, made, ttl=ttl), "--yes"]) == 0
        by_id = {rule["ID"]: rule for rule in rules(client, made)}
        ours = by_id.pop("nixl-offload:prod/")
        assert by_id == {"theirs": OTHER, "wide": wide}
        assert ours["Expiration"] == expiry
        assert ours["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}


def test_rules_of_the_old_form_get_ours_in_it(moto: MotoServer, client: Any, made: str) -> None:
    """S3 refuses a mixture. The second run finds our rule, in its form."""
    put(client, made, {"ID": "old", "Status": "Enabled", "Prefix": "logs/", "Expiration": {"Days": 3}})
    plan = plan_lifecycle(tier_of(moto, made))
    theirs, ours = plan.after
    assert ("Prefix" in ours) == ("Prefix" in theirs)
    apply_lifecycle(plan)
    assert plan_lifecycle(tier_of(moto, made)).changes == ()


def test_long_prefixes_have_ids_of_their_own(moto: MotoServer, client: Any, made: str) -> None:
    """IDs end at 255 characters."""
    for number in range(2):
        apply_lifecycle(plan_lifecycle(tier_of(moto, made, prefix=f"{'x' * 400}{number}")))
    found = rules(client, made)
    assert len(found) == 2
    assert max(len(rule["ID"]) for rule in found) <= 255


def test_rules_that_changed_since_are_not_overwritten(moto: MotoServer, client: Any, made: str) -> None:
    plan = plan_lifecycle(tier_of(moto, made))
    put(client, made, OTHER)
    with pytest.raises(StoreError, match="look again"):
        apply_lifecycle(plan)
    assert rules(client, made) == [OTHER]


def test_a_server_without_lifecycle_rules_gets_its_bucket_and_says_what_is_missing(
    rclone: RcloneServer, tmp_path: Path, bucket: str, s3_environment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, rclone, bucket)
    assert main(["bucket", "init", file, "--yes"]) == 1
    with closing(rclone.client()) as client:
        assert bucket in {each["Name"] for each in client.list_buckets()["Buckets"]}
    error = capsys.readouterr().err
    assert "the bucket was made, but this server has no lifecycle rules" in error
    assert f"nixl-offload gc {file} --tier s3 --delete" in error
    # The second run has nothing to make, and the same to say.
    assert main(["bucket", "init", file, "--yes", "--json"]) == 1
    assert "knows nothing of it" in json.loads(capsys.readouterr().out)["error"]
