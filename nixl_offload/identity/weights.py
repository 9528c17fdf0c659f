"""The digest of a local model's files. Any byte that changes makes another digest.

Several threads read the files in pieces. A piece is summed with XXH3-128, and SHA-256 makes one digest of all sums and
names. That tells apart accidents, edits and fine-tuning. It does not stop a person who makes two models with one digest
on purpose; a person who can replace the weights of a server decides its answers anyway.

Threading: ``WeightsDigest`` starts daemon threads of its own, which nothing waits for. Any thread may call its methods,
which return at once (``wait`` after its timeout). The threads hold the interpreter for microseconds, twice in every
8 MiB. Files are read through the page cache, where a loader has just left them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import xxhash

from nixl_offload.errors import NamespaceError
from nixl_offload.identity.weights_files import ModelFile, is_local, list_alone, list_files, model_file, unreadable

__all__ = ["WeightsDigest", "digest_of_file", "is_local"]

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 20
"""What one thread sums at a time. Part of the digest: changing it changes them all."""
_BUFFER_BYTES: Final = 8 << 20
"""What a thread reads at a time. While others keep the interpreter busy, it waits 5 ms for it twice per buffer."""
_THREADS_MAX: Final = 4
_PROGRESS_S: Final = 10.0
_SLOW_S: Final = 1.0
_DOMAIN: Final = b"nixl-offload weights 1\0"


class WeightsDigest:
    """The digest of a local model's files, made in the background. It begins at once; ``close`` it in the end."""

    def __init__(self, model: str, *, threads: int | None = None, alone: bool = False) -> None:
        """Begin to read.

        ``model``: a directory, or a file of weights. ``threads``: how many read; by default half of the cores, at most
        4. ``alone``: only the content of the file ``model`` counts, not its name, nor the files beside it.
        """
        self.weight_files = 0
        """How many of the files hold weights, by their names, once ``wait`` has returned True. 0: the weights come from
        somewhere else, or are dummies, and are not in the digest."""
        self._model = model
        self._list = list_alone if alone else list_files
        self._threads = threads or max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // 2))
        self._stop = threading.Event()
        self._done = threading.Event()
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        """What each reading thread ends with; None: there was nothing left to read."""
        self._read_bytes = [0] * self._threads
        self._total_bytes = 0
        self._digest = ""
        self._error: NamespaceError | None = None
        threading.Thread(target=self._run, name="weights-digest", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, good or bad, for ``timeout_s`` at most. Return whether it is there."""
        return self._done.wait(timeout_s)

    def wait_for_result(self) -> str:
        """Wait for the end, and return ``result``."""
        while not self.wait(60.0):
            pass
        return self.result()

    def result(self) -> str:
        """Return the digest, in hex.

        Raises NamespaceError: a file cannot be read, or changed while it was read, or it is not known yet.
        """
        if not self._done.is_set():
            raise NamespaceError(f"the files of {self._model} have not been read yet")
        if self._error is not None:
            raise NamespaceError(str(self._error)) from self._error
        return self._digest

    def progress(self) -> tuple[int, int]:
        """Return how many bytes have been read, and of how many; 0 of 0 while that is not known."""
        return sum(self._read_bytes), self._total_bytes

    def close(self) -> None:
        """Stop reading: threads end after their current read. Idempotent, and without effect at the end."""
        self._ended.put(NamespaceError(f"the files of {self._model} were not read to the end: stopped"))
        self._stop.set()

    def _run(self) -> None:
        try:
            self._digest = self._identify()
        except NamespaceError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - the caller must learn that there is no digest
            self._error = NamespaceError(f"cannot tell which model {self._model} is: {error!r}")
            self._error.__cause__ = error
        finally:
            self._stop.set()
            self._done.set()

    def _identify(self) -> str:
        files = self._list(self._model)
        self.weight_files = sum(file.holds_weights for file in files)
        digests = self._read(files)
        if changed := set(files) ^ set(self._list(self._model)):
            raise _changed(min(changed, key=lambda file: file.name).path)
        whole = hashlib.sha256(_DOMAIN)
        for file in files:
            name = os.fsencode(file.name)
            whole.update(struct.pack("<Q", len(name)) + name + bytes.fromhex(digests[file]))
        return whole.hexdigest()

    def _read(self, files: Sequence[ModelFile]) -> dict[ModelFile, str]:
        """Return the digests of ``files``, by all threads together. Raises NamespaceError, OSError."""
        began_s = time.monotonic()
        self._total_bytes = sum(file.size_bytes for file in files)
        pieces = deque((file, piece) for file in files for piece in range(_count_pieces(file)))
        sums = {file: [b""] * _count_pieces(file) for file in files}
        running = 0
        for number in range(self._threads):
            arguments = (number, pieces, sums)
            reader = threading.Thread(target=self._work, args=arguments, name=f"weights-read-{number}", daemon=True)
            try:
                reader.start()
            except RuntimeError:  # no more threads to be had now
                if not running:
                    raise
                break
            running += 1
        while running:
            try:
                ended = self._ended.get(timeout=_PROGRESS_S)
            except queue.Empty:
                self._log("Reading the files of %s, to know which weights they are", time.monotonic() - began_s)
                continue
            if ended is not None:
                raise ended
            running -= 1
        if time.monotonic() - began_s > _SLOW_S:
            self._log("Read the files of %s, to know which weights they are", time.monotonic() - began_s)
        return {file: hashlib.sha256(b"".join(of_pieces)).hexdigest() for file, of_pieces in sums.items()}

    def _log(self, what: str, passed_s: float) -> None:
        read_bytes, total_bytes = self.progress()
        logger.info(
            what + ": %.1f of %.1f GiB in %.0f s, %.1f GiB/s",
            self._model,
            read_bytes / 2**30,
            total_bytes / 2**30,
            passed_s,
            read_bytes / 2**30 / passed_s,
        )

    def _work(self, number: int, pieces: deque[tuple[ModelFile, int]], sums: dict[ModelFile, list[bytes]]) -> None:
        """Sum pieces until there are none left."""
        try:
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            while not self._stop.is_set():
                try:
                    file, piece = pieces.popleft()
                except IndexError:
                    break
                sums[file][piece] = self._sum(number, file, piece, buffer)
            self._ended.put(None)
        except Exception as error:  # noqa: BLE001 - the caller must learn that there is no digest
            self._ended.put(error)

    def _sum(self, number: int, file: ModelFile, piece: int, buffer: memoryview) -> bytes:
        at, end = piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, file.size_bytes)
        whole = xxhash.xxh3_128()
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if model_file(file.name, file.path, os.fstat(fd)) != file:
                    raise _changed(file.path)
                with contextlib.suppress(OSError):  # it is about readahead: several times as fast from a disk
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while at < end and not self._stop.is_set():
                    got = os.preadv(fd, [buffer[: end - at]], at)
                    if not got:
                        raise _changed(file.path)
                    whole.update(buffer[:got])
                    at += got
                    self._read_bytes[number] += got
                if at == file.size_bytes and os.pread(fd, 1, at):
                    raise _changed(file.path)
            finally:
                os.close(fd)
        except OSError as error:
            raise unreadable(file.path, error) from error
        return whole.digest()


def digest_of_file(path: str) -> str:
    """Return the digest of a file's content, or of all files in a directory that count, in hex. Waits for it.

    Raises NamespaceError: it cannot be read, or changed while it was read.
    """
    return WeightsDigest(path, alone=os.path.isfile(path)).wait_for_result()


def _count_pieces(file: ModelFile) -> int:
    return max(1, -(-file.size_bytes // PIECE_BYTES))


def _changed(path: str) -> NamespaceError:
    return NamespaceError(f"cannot tell which model this is: {path} changed while it was read")
