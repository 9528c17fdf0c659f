"""Every mover of objects passes the suite, bare and as ``open_object_mover`` hands it out.

Against rclone's S3 server: NIXL's OBJ plugin, and our own threads over obstore.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nixl_offload.movers.base import Mover
from nixl_offload.movers.select_object import make_mover
from tests.contract.suites.object_mover_rig import RawObjects
from tests.contract.suites.object_mover_suite import ObjectMoverSuite
from tests.s3.servers import RcloneServer

from .object_rigs import PREFIX, RawBucket, bare_mover, tier_of


@pytest.fixture(scope="module")
def rclone() -> Iterator[RcloneServer]:
    with RcloneServer() as server:
        server.make_directories(f"{PREFIX}/suite")
        yield server


class _BucketSuite(ObjectMoverSuite):
    mover: str

    @pytest.fixture(autouse=True)
    def _server(self, rclone: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in rclone.environment.items():
            monkeypatch.setenv(name, value)
        self.server = rclone

    def make_mover(self) -> Mover:
        return bare_mover(self.mover, tier_of(self.server))

    def raw(self) -> RawObjects:
        return RawBucket(self.server)


class _AsHandedOut(_BucketSuite):
    def make_mover(self) -> Mover:
        return make_mover(self.mover, tier_of(self.server))


class TestObj(_BucketSuite):
    """NIXL's plugin, one object per transfer."""

    mover = "obj"
    tells_missing = False


class TestObjHandedOut(_AsHandedOut):
    """NIXL's plugin of any size, which reads again and asks what is missing."""

    mover = "obj"


class TestObstore(_BucketSuite):
    """Threads over obstore."""

    mover = "obstore"


class TestObstoreHandedOut(_AsHandedOut):
    """Threads over obstore, of any size."""

    mover = "obstore"
