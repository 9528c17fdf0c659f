"""Copies chunks from a store into a ``WarmTarget``, each verified whole before a byte of it is written.

Threading: the main thread decides; up to ``MAX_CHUNKS`` threads copy a chunk each.
Failure: a shard that is damaged, or that storage does not give, costs its chunk; what was copied stays.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import HEADER_BYTES, Expected, check_header, decode_header, slot_bytes, verify_payload
from nixl_offload.cli.common import Throttle
from nixl_offload.cli.terminal import Progress, about_size, plural
from nixl_offload.cli.warm.source import WholeChunk
from nixl_offload.cli.warm.target import WarmTarget
from nixl_offload.errors import FormatError, StoreError, TierError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key, key_group

MEMORY_BYTES: Final = 512 << 20
"""What the shards in flight may take together; of shards larger than that, one is copied at a time."""
MAX_CHUNKS: Final = 16
FAILURES_IN_A_ROW: Final = 3
"""After so many the storage counts as down."""
_FAILURES_TOLD: Final = 5


@dataclass(slots=True)
class WarmReport:
    """What was done so far, in chunks."""

    total: int = 0
    copied: int = 0
    copied_bytes: int = 0
    present: int = 0
    """Were there already."""
    gone: int = 0
    """Deleted in the source meanwhile."""
    damaged: int = 0
    """Did not verify, and were not copied."""
    failed: int = 0
    no_room: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """By ``newest_first``."""
    failures: list[str] = field(default_factory=list)
    """The first few of what was damaged or failed, in words."""
    gave_up: bool = False
    interrupted: bool = False
    seconds: float = 0.0

    def complain(self, words: str, *, give_up: bool = False) -> None:
        """Keep the first few."""
        if words and len(self.failures) < _FAILURES_TOLD:
            self.failures.append(words)
        self.gave_up |= give_up


class CopyResult(NamedTuple):
    """What became of a chunk."""

    kind: Literal["copied", "present", "gone", "damaged", "failed", "stopped"]
    size_bytes: int = 0
    words: str = ""
    cause: str = ""


class Warming:
    """One run."""

    def __init__(
        self,
        source: Store,
        target: WarmTarget,
        namespace: Namespace,
        bytes_per_s: float | None,
        progress: Progress,
        keys: ChunkKeys | None = None,
    ) -> None:
        """``keys``: what is copied must have a MAC by one of them; None: it needs none."""
        self.report = WarmReport()
        self._source = source
        self._target = target
        self._namespace = namespace
        self._keys = keys
        self._throttle = Throttle(bytes_per_s)
        self._progress = progress
        self._stop = threading.Event()
        self._own = threading.local()
        self._largest = HEADER_BYTES
        self._flight: dict[Future[CopyResult], WholeChunk] = {}
        self._copied: set[Key] = set()
        self._failures_in_a_row = 0
        self._began_s = time.monotonic()

    def run(self, chunks: Sequence[WholeChunk]) -> None:
        """Copy ``chunks`` in their order, until the target is full.

        Raises KeyboardInterrupt after what was in flight has arrived; then and always the target is finished.
        """
        report = self.report
        report.total = len(chunks)
        self._largest = max((chunk.slot_bytes for chunk in chunks), default=HEADER_BYTES)
        threads = max(1, min(MAX_CHUNKS, MEMORY_BYTES // self._largest, len(chunks)))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="nixl-offload-warm")
        try:
            for number, chunk in enumerate(chunks):
                while len(self._flight) >= threads:
                    self._settle_some()
                if report.gave_up:
                    break
                if self._target.has(chunk):
                    report.present += 1
                    continue
                while not (reserved := self._target.reserve(chunk)) and self._flight:
                    self._settle_some()  # a chunk that fails may leave its room
                if not reserved:
                    report.no_room = len(chunks) - number
                    break
                self._flight[pool.submit(self._copy, chunk)] = chunk
            while self._flight:
                self._settle_some()
        except TierError as error:
            report.failed += 1
            report.complain(str(error), give_up=True)
        except KeyboardInterrupt:
            report.interrupted = True
            raise
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)
            for future, chunk in self._flight.items():
                self._settle(chunk, CopyResult("stopped") if future.cancelled() else future.result())
            try:
                self._target.finish([chunk.key for chunk in reversed(chunks) if chunk.key in self._copied])
            except TierError as error:
                report.complain(str(error), give_up=True)
            report.seconds = time.monotonic() - self._began_s

    def _settle_some(self) -> None:
        for future in wait(self._flight, return_when=FIRST_COMPLETED).done:
            self._settle(self._flight.pop(future), future.result())

    def _settle(self, chunk: WholeChunk, result: CopyResult) -> None:
        report, kind = self.report, result.kind
        self._target.settle(chunk, stored=kind == "copied")
        if kind == "stopped":
            return
        setattr(report, kind, getattr(report, kind) + 1)
        if kind == "copied":
            report.copied_bytes += result.size_bytes
            self._copied.add(chunk.key)
        self._failures_in_a_row = self._failures_in_a_row + 1 if kind == "failed" else 0
        down = self._failures_in_a_row >= FAILURES_IN_A_ROW or result.cause in ("full", "readonly", "denied")
        report.complain(result.words, give_up=down)
        done = report.copied + report.present + report.gone + report.damaged + report.failed
        speed = report.copied_bytes / max(time.monotonic() - self._began_s, 0.001)
        self._progress(
            f"{done:,} of {plural(report.total, 'chunk')}, {about_size(report.copied_bytes)} copied, "
            f"{about_size(int(speed))}/s"
        )

    def _copy(self, chunk: WholeChunk) -> CopyResult:
        """Copy what the target lacks of a chunk. Nothing is written that was not verified whole before."""
        moved_bytes, name = 0, ""
        try:
            if not hasattr(self._own, "buffer"):  # this thread's, for one shard, page-aligned
                self._own.buffer = memoryview(mmap.mmap(-1, self._largest))
            missing = self._target.missing_ranks(chunk)
            if not missing:
                return CopyResult("present")
            self._throttle.wait(sum(chunk.sizes[rank] for rank in missing), self._stop)
            for rank in missing:
                if self._stop.is_set():
                    return CopyResult("stopped")
                name = shard_name(self._namespace.name, chunk.key, rank)
                image = self._own.buffer[: chunk.sizes[rank]]
                self._source.read_into(name, 0, image)
                verify_image(image, self._namespace, chunk.key, rank, self._keys)
                self._target.write(chunk, rank, image)
                moved_bytes += chunk.sizes[rank]
        except FormatError as error:
            return CopyResult("damaged", words=f"{name}: {error}")
        except (StoreError, TierError) as error:
            if error.cause == "missing":
                return CopyResult("gone")
            return CopyResult("damaged" if error.cause == "short" else "failed", words=str(error), cause=error.cause)
        except OSError as error:
            return CopyResult("failed", words=f"no memory for a shard of {self._largest} bytes: {error}")
        return CopyResult("copied", moved_bytes)


def verify_image(image: memoryview, namespace: Namespace, key: Key, rank: int, keys: ChunkKeys | None = None) -> None:
    """Raise FormatError unless ``image`` is, whole and in every checksum, the shard of ``key`` that ``rank`` holds.

    ``keys``: it must have a MAC by one of them; None: it needs none.
    """
    page, blocks = image[:HEADER_BYTES], namespace.fields.blocks_per_chunk
    header = decode_header(page)
    check_header(page, Expected(namespace.rank_digest(rank), key, key_group(key), blocks, header.block_bytes))
    if slot_bytes(blocks, header.block_bytes) != image.nbytes:
        words = f"blocks of {header.block_bytes} bytes do not make a shard of {image.nbytes} bytes"
        raise FormatError(words, reason="length")
    verify_payload(header, image[HEADER_BYTES:], header.first_valid_block, header.blocks_per_chunk)
    if keys is not None:
        mac = keys.begin(page)
        begin = HEADER_BYTES + header.first_valid_block * header.block_bytes
        mac.update(image[begin : HEADER_BYTES + header.payload_bytes])
        mac.finish()
