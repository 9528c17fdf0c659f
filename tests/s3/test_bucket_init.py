"""``nixl-offload bucket init`` against moto: it shows, asks, applies once; no secret is told."""

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
from nixl_offload.stores.bucket import apply_lifecycle, plan_lifecycle

from .servers import MotoServer, RcloneServer


@pytest.fixture
def client(moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    with closing(moto.client()) as client:
        yield client


@pytest.fixture
def bucket(client: Any) -> str:
    """A bucket of this test's own; the name of one that does not exist yet."""
    return f"kv-{secrets.token_hex(4)}"


@pytest.fixture
def file(tmp_path: Path, moto: MotoServer, bucket: str) -> Path:
    return write(tmp_path, moto, bucket)


def write(tmp_path: Path, moto: MotoServer, bucket: str, **fields: Any) -> Path:
    path = tmp_path / "kv.yaml"
    tier = {**moto.tier("prod"), "bucket": bucket, "ttl": "36h", **fields}
    path.write_text(yaml.safe_dump({"tiers": [tier]}))
    return path


def rules(client: Any, bucket: str) -> list[dict[str, Any]]:
    try:
        return list(client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"])
    except ClientError:
        return []


def test_a_missing_bucket_is_made_with_its_rule_and_the_second_run_has_nothing_to_do(
    file: Path, client: Any, bucket: str, moto: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bucket", "init", str(file), "--yes"]) == 0
    shown = capsys.readouterr()
    assert f"make the bucket {bucket}" in shown.out
    assert "objects under prod/ are removed 2 days after" in shown.out, "36 h, in whole days"
    assert shown.out.endswith("Done.\n")
    (rule,) = rules(client, bucket)
    assert (rule["Status"], rule["Expiration"]) == ("Enabled", {"Days": 2})
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert (rule.get("Filter") or rule)["Prefix"] == "prod/"

    assert main(["bucket", "init", str(file)]) == 0
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
    file: Path,
    client: Any,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.create_bucket(Bucket=bucket)
    stdin = io.StringIO(said)
    monkeypatch.setattr(stdin, "isatty", lambda: at_terminal)
    monkeypatch.setattr("sys.stdin", stdin)
    applied = "Done" in words
    assert main(["bucket", "init", str(file)]) == (0 if applied else 1)
    assert words in capsys.readouterr().out
    assert len(rules(client, bucket)) == applied


OTHER = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "logs/"}, "Expiration": {"Days": 3}}


def put(client: Any, bucket: str, *new: dict[str, Any]) -> None:
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": list(new)})


def test_other_peoples_rules_are_kept_while_ours_comes_changes_and_loses_its_expiry(
    tmp_path: Path, moto: MotoServer, client: Any, bucket: str
) -> None:
    """In a bucket with versions those go too: else what is deleted is billed for ever."""
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    wide = {**OTHER, "ID": "wide", "Filter": {"Prefix": "prod"}, "Expiration": {"Days": 9}}
    put(client, bucket, OTHER, wide)
    for ttl, expiry in (("2d", {"Days": 2}), ("7d", {"Days": 7}), (None, {"ExpiredObjectDeleteMarker": True})):
        assert main(["bucket", "init", str(write(tmp_path, moto, bucket, ttl=ttl)), "--yes"]) == 0
        by_id = {rule["ID"]: rule for rule in rules(client, bucket)}
        ours = by_id.pop("nixl-offload:prod/")
        assert by_id == {"theirs": OTHER, "wide": wide}
        assert ours["Expiration"] == expiry
        assert ours["NoncurrentVersionExpiration"] == {"NoncurrentDays": 1}


def test_rules_of_the_old_form_get_ours_in_it(moto: MotoServer, client: Any, bucket: str) -> None:
    """S3 refuses a mixture. The second run finds our rule, in its form."""
    client.create_bucket(Bucket=bucket)
    put(client, bucket, {"ID": "old", "Status": "Enabled", "Prefix": "logs/", "Expiration": {"Days": 3}})
    tier = S3Config.model_validate({**moto.tier("prod"), "bucket": bucket, "ttl": "1d"})
    plan = plan_lifecycle(tier)
    theirs, ours = plan.after
    assert ("Prefix" in ours) == ("Prefix" in theirs)
    apply_lifecycle(plan)
    assert plan_lifecycle(tier).changes == ()


def test_long_prefixes_have_ids_of_their_own(moto: MotoServer, client: Any, bucket: str) -> None:
    """IDs end at 255 characters."""
    client.create_bucket(Bucket=bucket)
    for number in range(2):
        tier = moto.tier(f"{'x' * 400}{number}")
        apply_lifecycle(plan_lifecycle(S3Config.model_validate({**tier, "bucket": bucket, "ttl": "1d"})))
    found = rules(client, bucket)
    assert len(found) == 2
    assert max(len(rule["ID"]) for rule in found) <= 255


def test_rules_that_changed_since_are_not_overwritten(moto: MotoServer, client: Any, bucket: str) -> None:
    client.create_bucket(Bucket=bucket)
    tier = S3Config.model_validate({**moto.tier("prod"), "bucket": bucket, "ttl": "2d"})
    plan = plan_lifecycle(tier)
    put(client, bucket, OTHER)
    with pytest.raises(StoreError, match="look again"):
        apply_lifecycle(plan)
    assert rules(client, bucket) == [OTHER]


def test_a_server_that_is_down_is_one_line_and_exit_code_1(
    tmp_path: Path, moto: MotoServer, client: Any, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, moto, bucket, endpoint="http://127.0.0.1:9", request_timeout="300ms")
    assert main(["bucket", "init", str(file), "--yes"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"nixl-offload: s3://{bucket}/prod at http://127.0.0.1:9: ")
    assert error.count("\n") == 1


def test_a_server_without_lifecycle_rules_gets_its_bucket_and_says_what_is_missing(
    rclone: RcloneServer,
    tmp_path: Path,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "kv.yaml"
    path.write_text(yaml.safe_dump({"tiers": [{**rclone.tier("prod"), "bucket": bucket, "ttl": "36h"}]}))
    assert main(["bucket", "init", str(path), "--yes"]) == 1
    with closing(rclone.client()) as client:
        assert bucket in {each["Name"] for each in client.list_buckets()["Buckets"]}
    error = capsys.readouterr().err
    assert "the bucket was made, but this server has no lifecycle rules" in error
    assert f"nixl-offload gc {path} --tier s3 --delete" in error
    # The second run has nothing to make, and the same to say.
    assert main(["bucket", "init", str(path), "--yes", "--json"]) == 1
    assert "knows nothing of it" in json.loads(capsys.readouterr().out)["error"]
