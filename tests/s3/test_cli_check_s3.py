"""``nixl-offload check`` on buckets: what is wrong with each server is told, the fix is applied, the line turns ok.

One process tries the movers of all tests here, as it would cost seconds to start one for each.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_offload.cli.check.child import ChildProcess, memory_room
from nixl_offload.cli.check.findings import Finding
from nixl_offload.cli.check.s3 import look_at_bucket, try_rights
from nixl_offload.cli.main import main
from nixl_offload.config import S3Config, parse_config

from .proxy import Answer, FaultProxy, Flip, Hold
from .servers import MotoServer, RcloneServer, S3Server
from .tls import TlsRclone, make_certificate

FINE = ("endpoint", "credentials", "bucket", "list", "lookup", "put", "get", "bytes", "delete")


@pytest.fixture(scope="module")
def child(rclone: RcloneServer) -> Iterator[ChildProcess]:
    with pytest.MonkeyPatch.context() as patch, closing(ChildProcess()) as process:
        for name, value in rclone.environment.items():
            patch.setenv(name, value)
        process.run(memory_room)
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


def look(tier: S3Config, child: ChildProcess, *, io: bool = False) -> dict[str, Finding]:
    """Return the section's lines; each that is wrong has a fix."""
    found = list(look_at_bucket(tier, child, config_file="kv.yaml", io=io))
    assert all(each.fix for each in found if each.state == "wrong")
    lines = {each.name: each for each in found}
    assert len(lines) == len(found)
    return lines


def wrong(lines: dict[str, Finding]) -> list[str]:
    return [line.name for line in lines.values() if line.state == "wrong"]


def test_a_server_as_it_should_be(rclone: RcloneServer, child: ChildProcess, prefix: str) -> None:
    """All is ok, movers are tried, speeds measured, and nothing of it stays in the bucket."""
    lines = look(tier_of(rclone, prefix, ttl="7d"), child, io=True)
    assert [lines[name].state for name in FINE] == ["ok"] * len(FINE)
    assert lines["credentials"].words == "found by the AWS chain: env"
    assert "MB/s" in lines["speed"].words
    assert lines["lifecycle"].fix == "nixl-offload gc kv.yaml --tier s3 --delete, by a timer", "no rules"
    assert any(line.words.endswith("the one that the server takes") for line in lines.values())
    assert rclone.objects(prefix) == []


def test_a_server_that_is_down(
    tmp_path: Path, child: ChildProcess, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command itself, exit code and all; then the server is started, which is the fix."""
    with RcloneServer() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.stop()
        file = tmp_path / "kv.yaml"
        file.write_text(yaml.safe_dump({"tiers": [server.tier(prefix, mover="obstore")]}))
        out = StringIO()
        monkeypatch.setattr("sys.stdout", out)
        began_s = time.monotonic()
        assert main(["check", "--json", str(file)]) == 1
        assert time.monotonic() - began_s < 30
        (section,) = [each for each in json.loads(out.getvalue())["sections"] if each["kind"] == "s3"]
        (line,) = [each for each in section["findings"] if each["state"] == "wrong"]
        assert line["name"] == "endpoint"
        assert line["words"] == f"http://127.0.0.1:{server.port}: cannot connect (Connection refused)"
        assert line["fix"].startswith("start the server")
        server.start()
        assert look(tier_of(server, prefix), child)["delete"].state == "ok"


def test_a_server_that_forbids_delete(
    rclone: RcloneServer, proxy: FaultProxy, child: ChildProcess, prefix: str
) -> None:
    """What the check could not remove is reported; no mover leaves more behind."""
    tier = tier_of(rclone, prefix, endpoint=proxy.endpoint)
    with proxy.inject(Answer(403, "AccessDenied"), operation="DELETE|DELETE_MANY"):
        lines = look(tier, child, io=True)
    assert wrong(lines) == ["delete"]
    (left,) = rclone.objects(prefix)
    assert f"s3://kv-cache/{left} (4 KiB) of this check stays" in lines["delete"].words
    assert '"Action": "s3:DeleteObject"' in str(lines["delete"].fix)
    assert lines["movers"].state == "unknown"
    assert "speed" not in lines


def rights(tier: S3Config) -> dict[str, Finding]:
    return {found.name: found for found in try_rights(tier, "kv.yaml")}


DENIED = Answer(403, "AccessDenied")


@pytest.mark.parametrize(
    ("fault", "operation", "name", "words"),
    [
        # A right that is missing: its fix names the right.
        (DENIED, "PUT", "put", '"Action": "s3:PutObject"'),
        (DENIED, "GET", "get", '"Action": "s3:GetObject"'),
        (DENIED, "LIST", "list", '"Action": "s3:ListBucket"'),
        # A server in trouble: in our words, with the server's own beside them, and none of botocore's.
        (Answer(503, "SlowDown"), "PUT", "put", "asks to slow down"),
        (Answer(500, "InternalError"), "PUT", "put", "HTTP 500 (InternalError"),
        (Answer(507, "InsufficientCapacity"), "PUT", "put", "the bucket is full: HTTP 507 (InsufficientCapacity"),
        (Flip(at=100), "GET", "bytes", ""),
    ],
)
def test_what_a_server_refuses_or_spoils_is_told_alone(
    rclone: RcloneServer, proxy: FaultProxy, prefix: str, fault: Any, operation: str, name: str, words: str
) -> None:
    """Nothing stays in the bucket, and once the server is well all is ok."""
    tier = tier_of(rclone, prefix, endpoint=proxy.endpoint)
    with proxy.inject(fault, operation=operation):
        lines = rights(tier)
    assert wrong(lines) == [name]
    assert words in f"{lines[name].words} {lines[name].fix}"
    assert wrong(rights(tier)) == []
    assert rclone.objects(prefix) == []


@pytest.fixture
def elsewhere(moto: MotoServer) -> str:
    """A bucket in another region than the one that tests sign for."""
    bucket = f"kv-{secrets.token_hex(4)}"
    with closing(moto.client()) as client:
        client.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    return bucket


def test_a_wrong_region_is_named_with_the_right_one(moto: MotoServer, child: ChildProcess, elsewhere: str) -> None:
    """As S3 does it; the fix works."""
    answer = Answer(400, "AuthorizationHeaderMalformed", more="<Region>eu-central-1</Region>")
    fields = {"bucket": elsewhere, "mover": "obstore", "ttl": "7d"}
    with FaultProxy(moto.port) as proxy, proxy.inject(answer, unless="/eu-central-1/s3/aws4_request"):
        lines = look(tier_of(moto, "kv", endpoint=proxy.endpoint, **fields), child)
        assert wrong(lines) == ["region"]
        assert lines["region"].words == "the bucket is in eu-central-1, and requests are signed for us-east-1"
        assert lines["region"].fix == "region: eu-central-1"
        assert lines["permissions"].state == "unknown"
        fixed = look(tier_of(moto, "kv", endpoint=proxy.endpoint, region="eu-central-1", **fields), child)
        assert wrong(fixed) == []


def test_credentials(
    rclone: RcloneServer, child: ChildProcess, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """None, half of them, a profile that is not there, wrong ones; and none is ever shown."""
    tier = tier_of(rclone, prefix, mover="obstore")
    secret = "never-to-be-seen"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    told = [look(tier, child)]
    assert "SignatureDoesNotMatch" in told[-1]["credentials"].words
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
    told.append(look(tier, child))
    assert "InvalidAccessKeyId" in told[-1]["credentials"].words
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "ours")
    told.append(look(tier, child))
    assert told[-1]["credentials"].words == "cannot be had: ProfileNotFound"
    assert "unset AWS_PROFILE (now ours)" in str(told[-1]["credentials"].fix)
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    told.append(look(tier, child))
    assert told[-1]["credentials"].words.startswith("none found")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", rclone.access_key_id)
    told.append(look(tier, child))
    assert told[-1]["credentials"].words == "cannot be had: PartialCredentialsError"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for lines in told:
        assert wrong(lines) == ["credentials"]
        assert lines["permissions"].state == "unknown"
        said = repr(lines)
        assert secret not in said
        assert "AKIA" not in said
        assert rclone.access_key_id not in said
    file = tmp_path / "credentials"
    keys = f"aws_access_key_id={rclone.access_key_id}\naws_secret_access_key={rclone.secret_access_key}\n"
    file.write_text(f"[ours]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "ours")
    # The mover's process has the credentials that it was started with.
    fine = look(tier, child)
    assert (fine["credentials"].state, "shared-credentials-file" in fine["credentials"].words) == ("ok", True)
    assert wrong(fine) == []


def test_a_bucket_that_is_not_there_and_its_rules(
    moto: MotoServer, child: ChildProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fix is a command, which is run as it stands: bucket and lifecycle rule are there then."""
    file = tmp_path / "kv.yaml"
    fields = {**moto.tier("kv", ttl="7d", mover="obstore"), "bucket": f"kv-{secrets.token_hex(4)}"}
    file.write_text(yaml.safe_dump({"tiers": [fields]}))
    (tier,) = parse_config({"tiers": [fields]}).tiers
    assert isinstance(tier, S3Config)
    lines = look(tier, child)
    assert wrong(lines) == ["bucket"]
    fix = str(lines["bucket"].fix)
    assert fix == "nixl-offload bucket init kv.yaml"
    with closing(moto.client()) as client:
        client.create_bucket(Bucket=tier.bucket)
    assert look(tier, child)["lifecycle"].fix == fix
    assert main([*fix.replace("kv.yaml", str(file)).split()[1:], "--yes"]) == 0
    capsys.readouterr()
    fixed = look(tier, child)
    assert (fixed["bucket"].state, fixed["lifecycle"].state) == ("ok", "ok")
    endless = look(tier.model_copy(update={"ttl_s": None}), child)
    assert endless["growth"].state == "warning"


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
    """No TLS where TLS is spoken; an authority that nobody trusts; no file of authorities; then all is ok."""
    certificate, key, authority = make_certificate(tmp_path, "127.0.0.1")
    with TlsRclone(certificate, key) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        endpoint = f"https://127.0.0.1:{server.port}"
        fields: tuple[dict[str, str], ...] = (
            {},
            {"endpoint": endpoint},
            {"endpoint": endpoint, "ca_bundle": f"{authority}.none"},
        )
        for each in fields:
            lines = look(tier_of(server, prefix, **each), child)
            assert wrong(lines) == ["endpoint"], lines
            assert ("ca_bundle: " in str(lines["endpoint"].fix)) == bool(each)
        fine = look(tier_of(server, prefix, endpoint=endpoint, ca_bundle=str(authority)), child)
        assert [fine[name].state for name in FINE] == ["ok"] * len(FINE)
