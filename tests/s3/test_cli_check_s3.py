"""``nixl-offload check`` on buckets: what is wrong with each server is named with its fix, and no secret is shown.

One process tries the movers of all tests here, as it would cost seconds to start one for each.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.cli.check.child import ChildProcess
from nixl_offload.cli.check.findings import Finding
from nixl_offload.cli.check.s3 import look_at_bucket, try_rights
from nixl_offload.cli.main import main
from nixl_offload.config import S3Config, parse_config

from .proxy import Answer, FaultProxy, Flip, Hold
from .servers import MotoServer, RcloneServer, S3Server, TlsRclone, free_port, make_certificate

FINE = ("endpoint", "credentials", "bucket", "list", "lookup", "put", "get", "bytes", "delete")
DENIED = Answer(403, "AccessDenied")


@pytest.fixture(scope="module")
def child(rclone: RcloneServer) -> Iterator[ChildProcess]:
    with pytest.MonkeyPatch.context() as patch, closing(ChildProcess()) as process:
        for name, value in rclone.environment.items():
            patch.setenv(name, value)
        process.run(os.getpid)
        yield process


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, rclone: RcloneServer, child: ChildProcess) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in rclone.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(rclone: RcloneServer) -> Iterator[FaultProxy]:
    with FaultProxy(rclone.port) as proxy:
        yield proxy


def tier_of(server: S3Server, prefix: str, **fields: Any) -> S3Config:
    (tier,) = parse_config({"tiers": [server.tier(prefix, **fields)]}).tiers
    assert isinstance(tier, S3Config)
    return tier


def look(tier: S3Config, child: ChildProcess) -> dict[str, Finding]:
    """Return the section's lines; each that is wrong has a fix."""
    found = list(look_at_bucket(tier, child, config_file="kv.yaml"))
    assert all(each.fix for each in found if each.state == "wrong")
    return {each.name: each for each in found}


def wrong(lines: dict[str, Finding]) -> list[str]:
    return [line.name for line in lines.values() if line.state == "wrong"]


def test_a_server_as_it_should_be(rclone: RcloneServer, child: ChildProcess, prefix: str) -> None:
    """All is ok, movers are tried, speeds measured, and nothing of it stays in the bucket."""
    lines = look(tier_of(rclone, prefix, ttl="7d"), child)
    assert [lines[name].state for name in FINE] == ["ok"] * len(FINE)
    assert "MB/s" in lines["speed"].words
    assert lines["lifecycle"].fix == "nixl-offload gc kv.yaml --tier s3 --delete, by a timer", "no rules"
    assert any(name.startswith("mover ") and line.state == "ok" for name, line in lines.items())
    assert rclone.objects(prefix) == []


def test_the_command_says_what_helps_where_a_server_is_down(
    rclone: RcloneServer, tmp_path: Path, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, endpoint = tmp_path / "kv.yaml", f"http://127.0.0.1:{free_port()}"
    file.write_text(yaml.safe_dump({"tiers": [rclone.tier(prefix, endpoint=endpoint, mover="obstore")]}))
    assert main(["check", "--json", str(file)]) == 1
    (section,) = [each for each in json.loads(capsys.readouterr().out)["sections"] if each["kind"] == "s3"]
    (line,) = [each for each in section["findings"] if each["state"] == "wrong"]
    assert (line["name"], line["words"]) == ("endpoint", f"{endpoint}: cannot connect (Connection refused)")
    assert line["fix"].startswith("start the server")


def test_a_server_that_forbids_delete(
    rclone: RcloneServer, proxy: FaultProxy, child: ChildProcess, prefix: str
) -> None:
    """What the check could not remove is reported; no mover leaves more behind."""
    tier = tier_of(rclone, prefix, endpoint=proxy.endpoint)
    with proxy.inject(DENIED, operation="DELETE|DELETE_MANY"):
        lines = look(tier, child)
    assert wrong(lines) == ["delete"]
    (left,) = rclone.objects(prefix)
    assert f"s3://kv-cache/{left} (4 KiB) of this check stays" in lines["delete"].words
    assert '"Action": "s3:DeleteObject"' in str(lines["delete"].fix)
    assert lines["movers"].state == "unknown"
    assert "speed" not in lines


@pytest.mark.parametrize(
    ("fault", "operation", "name", "words"),
    [
        # A right that is missing: its fix names the right.
        (DENIED, "PUT", "put", '"Action": "s3:PutObject"'),
        (DENIED, "LIST", "list", '"Action": "s3:ListBucket"'),
        (Answer(507, "InsufficientCapacity"), "PUT", "put", "the bucket is full: HTTP 507 (InsufficientCapacity"),
        (Flip(at=100), "GET", "bytes", ""),
    ],
)
def test_what_a_server_refuses_or_spoils_is_named_alone(
    rclone: RcloneServer, proxy: FaultProxy, prefix: str, fault: Any, operation: str, name: str, words: str
) -> None:
    tier = tier_of(rclone, prefix, endpoint=proxy.endpoint)
    with proxy.inject(fault, operation=operation):
        lines = {found.name: found for found in try_rights(tier, "kv.yaml")}
    assert wrong(lines) == [name]
    assert words in f"{lines[name].words} {lines[name].fix}"
    assert rclone.objects(prefix) == []


def test_a_wrong_region_is_named(moto: MotoServer, child: ChildProcess) -> None:
    """As S3 does it; the right one works."""
    bucket, region = f"kv-{secrets.token_hex(4)}", "eu-central-1"
    answer = Answer(400, "AuthorizationHeaderMalformed", more=f"<Region>{region}</Region>")
    with closing(moto.client()) as client:
        client.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": region})
    with FaultProxy(moto.port) as proxy, proxy.inject(answer, unless=f"/{region}/s3/aws4_request"):
        tier = tier_of(moto, "kv", endpoint=proxy.endpoint, bucket=bucket, mover="obstore", ttl="7d")
        lines = look(tier, child)
        assert wrong(lines) == ["region"]
        assert f"get-bucket-location --bucket {bucket}" in str(lines["region"].fix)
        assert wrong(look(tier.model_copy(update={"region": region}), child)) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "never-to-be-seen"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_PROFILE": "ours"}, "ProfileNotFound"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no AWS credentials found"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "PartialCredentialsError"),
    ],
)
def test_credentials_that_do_not_work(
    rclone: RcloneServer,
    child: ChildProcess,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    words: str,
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    lines = look(tier_of(rclone, prefix, mover="obstore"), child)
    assert (wrong(lines), lines["permissions"].state) == (["credentials"], "unknown")
    assert words in lines["credentials"].words
    assert "AWS_PROFILE" in str(lines["credentials"].fix)
    for secret in ("never-to-be-seen", rclone.access_key_id, rclone.secret_access_key):
        assert secret not in repr(lines)


def test_a_bucket_that_is_not_there_and_its_rules(
    moto: MotoServer, child: ChildProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fix is a command, which is run as it stands: bucket and lifecycle rule are there then."""
    file = tmp_path / "kv.yaml"
    tier = tier_of(moto, "kv", ttl="7d", mover="obstore", bucket=f"kv-{secrets.token_hex(4)}")
    file.write_text(yaml.safe_dump({"tiers": [moto.tier("kv", ttl="7d", bucket=tier.bucket)]}))
    lines = look(tier, child)
    assert wrong(lines) == ["bucket"]
    assert lines["bucket"].fix == "nixl-offload bucket init kv.yaml"
    assert main(["bucket", "init", str(file), "--yes"]) == 0
    capsys.readouterr()
    fixed = look(tier, child)
    assert (fixed["bucket"].state, fixed["lifecycle"].state) == ("ok", "ok")
    assert look(tier.model_copy(update={"ttl_s": None}), child)["growth"].state == "warning"


def test_a_clock_that_is_off(rclone: RcloneServer, proxy: FaultProxy, child: ChildProcess, prefix: str) -> None:
    with proxy.inject(Answer(403, "RequestTimeTooSkewed")):
        lines = look(tier_of(rclone, prefix, endpoint=proxy.endpoint), child)
    assert wrong(lines) == ["clock"]
    assert "timedatectl set-ntp true" in str(lines["clock"].fix)


def test_an_endpoint_that_is_not_reached(
    rclone: RcloneServer, proxy: FaultProxy, child: ChildProcess, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such name; a server that hangs; a proxy of the environment, whose password is not shown."""
    proxy.inject(Hold())
    monkeypatch.setenv("https_proxy", "http://user:password@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    for endpoint, words in (
        ("http://no-such-host.invalid:9000", "http://no-such-host.invalid:9000: cannot connect"),
        (proxy.endpoint, "no answer within 0.3 s"),
        ("https://s3.invalid", "export NO_PROXY=s3.invalid, if it should not go by 127.0.0.1"),
    ):
        lines = look(tier_of(rclone, prefix, endpoint=endpoint, request_timeout="300ms"), child)
        assert wrong(lines) == ["endpoint"]
        assert words in f"{lines['endpoint'].words} {lines['endpoint'].fix}"
        assert "password" not in repr(lines)


def test_tls(tmp_path: Path, child: ChildProcess, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No TLS where TLS is spoken; an authority that nobody trusts; then all is ok."""
    certificate, key, authority = make_certificate(tmp_path, "127.0.0.1")
    with TlsRclone(certificate, key) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        endpoint = f"https://127.0.0.1:{server.port}"
        for fields, helps in (({}, False), ({"endpoint": endpoint}, True)):
            lines = look(tier_of(server, prefix, **fields), child)
            assert wrong(lines) == ["endpoint"], lines
            assert ("ca_bundle: " in str(lines["endpoint"].fix)) is helps
        fine = look(tier_of(server, prefix, endpoint=endpoint, ca_bundle=str(authority)), child)
        assert [fine[name].state for name in FINE] == ["ok"] * len(FINE)
