"""``https://`` verifies certificates, whatever the environment says: a server that anybody could be gets no request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import StoreError
from nixl_offload.stores.base import Store
from nixl_offload.stores.select import Client, open_store
from nixl_offload.testing.store_suite import read, write

from .servers import BUCKET
from .tls import TlsRclone, make_certificate

LAX = {
    "AWS_ALLOW_INVALID_CERTIFICATES": "true",
    "AWS_ALLOW_HTTP": "true",
    "PYTHONHTTPSVERIFY": "0",
    "AWS_VERIFY_SSL": "false",
}
"""With some of these a client could be had to verify nothing."""
USES: dict[str, Callable[[Store], object]] = {
    "read": lambda store: read(store, "there", 0, 4096),
    "write": lambda store: write(store, "new", b"y"),
    "head": lambda store: store.head("there"),
    "list": lambda store: list(store.list("")),
    "delete": lambda store: store.delete(["there"]),
}


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TlsRclone, Path]]:
    certificate, key, authority = make_certificate(tmp_path, "127.0.0.1")
    with TlsRclone(certificate, key) as server:
        for name, value in {**server.environment, **LAX}.items():
            monkeypatch.setenv(name, value)
        yield server, authority


def open_at(server: TlsRclone, client: Client, ca_bundle: Path | None) -> Store:
    tier = {"kind": "s3", "bucket": BUCKET, "endpoint": f"https://127.0.0.1:{server.port}", "region": "us-east-1"}
    fields = {**tier, "request_timeout": "2s", **({"ca_bundle": str(ca_bundle)} if ca_bundle else {})}
    return open_store(S3Config.model_validate(fields), client)


@pytest.mark.parametrize("client", ["obstore", "boto3"])
def test_a_certificate_that_nobody_vouches_for_is_refused(secured: tuple[TlsRclone, Path], client: Client) -> None:
    """Whatever is asked; the error says what to set. With the authority all of it works."""
    server, authority = secured
    with closing(open_at(server, client, authority)) as store:
        write(store, "there", b"x" * 4096)
        assert read(store, "there", 0, 4096) == b"x" * 4096
    with closing(open_at(server, client, None)) as store:
        for use in USES.values():
            with pytest.raises(StoreError, match="ca_bundle") as caught:
                use(store)
            assert caught.value.cause == "unreachable"
    assert server.objects() == ["there"]
