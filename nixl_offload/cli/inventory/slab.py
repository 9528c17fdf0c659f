"""What a slab's directory holds: every namespace in it, those of data-parallel engines too, by their durable indexes.

Threading: as ``inventory``. Looks beside a running engine: see ``inventory_index`` for what that means. An index lags
behind the engine by a moment, and a row is believed only as far as the slot's own header agrees.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final

from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.cli.gc.collect import shown
from nixl_offload.cli.inventory.base import Chunk, Held, Inventory, Measure, Shard
from nixl_offload.cli.inventory.index import IndexReader, IndexRow
from nixl_offload.config import SlabConfig
from nixl_offload.errors import FormatError, StoreError, TierError
from nixl_offload.identity.namespace import manifest_fits
from nixl_offload.tiers.lock import holder_of
from nixl_offload.tiers.slab import other_namespaces
from nixl_offload.tiers.slab.file import rank_file_name
from nixl_offload.types import PAGE_BYTES, key_group

_INDEX_NAME: Final = "index.sqlite"
_DP_NAME: Final = re.compile(r"dp-[0-9]+")
_NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_SLAB_NAME: Final = re.compile(r"rank-([0-9]{5,})\.slab")


class SlabInventory(Inventory):
    """A slab tier."""

    kind = "slab"
    locks: ClassVar[bool] = True

    def __init__(self, tier: SlabConfig) -> None:
        """Raises StoreError where there is no such directory: nothing can be in it."""
        self.base = Path(tier.path)
        self.where = str(self.base)
        self.capacity_bytes = tier.capacity_bytes
        require_directory(self.base)
        self._ranks: dict[str, int] = {}

    def namespaces(self) -> Iterator[Held]:
        """See Inventory. Raises TierError where the directory cannot be read."""
        self.foreign = 0
        for part in self._parts():
            root = self.base / part
            holder = shown_holder(self.base) or (shown_holder(root) if part else None)
            for path in _children(root):
                if not _NAMESPACE_NAME.fullmatch(path.name) or os.path.islink(path) or not os.path.isdir(path):
                    known = path.name == "lock" or path.name.startswith(other_namespaces.SMALL_FILES)
                    self.foreign += not known and not (not part and _DP_NAME.fullmatch(path.name))
                    continue
                manifest = other_namespaces.read_manifest(path)
                held = Held(
                    path.name,
                    manifest if manifest_fits(manifest, path.name[:32]) else None,
                    part=part,
                    used_s=other_namespaces.last_use_s(path),
                    in_use=holder,
                )
                held.trouble = self._trouble(held)
                yield held

    def measure(self, held: Held) -> Measure:
        """See Inventory. Ages are those of the first and the last chunk put, by their headers."""
        if held.trouble:
            return Measure(0, 0, 0, None, None)
        index = self.index(held)
        chunks, size_bytes = index.count()
        holders = {len(held.holders(group)) for group in held.groups} or {len(self._ranks_of(held, None))}
        if len(holders) == 1:
            (ranks,) = holders
            shards, size_bytes = chunks * ranks, size_bytes * ranks
        else:  # a pipeline stage has no layer of some group
            counts = [(len(held.holders(group)), *index.count(group)) for group in held.groups]
            shards = sum(ranks * rows for ranks, rows, _ in counts)
            size_bytes = sum(ranks * slots_bytes for ranks, _, slots_bytes in counts)
        ages = [age for some in index.ends() if (age := self._first_age(held, some)) is not None]
        return Measure(chunks, shards, size_bytes, min(ages, default=None), max(ages, default=None))

    def chunks(self, held: Held, after: str = "") -> Iterator[Chunk]:
        """See Inventory. The first put comes first."""
        if held.trouble:
            return
        for row in self.index(held).rows(int(after or 0)):
            yield self._chunk(held, row)

    def find(self, held: Held, digits: str, limit: int) -> Sequence[Chunk]:
        """See Inventory."""
        return [] if held.trouble else [self._chunk(held, row) for row in self.index(held).find(digits, limit)]

    def at(self, path: str, offset: int) -> tuple[Held, Chunk] | None:
        """Return the chunk whose slot lies at ``offset`` of the slab ``path``."""
        for held in self.namespaces():
            if Path(path).parent == self.base / held.path and not held.trouble:
                row = self.index(held).at(offset)
                if row is not None:
                    return held, self._chunk(held, row)
        return None

    def look_again(self, held: Held, chunk: Chunk) -> Chunk | None:
        """See Inventory."""
        row = self.index(held).get(chunk.key)
        return None if row is None else self._chunk(held, row)

    def in_use(self, held: Held) -> str | None:
        """Say which engine has the namespace's directory open at this moment."""
        return shown_holder(self.base) or (shown_holder(self.base / held.part) if held.part else None)

    def read_into(self, shard: Shard, offset: int, memory: memoryview) -> None:
        """See Inventory. Leaves the page cache alone where the filesystem lets it."""
        path = shard.place.rpartition("@")[0]
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        aligned = not (memory.nbytes | offset | shard.offset) % PAGE_BYTES
        for direct in (os.O_DIRECT, 0) if aligned else (0,):
            try:
                fd = os.open(path, flags | direct)
                try:
                    _read_all(fd, shard.offset + offset, memory, path)
                finally:
                    os.close(fd)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    continue
                why = os.strerror(error.errno or 0)
                cause = "missing" if error.errno == errno.ENOENT else "io"
                raise StoreError(f"{path}: cannot read at {shard.offset + offset}: {why}", cause=cause) from error
            return

    def created_s(self, chunk: Chunk) -> float | None:
        """See Inventory. From the header of the first rank's shard, if it is that of this chunk."""
        path, at = chunk.shards[0].place.rpartition("@")[0], chunk.shards[0].offset
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            header = decode_header(os.pread(fd, HEADER_BYTES, at))
        except (OSError, FormatError):
            return None
        finally:
            os.close(fd)
        return float(header.created_s) if header.key == chunk.key else None

    def used_bytes(self) -> int | None:
        """See Inventory. All that lies on the disk under the directory, for that is what the capacity bounds."""
        return _bytes_under(self.base.resolve())  # the directory itself may be a link; in it none is followed

    def bytes_of(self, held: Held) -> int:
        """Return what a namespace takes on the disk. Raises TierError."""
        return _bytes_under(self.base / held.path)

    def close(self) -> None:
        """See Inventory. Nothing stays open."""

    def index(self, held: Held) -> IndexReader:
        """Return the reader of a namespace's index."""
        return IndexReader(self.base / held.path / _INDEX_NAME)

    def _parts(self) -> list[str]:
        return ["", *sorted(path.name for path in _children(self.base) if _DP_NAME.fullmatch(path.name))]

    def _trouble(self, held: Held) -> str | None:
        try:
            self.index(held).ends(1)
        except TierError as error:
            return "no index: its chunks are not known" if error.cause == "missing" else str(error)
        return None

    def _ranks_of(self, held: Held, group: int | None) -> Sequence[int]:
        """Return the ranks that hold a shard; without a manifest as many as have a slab. ``group`` None: of any."""
        if held.ranks is not None:
            return range(held.ranks) if group is None else held.holders(group)
        if held.path not in self._ranks:
            numbers = [_SLAB_NAME.fullmatch(path.name) for path in _children(self.base / held.path)]
            self._ranks[held.path] = max((int(number[1]) + 1 for number in numbers if number), default=1)
        return range(self._ranks[held.path])

    def _chunk(self, held: Held, row: IndexRow) -> Chunk:
        directory = f"{self.where}/{held.path}"
        shards = tuple(
            Shard(rank, f"{directory}/{rank_file_name(rank)}@{row.offset}", row.slot_bytes, row.offset, None)
            for rank in self._ranks_of(held, key_group(row.key))
        )
        return Chunk(row.key, shards, str(row.seq))

    def _first_age(self, held: Held, rows: Sequence[IndexRow]) -> float | None:
        ages = (self.created_s(self._chunk(held, row)) for row in rows)
        return next((age for age in ages if age is not None), None)


def require_directory(path: Path) -> None:
    """Raise StoreError where there is no directory: nothing can be in it."""
    if path.is_dir():
        return
    cause = "missing" if path.parent.is_dir() else "unreachable"
    if path.exists():
        raise StoreError(f"{path}: is no directory; say another path in the config", cause="unreachable")
    first = " The first server makes it." if cause == "missing" else ""
    raise StoreError(f"{path}: there is no such directory; is the filesystem mounted?{first}", cause=cause)


def shown_holder(root: Path) -> str | None:
    """Say which engine has the directory ``root`` to itself, safe to print; None: none."""
    return shown(holder_of(root / "lock"), limit=200)


def _bytes_under(directory: Path) -> int:
    try:
        return other_namespaces.tree_bytes(directory)
    except OSError as error:
        raise TierError(f"{directory}: cannot be measured: {os.strerror(error.errno or 0)}", cause="io") from error


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TierError(f"{directory}: cannot be listed: {os.strerror(error.errno or 0)}", cause="io") from error


def _read_all(fd: int, offset: int, memory: memoryview, path: str) -> None:
    done = 0
    while done < memory.nbytes:
        got = os.preadv(fd, [memory[done:]], offset + done)
        done += got
        if (done < memory.nbytes and got % PAGE_BYTES) or not got:
            text = f"{path} ends at {offset + done}, {memory.nbytes - done} bytes too early"
            raise StoreError(text, cause="short")
