"""Every store passes the suite: a bucket of rclone's and one of moto's, and a shared directory."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.stores.base import Store
from nixl_offload.stores.directory import TreeStore
from nixl_offload.stores.s3 import open_store
from tests.contract.suites.store_suite import StoreRig, StoreSuite
from tests.s3.servers import MotoServer, RcloneServer, S3Server


def open_at(server: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(S3Config.model_validate(server.tier(prefix)))


class FilesRig(StoreRig):
    """Objects that rest as files: a shared directory's, and rclone's, which answers 200 to a range."""

    def __init__(self, store: Store, directory: Path, server: RcloneServer | None = None) -> None:
        super().__init__(store)
        self._directory, self._server = directory, server

    def raw_set(self, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if self._server is not None:
            self._server.forget()

    def raw_get(self, name: str) -> bytes | None:
        path = self._directory / name
        return path.read_bytes() if path.exists() else None


class MotoRig(StoreRig):
    """A server that knows ranges and answers as S3 does, reached over a client of its own."""

    def __init__(self, store: Store, server: MotoServer, prefix: str) -> None:
        super().__init__(store)
        self._bucket, self._prefix, self._client = server.bucket, prefix, server.client()

    def raw_set(self, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}", Body=content)

    def raw_get(self, name: str) -> bytes | None:
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{name}")["Body"]
        except self._client.exceptions.NoSuchKey:
            return None
        with body:
            return bytes(body.read())

    def close(self) -> None:
        super().close()
        self._client.close()


class TestRclone(StoreSuite):
    """A bucket."""

    many = 1100

    @pytest.fixture
    def made(self, rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> StoreRig:
        rclone.empty()
        return FilesRig(open_at(rclone, "kv/a", monkeypatch), rclone.path("kv/a"), rclone)


class TestMoto(StoreSuite):
    """Another bucket."""

    @pytest.fixture
    def made(self, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> StoreRig:
        prefix = f"kv/{secrets.token_hex(4)}"
        return MotoRig(open_at(moto, prefix, monkeypatch), moto, prefix)


class TestTree(StoreSuite):
    """A directory."""

    many = 1100

    @pytest.fixture
    def made(self, tmp_path: Path) -> StoreRig:
        return FilesRig(TreeStore(str(tmp_path / "kv")), tmp_path / "kv")
