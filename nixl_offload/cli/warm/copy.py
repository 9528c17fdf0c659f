"""The hands of ``nixl-offload warm``: reads shards, verifies them, has the target put them in place; many at a time.

Threading: ``copy_all`` runs on the main thread, which alone decides; a few daemon threads carry one chunk each. Nothing
waits for a thread that storage holds up for longer than ``LEAVE_AFTER_S``.
Failure: a shard that is damaged or that storage does not give costs its chunk; what was put in place stays.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from nixl_offload.chunk.header import HEADER_BYTES, Expected, check_header, decode_header, verify_payload
from nixl_offload.chunk.header import slot_bytes as format_slot_bytes
from nixl_offload.cli.verify.judge import Throttle
from nixl_offload.cli.warm.source import Candidate
from nixl_offload.cli.warm.target import Place, Target
from nixl_offload.errors import FormatError, StoreError, TierError
from nixl_offload.identity.namespace import Namespace
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Key, key_group

MEMORY_BYTES: Final = 512 << 20
"""What the shards on their way may take together; with shards larger than that, one at a time."""
MAX_CHUNKS: Final = 16
LEAVE_AFTER_S: Final = 15.0
"""After an interruption or a failure: how long what is on its way may take to arrive."""
FAILURES_IN_A_ROW: Final = 3
"""After so many the storage is taken to be down."""
_FAILURES_TOLD: Final = 5

Kind = Literal["copied", "present", "gone", "damaged", "failed", "stopped"]
Report = Callable[["Copied"], None]


class _Ended(NamedTuple):
    """What became of a chunk."""

    place: Place
    kind: Kind
    size_bytes: int
    words: str = ""
    cause: str = ""


@dataclass(slots=True)
class Copied:
    """What was done so far, in chunks."""

    total: int = 0
    copied: int = 0
    copied_bytes: int = 0
    present: int = 0
    """Were there already."""
    gone: int = 0
    """Deleted in the source meanwhile, or never there."""
    damaged: int = 0
    """Would not verify: not copied."""
    failed: int = 0
    no_room: int = 0
    failures: list[str] = field(default_factory=list)
    """The first few of what was damaged or failed, in words."""
    gave_up: bool = False
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Chunks that need not be looked at any more."""
        return self.copied + self.present + self.gone + self.damaged + self.failed

    def complain(self, words: str) -> None:
        """Keep the first few."""
        if len(self.failures) < _FAILURES_TOLD:
            self.failures.append(words)


def copy_all(
    store: Store,
    target: Target,
    namespace: Namespace,
    candidates: Sequence[Candidate],
    copied: Copied,
    *,
    throttle: Throttle,
    report: Report,
) -> None:
    """Copy ``candidates`` in their order, until the target is full; writes down in ``copied`` as it goes.

    Raises KeyboardInterrupt after what was on its way has arrived; then and always the target is finished.
    """
    began_s = time.monotonic()
    copied.total = len(candidates)
    largest = max((candidate.slot_bytes for candidate in candidates), default=HEADER_BYTES)
    threads = max(1, min(MAX_CHUNKS, MEMORY_BYTES // largest, len(candidates)))
    crew = _Crew(store, target, namespace, throttle, largest, threads)
    main = _Main(target, copied, crew, report)
    try:
        main.run(candidates)
    except KeyboardInterrupt:
        copied.interrupted = True
        crew.stop.set()
        with contextlib.suppress(KeyboardInterrupt):
            main.drain()
        raise
    finally:
        crew.close()
        try:
            target.finish([each.key for each in reversed(candidates) if each.key in main.keys])
        except TierError as error:
            copied.complain(str(error))
            copied.gave_up = True
        copied.seconds = time.monotonic() - began_s


class _Main:
    """Decides which chunk goes next, and takes note of how each ended."""

    def __init__(self, target: Target, copied: Copied, crew: _Crew, report: Report) -> None:
        self._target = target
        self._copied = copied
        self._crew = crew
        self._report = report
        self._failures_in_a_row = 0
        self.keys: set[Key] = set()
        """Copied."""

    def run(self, candidates: Sequence[Candidate]) -> None:
        for number, candidate in enumerate(candidates):
            while self._crew.busy >= self._crew.threads:
                self._take()
            if self._over():
                break
            if self._target.has(candidate):
                self._copied.present += 1
                self._report(self._copied)
                continue
            place = self._begin(candidate)
            if self._over():
                break
            if place is None:
                self._copied.no_room = len(candidates) - number
                break
            self._crew.carry(place)
        while self._crew.busy:
            self._take()

    def drain(self) -> None:
        """Take what still arrives."""
        end_s = time.monotonic() + LEAVE_AFTER_S
        while self._crew.busy and time.monotonic() < end_s:
            self._take(max(0.0, end_s - time.monotonic()))

    def _over(self) -> bool:
        return self._copied.gave_up

    def _begin(self, candidate: Candidate) -> Place | None:
        """Take a place; while others may turn out to need theirs no more, wait for them."""
        while True:
            try:
                place = self._target.begin(candidate)
            except TierError as error:
                self._copied.failed += 1
                self._copied.complain(str(error))
                self._copied.gave_up = True
                return None
            if place is not None or not self._crew.busy:
                return place
            self._take()

    def _take(self, timeout_s: float | None = None) -> None:
        ended = self._crew.ended(timeout_s)
        if ended is None:
            return
        copied, kind = self._copied, ended.kind
        self._target.end(ended.place, stored=kind == "copied")
        if kind == "copied":
            copied.copied += 1
            copied.copied_bytes += ended.size_bytes
            self.keys.add(ended.place.candidate.key)
        elif kind == "present":
            copied.present += 1
        elif kind == "gone":
            copied.gone += 1
        elif kind == "damaged":
            copied.damaged += 1
        elif kind == "failed":
            copied.failed += 1
        if ended.words:
            copied.complain(ended.words)
        self._failures_in_a_row = self._failures_in_a_row + 1 if kind == "failed" else 0
        if self._failures_in_a_row >= FAILURES_IN_A_ROW or ended.cause in ("full", "readonly", "denied"):
            copied.gave_up = True
        self._report(copied)


class _Crew:
    """Threads that carry chunks, each with a buffer for one shard. All but ``_work`` is called by the main thread."""

    def __init__(
        self, store: Store, target: Target, namespace: Namespace, throttle: Throttle, buffer_bytes: int, threads: int
    ) -> None:
        self._store = store
        self._target = target
        self._namespace = namespace
        self._throttle = throttle
        self._orders: queue.SimpleQueue[Place | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.threads = threads
        self.busy = 0
        self._members = [
            threading.Thread(target=self._work, args=(buffer_bytes,), name="nixl-offload-warm", daemon=True)
            for _ in range(threads)
        ]
        for member in self._members:
            member.start()

    def carry(self, place: Place) -> None:
        """Have one more chunk copied."""
        self.busy += 1
        self._orders.put(place)

    def ended(self, timeout_s: float | None) -> _Ended | None:
        """Wait for a chunk to end. None: none did in time."""
        with contextlib.suppress(queue.Empty):
            ended = self._ended.get(timeout=timeout_s)
            self.busy -= 1
            return ended
        return None

    def close(self) -> None:
        """End the threads; one that storage holds up is left behind."""
        self.stop.set()
        for _ in self._members:
            self._orders.put(None)
        end_s = time.monotonic() + (LEAVE_AFTER_S if self.busy else 1.0)
        for member in self._members:
            member.join(max(0.0, end_s - time.monotonic()))

    def _work(self, buffer_bytes: int) -> None:
        try:
            memory = mmap.mmap(-1, buffer_bytes)
        except (OSError, OverflowError, ValueError) as error:
            words = f"no memory for a shard of {buffer_bytes} bytes: {error}"
            while (place := self._orders.get()) is not None:  # the main thread waits for an answer to each
                self._ended.put(_Ended(place, "failed", 0, words))
            return
        with memory as pages, memoryview(pages) as buffer:
            while (place := self._orders.get()) is not None:
                self._ended.put(self._carry(place, buffer))

    def _carry(self, place: Place, buffer: memoryview) -> _Ended:
        """Copy what the target lacks of a chunk. Nothing is put in place that was not verified whole before."""
        sizes, moved_bytes, name = place.candidate.sizes, 0, ""
        try:
            missing = self._target.missing_ranks(place)
            if not missing:
                return _Ended(place, "present", 0)
            self._throttle.wait(sum(sizes[rank] for rank in missing), self.stop)
            for rank in missing:
                if self.stop.is_set():
                    return _Ended(place, "stopped", moved_bytes)
                name = shard_name(self._namespace.name, place.candidate.key, rank)
                with buffer[: sizes[rank]] as image:
                    self._store.read_into(name, 0, image)
                    verify_image(image, self._namespace, place.candidate.key, rank)
                    self._target.write(place, rank, image)
                moved_bytes += sizes[rank]
        except FormatError as error:
            return _Ended(place, "damaged", moved_bytes, f"{name}: {error}")
        except StoreError as error:
            if error.cause == "missing":
                return _Ended(place, "gone", moved_bytes)
            kind: Kind = "damaged" if error.cause == "short" else "failed"
            return _Ended(place, kind, moved_bytes, str(error), error.cause)
        except TierError as error:
            return _Ended(place, "failed", moved_bytes, str(error), error.cause)
        except Exception as error:  # noqa: BLE001 - the main thread waits for an answer, whatever a client raises
            return _Ended(place, "failed", moved_bytes, f"{name}: {error!r}")
        return _Ended(place, "copied", moved_bytes)


def verify_image(image: memoryview, namespace: Namespace, key: Key, rank: int) -> None:
    """Raise FormatError unless ``image`` is, whole and in every checksum, the shard of ``key`` that ``rank`` holds."""
    fields = namespace.fields
    page = image[:HEADER_BYTES]
    header = decode_header(page)
    expected = Expected(namespace.rank_digest(rank), key, key_group(key), fields.blocks_per_chunk, header.block_bytes)
    check_header(page, expected)
    if format_slot_bytes(fields.blocks_per_chunk, header.block_bytes) != image.nbytes:
        raise FormatError(
            f"blocks of {header.block_bytes} bytes do not make a shard of {image.nbytes} bytes", reason="length"
        )
    verify_payload(header, image[HEADER_BYTES:], header.first_valid_block, header.blocks_per_chunk)
