"""What the tests of object movers share: a bucket's raw objects, a directory's, and movers made for them."""

from __future__ import annotations

from pathlib import Path

from nixl_offload.config.schema import S3Config
from nixl_offload.movers.base import Mover
from nixl_offload.movers.nixl import NixlMover
from nixl_offload.movers.nixl_plugins import object_plugin
from nixl_offload.movers.store import StoreMover
from nixl_offload.stores.s3 import open_store
from tests.contract.suites.object_mover_rig import RawObjects
from tests.s3.servers import RcloneServer

PREFIX = "kv/a"


class RawBucket(RawObjects):
    """The objects under ``PREFIX`` as the files that rclone keeps them in."""

    def __init__(self, server: RcloneServer) -> None:
        self._server = server

    def write(self, name: str, data: bytes) -> None:
        self._server.write(f"{PREFIX}/{name}", data)

    def read(self, name: str) -> bytes:
        return self._server.path(f"{PREFIX}/{name}").read_bytes()

    def exists(self, name: str) -> bool:
        return self._server.path(f"{PREFIX}/{name}").exists()


class RawDirectory(RawObjects):
    """Objects that are files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, name: str, data: bytes) -> None:
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def exists(self, name: str) -> bool:
        return (self._directory / name).exists()


def tier_of(server: RcloneServer, **fields: object) -> S3Config:
    """The bucket as a tier; small enough in threads and times for tests."""
    return S3Config.model_validate(server.tier(PREFIX, **{"connections": 8, "request_timeout": "5s", **fields}))


def bare_mover(name: str, tier: S3Config) -> Mover:
    """A mover by its name in the config, with its limits and without retries of ours."""
    if name == "obj":
        return NixlMover(object_plugin(tier), close_timeout_s=tier.request_timeout_s)
    return StoreMover(open_store(tier), threads=tier.connections, close_timeout_s=tier.request_timeout_s)
