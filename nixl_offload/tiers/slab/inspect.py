"""What a slab's directory holds: every namespace in it, those of data-parallel engines too, by their durable indexes.

Threading: as ``tiers.inspect``. An inspector works beside a running engine (see ``index_reader``). An index lags behind
the engine by a moment, and a row is believed only as far as the header in the slot agrees. ``delete`` and ``remove``
work under the directory's lock, which a running engine holds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from nixl_offload.chunk.header import HEADER_BYTES, decode_header
from nixl_offload.chunk.shards import LayerCut, ShardPlan, hold
from nixl_offload.errors import ConfigError, FormatError, StoreError, TierError
from nixl_offload.identity.namespace import manifest_fits
from nixl_offload.tiers.inspect import (
    ChunkInfo,
    Inspector,
    NamespaceInfo,
    NamespaceSize,
    ShardInfo,
    printable,
    refuse_anothers_directory,
    require_directory,
)
from nixl_offload.tiers.lock import DirectoryLock, holder_of
from nixl_offload.tiers.slab import other_namespaces
from nixl_offload.tiers.slab.file import rank_file_name
from nixl_offload.tiers.slab.index_reader import IndexReader, IndexRow, drop_rows
from nixl_offload.tiers.slot_places import SlotPlaces
from nixl_offload.types import PAGE_BYTES, Key, key_group

_INDEX_NAME: Final = "index.sqlite"
_DP_NAME: Final = re.compile(r"dp-[0-9]+")
_NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_SLAB_NAME: Final = re.compile(r"rank-([0-9]{5,})\.slab")
_PLACE: Final = re.compile(r"(.+\.slab)@([0-9]{1,18})")
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class _Piece(NamedTuple):
    """A shard in a slot of a rank's slab."""

    rank: int
    offset: int
    """From the begin of the slot."""
    shard: int
    size_bytes: int


class SlabInspector(Inspector):
    """Looks into a slab's directory. Nothing stays open."""

    kind = "slab"
    exclusive: ClassVar[bool] = True
    delete_batch: ClassVar[int] = 64
    """The lock is taken for few chunks at a time: an engine that starts just then waits."""

    def __init__(self, path: str, *, capacity_bytes: int | None) -> None:
        """Raises StoreError where there is no such directory: nothing can be in it."""
        self.base = Path(path)
        self.where = str(self.base)
        self.capacity_bytes = capacity_bytes
        require_directory(self.base)
        self._ranks: dict[str, int] = {}

    def namespaces(self) -> Iterator[NamespaceInfo]:
        """Yield what is there. Raises TierError where the directory cannot be read."""
        self.other_objects = 0
        parts = [
            path.name for path in _children(self.base) if _DP_NAME.fullmatch(path.name) and not os.path.islink(path)
        ]
        for part in ["", *parts]:
            root = self.base / part
            holder = self._holder(part)
            for path in _children(root):
                if not _NAMESPACE_NAME.fullmatch(path.name) or os.path.islink(path) or not os.path.isdir(path):
                    known = path.name == "lock" or path.name.startswith(other_namespaces.SMALL_FILES)
                    self.other_objects += not known and not (not part and _DP_NAME.fullmatch(path.name))
                    continue
                manifest = other_namespaces.read_manifest(path)
                namespace = NamespaceInfo(
                    path.name,
                    manifest if manifest_fits(manifest, path.name[:32]) else None,
                    part=part,
                    used_s=other_namespaces.last_use_s(path),
                    in_use=holder,
                )
                namespace.trouble = self._trouble(namespace)
                yield namespace

    def measure(self, namespace: NamespaceInfo) -> NamespaceSize:
        """Count by the index. Ages are those of the first and the last chunk put, by their headers."""
        if namespace.trouble:
            return NamespaceSize()
        index = self.index(namespace)
        chunks, size_bytes = index.count()
        if namespace.is_cut:
            places, shards, size_bytes = self._places(namespace), 0, 0
            for group in namespace.groups:
                rows, slots_bytes = index.count(group)
                copies = places.replicas.get(slots_bytes // rows, 1) if rows else 1
                shards += len(self._pieces_of(namespace, group)) * rows // copies
                size_bytes += self._slabs(namespace)[0] * slots_bytes // copies
            return NamespaceSize(chunks, shards, size_bytes, *self._ages(namespace, index))
        holders = {len(namespace.holders(group)) for group in namespace.groups} or {
            len(self._ranks_of(namespace, None))
        }
        if len(holders) == 1:
            (ranks,) = holders
            shards, size_bytes = chunks * ranks, size_bytes * ranks
        else:  # a pipeline stage has no layer of some group
            counts = [(len(namespace.holders(group)), *index.count(group)) for group in namespace.groups]
            shards = sum(ranks * rows for ranks, rows, _ in counts)
            size_bytes = sum(ranks * slots_bytes for ranks, _, slots_bytes in counts)
        return NamespaceSize(chunks, shards, size_bytes, *self._ages(namespace, index))

    def chunks(self, namespace: NamespaceInfo) -> Iterator[ChunkInfo]:
        """Yield chunks in the order in which they were put."""
        if namespace.trouble:
            return
        for row in self.index(namespace).rows():
            yield self._chunk(namespace, row)

    def find(self, namespace: NamespaceInfo, digits: str, limit: int) -> Sequence[ChunkInfo]:
        rows = [] if namespace.trouble else self.index(namespace).find(digits, limit)
        return [self._chunk(namespace, row) for row in rows]

    def find_place(self, text: str) -> Sequence[tuple[NamespaceInfo, ChunkInfo, ShardInfo]]:
        """Find the chunk whose slot lies at an offset of a slab: ``PATH.slab@OFFSET``."""
        match = _PLACE.fullmatch(text)
        if match is None:
            return []
        path = os.path.abspath(match[1])
        for namespace in self.namespaces():
            if Path(path).parent == self.base / namespace.path and not namespace.trouble:
                named = _SLAB_NAME.fullmatch(Path(path).name)
                rows = self._rows_around(namespace, int(named[1]) if named else 0, int(match[2]))
                found = [self._chunk(namespace, row) for row in rows]
                place = f"{path}@{match[2]}"
                return [(namespace, chunk, shard) for chunk in found for shard in chunk.shards if shard.place == place]
        return []

    def look_again(self, namespace: NamespaceInfo, chunk: ChunkInfo) -> ChunkInfo | None:
        row = self.index(namespace).get(chunk.key)
        return None if row is None else self._chunk(namespace, row)

    def in_use(self, namespace: NamespaceInfo) -> str | None:
        return self._holder(namespace.part)

    def read_into(self, shard: ShardInfo, offset: int, memory: memoryview) -> None:
        """Read past the page cache where the filesystem allows it."""
        path = shard.place.rpartition("@")[0]
        aligned = not (memory.nbytes | offset | shard.offset) % PAGE_BYTES
        for direct in (os.O_DIRECT, 0) if aligned else (0,):
            try:
                with _opened(path, _READ_FLAGS | direct) as fd:
                    _read_all(fd, shard.offset + offset, memory, path)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:
                    continue
                why = os.strerror(error.errno or 0)
                cause = "missing" if error.errno == errno.ENOENT else "io"
                raise StoreError(f"{path}: cannot read at {shard.offset + offset}: {why}", cause=cause) from error
            return

    def created_s(self, chunk: ChunkInfo) -> float | None:
        """Return what the header of the first rank's shard says, if it is that of this chunk."""
        shard = chunk.shards[0]
        try:
            with _opened(shard.place.rpartition("@")[0], _READ_FLAGS) as fd:
                header = decode_header(os.pread(fd, HEADER_BYTES, shard.offset))
        except (OSError, FormatError):
            return None
        return float(header.created_s) if header.key == chunk.key else None

    def used_bytes(self, namespace: NamespaceInfo | None = None) -> int | None:
        """Return what lies under the directory, ours or not, for that is what the capacity bounds. Raises TierError."""
        # The directory itself may be a link; inside it none is followed.
        directory = self.base.resolve() if namespace is None else self.base / namespace.path
        try:
            return other_namespaces.tree_bytes(directory)
        except OSError as error:
            raise TierError(f"{directory}: cannot be measured: {os.strerror(error.errno or 0)}", cause="io") from error

    def delete(
        self, namespace: NamespaceInfo, chunks: Sequence[tuple[ChunkInfo, Sequence[ShardInfo]]]
    ) -> list[str | None]:
        """Drop index rows, then zero the headers, so that no scan of slots takes them for chunks."""
        try:
            with self._locked([namespace.part]):
                index = self.index(namespace)
                found = [(chunk.version, index.get(chunk.key)) for chunk, _ in chunks]
                rows = [row for version, row in found if row is not None and row.seq == version]
                dropped = {row.key for row in drop_rows(index.path, rows)}
                for chunk, shards in chunks:
                    if chunk.key in dropped:
                        _clear_headers(shards)
        except (ConfigError, TierError) as error:
            words = str(error)
            if isinstance(error, TierError) and error.cause == "locked":
                words = (
                    "left: an engine has the directory open, and finds it bad itself when it loads it; stop the engine "
                    "to delete it now"
                )
            return [words] * len(chunks)
        return [None if chunk.key in dropped else "changed meanwhile, left" for chunk, _ in chunks]

    def remove(self, namespaces: Sequence[NamespaceInfo]) -> list[str | None]:
        try:
            with self._locked([namespace.part for namespace in namespaces]):
                return [self._remove(namespace) for namespace in namespaces]
        except TierError as error:
            if error.cause != "locked":
                raise
            holders = [self._holder(namespace.part) for namespace in namespaces]
            holder = next((holder for holder in holders if holder), "which one is not known")
            raise TierError(
                f"{self.where}: an engine has the directory open ({holder}); stop it, then run this again. "
                "Nothing was deleted.",
                cause="locked",
            ) from error

    def close(self) -> None:
        """Nothing stays open."""

    def index(self, namespace: NamespaceInfo) -> IndexReader:
        """Return the reader of a namespace's index."""
        return IndexReader(self.base / namespace.path / _INDEX_NAME)

    def _remove(self, namespace: NamespaceInfo) -> str | None:
        path = self.base / namespace.path
        used_s = other_namespaces.last_use_s(path)
        if used_s is None or used_s != namespace.used_s:
            return f"{path}: was opened or removed meanwhile, left"
        try:
            other_namespaces.remove(other_namespaces.OtherNamespace(path, 0, used_s))
        except OSError as error:
            return f"{path}: cannot be removed: {os.strerror(error.errno or 0)}"
        return None

    @contextlib.contextmanager
    def _locked(self, parts: Iterable[str]) -> Iterator[None]:
        """Hold the directory's lock, and those of its ``parts``, for seconds at most. Raises TierError, ConfigError.

        A part may be the whole directory of an engine whose ``path`` ends in dp-N: it holds that lock alone.
        """
        refuse_anothers_directory(self.where)
        with contextlib.ExitStack() as held:
            for directory in (self.base, *(self.base / part for part in sorted({*parts} - {""}))):
                lock = DirectoryLock(directory / "lock", brief=True)
                lock.acquire()
                held.callback(lock.release)
            yield

    def _holder(self, part: str) -> str | None:
        """Say which engine has the whole directory, or this part of it; safe to print."""
        holder = holder_of(self.base / "lock") or (holder_of(self.base / part / "lock") if part else None)
        return printable(holder, limit=200)

    def _trouble(self, namespace: NamespaceInfo) -> str | None:
        try:
            self.index(namespace).ends(1)
        except TierError as error:
            return "no index: its chunks are not known" if error.cause == "missing" else str(error)
        return None

    def _ranks_of(self, namespace: NamespaceInfo, group: int | None) -> Sequence[int]:
        """Return the ranks that hold a shard; without a manifest as many as have a slab. ``group`` None: of any."""
        if namespace.ranks is not None:
            return range(namespace.ranks) if group is None else namespace.holders(group)
        if namespace.path not in self._ranks:
            numbers = [_SLAB_NAME.fullmatch(path.name) for path in _children(self.base / namespace.path)]
            self._ranks[namespace.path] = max((int(number[1]) + 1 for number in numbers if number), default=1)
        return range(self._ranks[namespace.path])

    def _slabs(self, namespace: NamespaceInfo) -> tuple[int, tuple[int, ...]]:
        """Return how many ranks the engine has that stored here last, and how many ranges of layers each of its stages
        holds; no rank where the manifest does not tell.
        """
        slab = namespace.manifest.get("slab") if namespace.manifest else None
        if not isinstance(slab, dict):
            return 0, ()
        ranks, stages = slab.get("world_size"), slab.get("stages", [namespace.layer_ranges])
        if type(ranks) is not int or not 0 < ranks < 1 << 16 or not isinstance(stages, list):
            return 0, ()
        if any(type(ranges) is not int or ranges < 0 for ranges in stages):
            return 0, ()
        return ranks, tuple(stages)

    def _places(self, namespace: NamespaceInfo) -> SlotPlaces:
        """Return where slots lie, by the manifest; one that cannot be means a copy on every rank."""
        slab = namespace.manifest.get("slab") if namespace.manifest else None
        found = slab if isinstance(slab, dict) else {}
        extent_bytes, pairs = found.get("extent_bytes"), found.get("replicas", [])
        ranks, _ = self._slabs(namespace)
        try:
            replicas = {int(size): int(number) for size, number in pairs}
        except (TypeError, ValueError, OverflowError):
            replicas = {}
        most = max(replicas.values(), default=1)
        sound = all(size > 0 and number > 0 and most % number == 0 for size, number in replicas.items())
        if type(extent_bytes) is not int or extent_bytes <= 0 or not sound or not ranks or ranks % most:
            return SlotPlaces(1, 1)
        return SlotPlaces(extent_bytes, extent_bytes, replicas)

    def _pieces_of(self, namespace: NamespaceInfo, group: int) -> list[_Piece]:
        """Return where the shards of a chunk lie that is cut, rank by rank; nothing where the manifest cannot be."""
        plan = _plan_of(namespace, *self._slabs(namespace))
        if plan is None or group not in namespace.groups:
            return []
        pieces = []
        for rank in range(plan.ranks):
            offset = 0
            for shard in plan.held(rank, namespace.groups.index(group)):
                size_bytes = namespace.shard_bytes(_a_key(group), shard) or 0
                pieces.append(_Piece(rank, offset, shard, size_bytes))
                offset += size_bytes
        return pieces

    def _rows_around(self, namespace: NamespaceInfo, rank: int, offset: int) -> list[IndexRow]:
        """Return the rows of slots that a shard at ``offset`` of a rank's slab may lie in, which it begins or where it
        follows another.
        """
        index = self.index(namespace)
        places = self._places(namespace)
        begins = {offset}
        for group in namespace.groups if namespace.is_cut else ():
            begins.update(
                offset - piece.offset for piece in self._pieces_of(namespace, group) if piece.offset <= offset
            )
        begins |= {places.name(rank, begin, size) for size in places.replicas for begin in begins}
        return [row for begin in sorted(begins) if (row := index.at(begin)) is not None]

    def _chunk(self, namespace: NamespaceInfo, row: IndexRow) -> ChunkInfo:
        directory = f"{self.where}/{namespace.path}"
        if namespace.is_cut and (pieces := self._pieces_of(namespace, key_group(row.key))):
            places, cut = self._places(namespace), {}
            for piece in pieces:
                rank, begin = piece.rank, row.offset
                if places.replicas:
                    rank, begin = places.find(piece.rank, row.offset, row.slot_bytes)
                offset = begin + piece.offset
                place = f"{directory}/{rank_file_name(rank)}@{offset}"
                cut[place] = ShardInfo(piece.shard, place, piece.size_bytes, offset, None)
            return ChunkInfo(row.key, tuple(cut.values()), row.seq)
        shards = tuple(
            ShardInfo(rank, f"{directory}/{rank_file_name(rank)}@{row.offset}", row.slot_bytes, row.offset, None)
            for rank in self._ranks_of(namespace, key_group(row.key))
        )
        return ChunkInfo(row.key, shards, row.seq)

    def _ages(self, namespace: NamespaceInfo, index: IndexReader) -> tuple[float | None, float | None]:
        """Return when the first and the last chunk were put."""
        ages = [age for rows in index.ends() if (age := self._first_age(namespace, rows)) is not None]
        return min(ages, default=None), max(ages, default=None)

    def _first_age(self, namespace: NamespaceInfo, rows: Sequence[IndexRow]) -> float | None:
        ages = (self.created_s(self._chunk(namespace, row)) for row in rows)
        return next((age for age in ages if age is not None), None)


def _plan_of(namespace: NamespaceInfo, ranks: int, stages: Sequence[int]) -> ShardPlan | None:
    """Return how the ranks of the engine hold shards; None where what the manifest says cannot be."""
    shards, ranges = namespace.ranks or 0, namespace.layer_ranges
    if not shards or not stages or not ranks or shards % ranges or sum(stages) != ranges or ranks % len(stages):
        return None
    per_range, groups = shards // ranges, []
    for group in namespace.groups:
        numbers = namespace.holders(group)
        heads = len({number % per_range for number in numbers})
        held = hold(heads, [heads], ranks // len(stages))
        if held is None:
            return None
        groups.append(replace(held, ranges=tuple(sorted({number // per_range for number in numbers}))))
    of_stages = [range(*ends) for ends in pairwise(accumulate(stages, initial=0))]
    plan = ShardPlan(tuple(groups), LayerCut(tuple(range(ranges)), tuple(of_stages)))
    return plan if groups and plan.per_range == per_range else None


def _a_key(group: int) -> Key:
    return Key(group.to_bytes(4, "big"))


def _children(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TierError(f"{directory}: cannot be listed: {os.strerror(error.errno or 0)}", cause="io") from error


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _read_all(fd: int, offset: int, memory: memoryview, path: str) -> None:
    done = 0
    while done < memory.nbytes:
        got = os.preadv(fd, [memory[done:]], offset + done)
        done += got
        if (done < memory.nbytes and got % PAGE_BYTES) or not got:
            text = f"{path} ends at {offset + done}, {memory.nbytes - done} bytes too early"
            raise StoreError(text, cause="short")


def _clear_headers(shards: Sequence[ShardInfo]) -> None:
    """Overwrite header pages with zeros. What cannot be written is left: without its index row nobody reads it."""
    for shard in shards:
        with (
            contextlib.suppress(OSError),
            _opened(shard.place.rpartition("@")[0], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC) as fd,
        ):
            if os.fstat(fd).st_size >= shard.offset + HEADER_BYTES:
                os.pwrite(fd, bytes(HEADER_BYTES), shard.offset)
