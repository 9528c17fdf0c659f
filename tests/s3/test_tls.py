"""``https://`` verifies certificates, whatever the environment says: a server that anybody could be gets no request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.movers.base import Op, TransferState
from nixl_offload.movers.select import make_object_mover
from nixl_offload.stores.base import Store
from nixl_offload.stores.s3 import open_store
from tests.contract.object_rigs import ObjectRig, tier_of
from tests.contract.suites.store_suite import CALLS, read, write
from tests.s3.proxy import Answer, FaultProxy

from .servers import BUCKET, RcloneServer, TlsRclone, make_certificate, make_contexts

LAX = {
    "AWS_ALLOW_INVALID_CERTIFICATES": "true",
    "AWS_ALLOW_HTTP": "true",
    "PYTHONHTTPSVERIFY": "0",
    "AWS_VERIFY_SSL": "false",
}
"""With some of these a client could be had to verify nothing."""


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TlsRclone, Path]]:
    certificate, key, authority = make_certificate(tmp_path, "127.0.0.1")
    with TlsRclone(certificate, key) as server:
        for name, value in {**server.environment, **LAX}.items():
            monkeypatch.setenv(name, value)
        yield server, authority


def open_at(server: TlsRclone, ca_bundle: Path | None) -> Store:
    tier = {"kind": "s3", "bucket": BUCKET, "endpoint": f"https://127.0.0.1:{server.port}", "region": "us-east-1"}
    fields = {**tier, "request_timeout": "2s", **({"ca_bundle": str(ca_bundle)} if ca_bundle else {})}
    return open_store(S3Config.model_validate(fields))


def test_a_certificate_that_nobody_vouches_for_is_refused(secured: tuple[TlsRclone, Path]) -> None:
    """Whatever is asked; the error says what to set. With the authority all of it works."""
    server, authority = secured
    with closing(open_at(server, authority)) as trusting, closing(open_at(server, None)) as store:
        write(trusting, "x/1", b"x" * 4096)
        for call in CALLS.values():
            with pytest.raises(StoreError, match="ca_bundle") as caught:
                call(store)
            assert caught.value.cause == "unreachable"
        assert read(trusting, "x/1", 0, 4096) == b"x" * 4096


@pytest.mark.parametrize("refusal", [None, Answer(400, "InvalidRequest"), Answer(403, "AccessDenied")])
def test_payloads_are_signed_where_unsigned_ones_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Answer | None
) -> None:
    context, _, authority = make_contexts(tmp_path)
    with RcloneServer() as server, FaultProxy(server.port, tls=context) as proxy:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        if refusal is not None:
            proxy.inject(refusal, operation="PUT", unless="x-amz-content-sha256: [0-9a-f]{64}")
        with closing(open_store(tier_of(server, endpoint=proxy.endpoint, ca_bundle=str(authority)))) as store:
            for number in range(3):
                write(store, f"x/{number}", b"x" * 4096)
                assert read(store, f"x/{number}", 0, 4096) == b"x" * 4096
        unsigned = ["UNSIGNED-PAYLOAD" in head for head in proxy.heads if head.startswith("PUT")]
    assert unsigned == ([True] * 3 if refusal is None else [True, False, False, False])


@pytest.mark.parametrize(
    ("name", "expired", "is_trusted"),
    [
        ("127.0.0.1", False, True),
        ("127.0.0.1", False, False),
        ("other.example", False, True),
        ("127.0.0.1", True, True),
    ],
    ids=["good", "untrusted", "another name", "expired"],
)
def test_nixl_moves_nothing_where_a_certificate_is_not_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, expired: bool, is_trusted: bool
) -> None:
    """The OBJ plugin has a TLS of its own. What it sends does not arrive, what is there does not come."""
    certificate, key, authority = make_certificate(tmp_path, name, expired=expired)
    with TlsRclone(certificate, key) as server:
        for variable, value in {**server.environment, **LAX, "AWS_MAX_ATTEMPTS": "1"}.items():
            monkeypatch.setenv(variable, value)
        fields = {"ca_bundle": str(authority)} if is_trusted else {}
        mover = make_object_mover("obj", tier_of(server, endpoint=f"https://127.0.0.1:{server.port}", **fields))
        with closing(mover):
            rig = ObjectRig(mover, server, 4096)
            there, new, sent = rig.store("there", bytes(4096)), rig.name("new"), rig.memory.tobytes()
            states = {rig.move(Op.WRITE, 0, rig.open(new, 4096), 0, 4096).state}
            arrived = rig.stored(new) is not None
            states.add(rig.move(Op.READ, 0, rig.open(there, 4096), 0, 4096).state)
            came = rig.memory.tobytes() != sent
    is_good = is_trusted and not expired and name == "127.0.0.1"
    assert states == {TransferState.DONE if is_good else TransferState.FAILED}
    assert (arrived, came) == (is_good, is_good)
