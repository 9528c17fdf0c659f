"""Every store passes the suite: a bucket of rclone's and one of moto's, and a shared directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.stores.directory import TreeStore
from nixl_offload.stores.s3 import open_store
from tests.contract.suites.store_suite import StoreRig, StoreSuite
from tests.s3.servers import MotoServer, RcloneServer, S3Server


@pytest.fixture(scope="module")
def rclone() -> Iterator[RcloneServer]:
    with RcloneServer() as server:
        yield server


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


def tier_of(server: S3Server, prefix: str) -> S3Config:
    return S3Config.model_validate(server.tier(prefix))


class RcloneRig(StoreRig):
    """rclone's bucket is a directory."""

    def __init__(self, server: RcloneServer) -> None:
        server.empty()
        self._server = server
        super().__init__(open_store(tier_of(server, "kv/a")))

    def raw_set(self, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            path = self._server.path(f"kv/a/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self._server.forget()

    def raw_get(self, name: str) -> bytes | None:
        path = self._server.path(f"kv/a/{name}")
        return path.read_bytes() if path.exists() else None


class MotoRig(StoreRig):
    """moto is reached over a client of its own."""

    numbers = iter(range(1_000_000))

    def __init__(self, server: MotoServer) -> None:
        self._bucket, self._prefix = server.bucket, f"kv/{next(self.numbers)}"
        self._client = server.client()
        super().__init__(open_store(tier_of(server, self._prefix)))

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


class TreeRig(StoreRig):
    """A directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        super().__init__(TreeStore(str(directory)))

    def raw_set(self, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def raw_get(self, name: str) -> bytes | None:
        path = self._directory / name
        return path.read_bytes() if path.exists() else None


def use_credentials_of(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


class TestRclone(StoreSuite):
    """A server that answers 200 to a range, and keeps objects as files."""

    many = 1100

    @pytest.fixture
    def rig(self, rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
        use_credentials_of(rclone, monkeypatch)
        rig = RcloneRig(rclone)
        yield rig
        rig.close()


class TestMoto(StoreSuite):
    """A server that knows ranges and answers as S3 does."""

    @pytest.fixture
    def rig(self, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
        use_credentials_of(moto, monkeypatch)
        rig = MotoRig(moto)
        yield rig
        rig.close()


class TestTree(StoreSuite):
    """A shared directory."""

    many = 1100

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[StoreRig]:
        rig = TreeRig(tmp_path / "kv")
        yield rig
        rig.close()
