"""Every store passes the suite: obstore and boto3 against rclone and moto, and a shared directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.stores.directory import TreeStore
from nixl_offload.stores.select import open_store
from tests.contract.suites.store_suite import StoreRig, StoreSuite
from tests.s3.servers import MotoServer, RcloneServer, S3Server

Client = Literal["obstore", "boto3"]


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

    def __init__(self, server: RcloneServer, client: Client) -> None:
        server.empty()
        self._server = server
        super().__init__(open_store(tier_of(server, "kv/a"), client))

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

    def __init__(self, server: MotoServer, client: Client) -> None:
        self._bucket, self._prefix = server.bucket, f"kv/{next(self.numbers)}"
        self._client = server.client()
        super().__init__(open_store(tier_of(server, self._prefix), client))

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


class TestObstoreRclone(StoreSuite):
    """The control plane's choice."""

    many = 1100

    @pytest.fixture
    def rig(self, rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
        use_credentials_of(rclone, monkeypatch)
        rig = RcloneRig(rclone, "obstore")
        yield rig
        rig.close()


class TestBoto3Rclone(StoreSuite):
    """Where obstore is not installed."""

    many = 1100

    @pytest.fixture
    def rig(self, rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
        use_credentials_of(rclone, monkeypatch)
        rig = RcloneRig(rclone, "boto3")
        yield rig
        rig.close()


class TestObstoreMoto(StoreSuite):
    """A second opinion, by a server that knows ranges and answers as S3 does."""

    @pytest.fixture
    def rig(self, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
        use_credentials_of(moto, monkeypatch)
        rig = MotoRig(moto, "obstore")
        yield rig
        rig.close()


class TestBoto3Moto(StoreSuite):
    """Likewise."""

    @pytest.fixture
    def rig(self, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
        use_credentials_of(moto, monkeypatch)
        rig = MotoRig(moto, "boto3")
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
