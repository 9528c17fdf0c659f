"""The kinds of tier that families are tried on, and ways to damage what rests there, group by group.

Threading: one thread. Files are changed behind the engine's back, between its requests.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nixl_offload.chunk.header import HEADER_BYTES, ShardHeader, decode_header
from nixl_offload.errors import FormatError
from tests.s3.servers import RcloneServer
from tests.vllm.harness import tree_tier

TIERS: Final = ("memory", "slab", "shared_dir", "s3")
_PAGE: Final = 4096
_RANK: Final = re.compile(r"rank-(\d+)\.slab$|\.([0-9a-f]{4})$")


@dataclass(frozen=True)
class Shard:
    """A stored chunk: its file, where it lies there, what its header says."""

    path: Path
    offset: int
    header: ShardHeader

    @property
    def rank(self) -> int:
        """Whose it is, as the file's name says."""
        found = _RANK.search(self.path.name)
        assert found is not None
        return int(found[1]) if found[1] else int(found[2], 16)


@dataclass(frozen=True)
class Medium:
    """A tier: its config, and where its files lie."""

    kind: str
    tier: Mapping[str, Any]
    directory: Path | None = None
    """None: there are no files."""
    environment: Mapping[str, str] = field(default_factory=dict)
    forget: Callable[[], None] = lambda: None
    """Makes a server look at its files again."""

    def shards(self) -> list[Shard]:
        """Return what is stored. In a slab that is what looks like a header, at any page."""
        return list(self._shards())

    def flip(self, groups: Collection[int] | None = None, rank: int | None = None) -> int:
        """Flip a bit in the payload of every shard of these KV cache groups, None: of all; return how many. ``rank``:
        of this rank alone.
        """
        return self._change(groups, rank, lambda payload: bytes([payload[0] ^ 1]) + payload[1:])

    def scramble(self, groups: Collection[int] | None = None) -> int:
        """Turn the sign of every number likewise, be they of two bytes or four: what then is used, shows."""
        return self._change(
            groups, None, lambda payload: bytes(byte ^ 0x80 if at % 2 else byte for at, byte in enumerate(payload))
        )

    def _change(self, groups: Collection[int] | None, rank: int | None, damage: Callable[[bytes], bytes]) -> int:
        chosen = [
            shard
            for shard in self._shards()
            if (groups is None or shard.header.group in groups) and rank in (None, shard.rank)
        ]
        for shard in chosen:
            with shard.path.open("r+b", buffering=0) as file:
                begin, length = shard.offset + HEADER_BYTES, shard.header.payload_bytes
                begin += shard.header.first_valid_block * shard.header.block_bytes
                length -= shard.header.first_valid_block * shard.header.block_bytes
                payload = os.pread(file.fileno(), length, begin)
                os.pwrite(file.fileno(), damage(payload), begin)
                os.fsync(file.fileno())
        self.forget()
        return len(chosen)

    def _shards(self) -> Iterator[Shard]:
        assert self.directory is not None
        for path in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            with contextlib.suppress(FileNotFoundError):  # an upload's file is there for a moment
                yield from _shards_in(path)


def _shards_in(path: Path) -> list[Shard]:
    size_bytes = path.stat().st_size
    step = _PAGE if path.suffix == ".slab" else max(_PAGE, size_bytes)
    with path.open("rb", buffering=0) as file:
        pages = ((offset, os.pread(file.fileno(), HEADER_BYTES, offset)) for offset in range(0, size_bytes, step))
        return [Shard(path, offset, header) for offset, page in pages if (header := header_in(page)) is not None]


def header_in(page: bytes) -> ShardHeader | None:
    """Return the header that a page holds; None: it is no header page."""
    try:
        return decode_header(page)
    except FormatError:
        return None


def make_medium(kind: str, scratch: Path, name: str, server: RcloneServer | None = None) -> Medium:
    """Return an empty tier of a kind. ``scratch``: where its files go; ``server``: for ``s3``."""
    if kind == "memory":
        return Medium(kind, {"kind": "memory", "capacity": "128MiB"})
    path = scratch / f"{name}-{kind}"
    if kind == "slab":
        return Medium(kind, {"kind": "slab", "path": str(path), "capacity": "512MiB"}, path)
    if kind == "shared_dir":
        return Medium(kind, {**tree_tier(path), "lookup": {"timeout": "10s"}}, path)
    assert server is not None
    tier = {**server.tier(name, mover="obstore"), "lookup": {"timeout": "10s"}}
    return Medium(kind, tier, server.directory / name, server.environment, server.forget)
