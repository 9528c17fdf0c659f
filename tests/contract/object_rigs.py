"""What the tests of object movers work with: a mover with memory, and raw access to its objects.

Threading: one test, one thread.
"""

from __future__ import annotations

import secrets

from nixl_offload.config.schema import S3Config
from nixl_offload.movers.base import FileId, Mover, Op, Transfer
from tests.contract.suites.mover_rig import MIB, HostMemory, MemoryRig, extents
from tests.s3.servers import RcloneServer

PREFIX = "kv/a"


def tier_of(server: RcloneServer, **fields: object) -> S3Config:
    """The bucket as a tier; small enough in threads and times for tests."""
    return S3Config.model_validate(server.tier(PREFIX, **{"connections": 8, "request_timeout": "5s", **fields}))


class ObjectRig(MemoryRig):
    """A mover with one region of random memory, and names under ``PREFIX`` that nobody else uses.

    ``server`` keeps its objects as files; None where a test has no objects.
    """

    def __init__(self, mover: Mover, server: RcloneServer | None = None, size_bytes: int = MIB) -> None:
        super().__init__(mover, HostMemory(size_bytes))
        self._server, self._prefix = server, secrets.token_hex(6)

    def name(self, what: str) -> str:
        """A fresh test's own name; objects of one directory, as shards of one key are."""
        return f"suite/{self._prefix}-{what}"

    def store(self, what: str, data: bytes) -> str:
        """Make an object behind the mover's back and return its name."""
        assert self._server is not None
        name = self.name(what)
        self._server.write(f"{PREFIX}/{name}", data)
        return name

    def stored(self, name: str) -> bytes | None:
        """Return an object's bytes, read without the mover; None where there is none."""
        assert self._server is not None
        path = self._server.path(f"{PREFIX}/{name}")
        return path.read_bytes() if path.exists() else None

    def open(self, name: str, length_bytes: int) -> FileId:
        """Name an object in the mover."""
        return self.mover.open_object(name, length_bytes)

    def submit(self, op: Op, offset: int, target: FileId, there: int, length_bytes: int) -> Transfer:
        """Submit one extent between the region and an object."""
        where, place = extents([offset], length_bytes), extents([there], length_bytes)
        return self.mover.submit(op, self.memory_id, where, target, place)

    def move(self, op: Op, offset: int, target: FileId, there: int, length_bytes: int) -> Transfer:
        """Submit one extent and poll until it is final."""
        return self.wait(self.submit(op, offset, target, there, length_bytes))

    def bytes_at(self, offset: int, length_bytes: int) -> bytes:
        """A copy of the region's bytes."""
        return self._memory.read(offset, offset + length_bytes).tobytes()
