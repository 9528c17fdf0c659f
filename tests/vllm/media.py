"""The tiers that engines store on in tests (memory, a slab, a shared directory, a bucket), and the shards there.

All but memory are files on this machine, a bucket's too. Tests read and damage them without the engines' knowledge.

Threading: one test at a time. Ownership: servers belong to the fixtures that start them, directories to the workshop.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nixl_offload.chunk.header import HEADER_BYTES, ShardHeader, decode_header
from nixl_offload.errors import FormatError, TierError
from nixl_offload.index.durable import IndexReader, Row
from nixl_offload.tiers.shared.naming import parse_shard_name
from tests.prove.happenings import Piece
from tests.s3.servers import RcloneServer
from tests.vllm.harness import chain_config, slab_tier, tree_tier

MOVERS: Final = ("obj", "obstore")
LOOK_EACH_TIME_S: Final = 0.2
LOOKING: Final = {"timeout": "10s", "present_for": f"{int(LOOK_EACH_TIME_S * 1000)}ms", "absent_for": "300ms"}
"""``lookup`` of engines that soon look again for each request; see ``damage.let_beliefs_lapse``."""
REMEMBERING: Final = {"timeout": "10s", "present_for": "1h", "absent_for": "300ms"}


@dataclass(frozen=True)
class Shard(Piece):
    """A stored shard: a file, or a slot of a slab."""

    header: ShardHeader = field(kw_only=True)
    rank: int = field(kw_only=True)
    """The rank that it belongs to, or its number if chunks are cut."""

    @property
    def payload(self) -> bytes:
        """The bytes after the header."""
        return self.read()[HEADER_BYTES : HEADER_BYTES + self.header.payload_bytes]


@dataclass(frozen=True)
class Medium:
    """A tier's config, the place of its files, and the environment of an engine that uses it."""

    name: str
    tier: Mapping[str, Any]
    directory: Path = Path("/nonexistent")
    """Holds the namespaces."""
    environment: Mapping[str, str] = field(default_factory=dict)
    forget: Callable[[], None] = lambda: None
    """Makes a server look at its files again."""

    def config(self, *, lookup: Mapping[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        """Return our config; ``fields`` are further top-level fields."""
        return chain_config({**self.tier, **({"lookup": dict(lookup)} if lookup else {})}, **fields)

    def namespace(self) -> Path:
        """Return the directory of the only namespace."""
        [manifest] = self.directory.glob("*/manifest.json")
        return manifest.parent

    def namespaces(self) -> set[str]:
        """Return the namespaces that hold shards."""
        return {name.partition("/")[0] for name in self.shards()}

    def shards(self) -> list[str]:
        """Return the names of all shards of a directory or bucket, sorted."""
        names = (path.relative_to(self.directory).as_posix() for path in self.directory.rglob("*.*"))
        return sorted(name for name in names if parse_shard_name(name))

    def stored(self, groups: Collection[int] | None = None, rank: int | None = None) -> list[Shard]:
        """Return the stored shards with sound headers, by path and offset: of these KV cache groups, of this rank.

        In a slab, the slots whose headers have the key that the index names.
        """
        found = self._slots() if self.name == "slab" else self._files()
        return [
            shard
            for shard in found
            if (groups is None or shard.header.group in groups) and (rank is None or shard.rank == rank)
        ]

    def real_bytes(self) -> int:
        """Return the space that all files take on the disk."""
        inside = (Path(root, name) for root, names, files in os.walk(self.directory) for name in [*names, *files])
        return sum(path.lstat().st_blocks * 512 for path in inside if os.path.lexists(path))

    def _files(self) -> Iterator[Shard]:
        for name in self.shards():
            parsed, path = parse_shard_name(name), self.directory / name
            assert parsed is not None
            with contextlib.suppress(FileNotFoundError, FormatError):  # an upload may end meanwhile
                yield Shard(path, header=decode_header(Piece(path, 0, HEADER_BYTES).read()), rank=parsed.shard)

    def _slots(self) -> Iterator[Shard]:
        for slab in sorted(self.directory.glob("*/rank-*.slab")):
            for row in _rows(slab.with_name("index.table")):
                with contextlib.suppress(FormatError):
                    header = decode_header(Piece(slab, row.offset, HEADER_BYTES).read())
                    size, rank = HEADER_BYTES + header.payload_bytes, int(slab.stem.removeprefix("rank-"))
                    if header.key == row.key:
                        yield Shard(slab, row.offset, size, header=header, rank=rank)


def _rows(index: Path) -> list[Row]:
    """Return a slab's chunks by offset, once the index no longer changes: an engine writes it within 50 ms."""
    rows: list[Row] | None = None
    while True:
        before, rows = rows, []
        with contextlib.suppress(TierError):  # the index is not there yet, or is being replaced
            rows = sorted(IndexReader(index).rows(), key=lambda row: row.offset)
        if rows == before:
            return rows
        time.sleep(0.15)


def memory(capacity: str = "128MiB") -> Medium:
    """Return a memory tier that stores what is computed."""
    return Medium("memory", {"kind": "memory", "capacity": capacity, "lazy": False})


def slab(path: Path, capacity: str = "512MiB") -> Medium:
    """Return a slab."""
    return Medium("slab", slab_tier(path, capacity), path)


def tree(path: Path, **fields: Any) -> Medium:
    """Return a shared directory; ``fields`` are further fields of the tier."""
    return Medium("tree", tree_tier(path, lookup=REMEMBERING, **fields), path)


def bucket(server: RcloneServer, mover: str, *, prefix: str = "team/kv", **fields: Any) -> Medium:
    """Return a bucket, reached by ``mover``.

    With the last object below a prefix rclone deletes its directory, and forgets what others put there at that moment:
    a rank that deletes its probe would hide another's. So one object stays.
    """
    server.write(f"{prefix}/keeper", b"")
    tier = server.tier(prefix, mover=mover, **{"lookup": REMEMBERING, **fields})
    return Medium(mover, tier, server.directory / prefix, server.environment, server.forget)
