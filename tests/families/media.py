"""The kinds of tier that families are tried on, and ways to damage what rests there, group by group.

Threading: one thread. Files are changed behind the engine's back, between its requests.
"""

from __future__ import annotations

import os
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


@dataclass(frozen=True)
class Shard:
    """A stored chunk: its file, where it lies there, what its header says."""

    path: Path
    offset: int
    header: ShardHeader


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

    def flip(self, groups: Collection[int] | None = None) -> int:
        """Flip a bit in the payload of every shard of these KV cache groups, None: of all; return how many."""
        return self._change(groups, lambda payload: bytes([payload[0] ^ 1]) + payload[1:])

    def scramble(self, groups: Collection[int] | None = None) -> int:
        """Turn the sign of every number likewise, be they of two bytes or four: what then is used, shows."""
        return self._change(
            groups, lambda payload: bytes(byte ^ 0x80 if at % 2 else byte for at, byte in enumerate(payload))
        )

    def _change(self, groups: Collection[int] | None, damage: Callable[[bytes], bytes]) -> int:
        chosen = [shard for shard in self._shards() if groups is None or shard.header.group in groups]
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
            step = _PAGE if path.suffix == ".slab" else max(_PAGE, path.stat().st_size)
            with path.open("rb", buffering=0) as file:
                for offset in range(0, path.stat().st_size, step):
                    header = header_in(os.pread(file.fileno(), HEADER_BYTES, offset))
                    if header is not None:
                        yield Shard(path, offset, header)


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
