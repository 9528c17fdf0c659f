"""The digest of a local model's files. All of them count, except those in the table below, which cannot change stored
bytes. Any byte that changes makes another digest.

Several threads read the files in pieces. A piece is summed with XXH3-128, and SHA-256 makes one digest of all sums and
names. That detects accidents, edits and fine-tuning. It does not stop a person who makes two models with one digest on
purpose; but a person who can replace the weights of a server decides its answers anyway.

All subdirectories are read, and links are followed, for some models have weights there: Cosmos3 loads
``[tv]*er/*.safetensors``, Kimi-Audio ``whisper-large-v3/``, MiMo-Audio ``audio_tokenizer/``, the npcache loader
``np/``; a pattern of the sharded_state loader may name any directory, and remote code comes in packages.

Threading: functions over the filesystem, safe anywhere. ``digest_files`` waits for daemon threads, which hold the
interpreter for microseconds, twice in every 8 MiB. Files are read through the page cache, where a loader has left them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import re
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import xxhash

from nixl_offload.calls import CallThreads
from nixl_offload.errors import NamespaceError

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 << 20
"""What one thread sums at a time. Changing it changes all digests."""
_BUFFER_BYTES: Final = 8 << 20
"""What a thread reads at a time. If the interpreter is busy, a thread waits 5 ms for it, twice per buffer."""
_THREADS_MAX: Final = 4
_PROGRESS_S: Final = 10.0
_SLOW_S: Final = 1.0
_DOMAIN: Final = b"nixl-offload weights 1\0"

_PROSE: Final = "read by people"
_CHAT: Final = "which text a conversation becomes; keys are made of its token ids"
_TRAINING: Final = "state of a training run, which vLLM's loaders leave out"
_OTHER_RUNTIME: Final = "the same weights in a form that vLLM has no loader for"

HARMLESS: Final = {
    ".*": "hidden: version control, state of downloads",
    "lost+found": "the filesystem's own",
    "*/.*": "hidden, further down",
    "*.pyc": "made by Python from the source beside it",
    "*.md": _PROSE,
    "LICENSE*": _PROSE,
    "NOTICE*": _PROSE,
    "USE_POLICY*": _PROSE,
    "*.gif": _PROSE,
    "*.jpeg": _PROSE,
    "*.jpg": _PROSE,
    "*.mp4": _PROSE,
    "*.pdf": _PROSE,
    "*.png": _PROSE,
    "*.svg": _PROSE,
    "*.webp": _PROSE,
    "*.jinja": _CHAT,
    "chat_template*": _CHAT,
    "checkpoint-[0-9]*/*": "a model of its own, kept by a training run",
    "optimizer.bin": _TRAINING,
    "optimizer.pt": _TRAINING,
    "scaler.pt": _TRAINING,
    "scheduler.pt": _TRAINING,
    "trainer_state.json": _TRAINING,
    "training_args.bin": _TRAINING,
    "coreml/*": _OTHER_RUNTIME,
    "flax_model*.msgpack": _OTHER_RUNTIME,
    "metal/*": _OTHER_RUNTIME,
    "onnx/*": _OTHER_RUNTIME,
    "openvino/*": _OTHER_RUNTIME,
    "original/*": _OTHER_RUNTIME,
    "rust_model.ot": _OTHER_RUNTIME,
    "tf_model*.h5": _OTHER_RUNTIME,
}
"""Patterns of names within the model's directory, and why what they match does not count. ``*`` matches slashes too.

Tokenizers count: Engram layers make their table from one, and Voxtral reads a delay from one.
"""

_WEIGHTS: Final = (".bin", ".ckpt", ".gguf", ".npy", ".pt", ".pth", ".safetensors", ".tensors")
_FILES_MAX: Final = 10_000
"""More files than a model has: the path is something else, such as a home directory."""
_GGUF_PART: Final = re.compile(r"(.+)-[0-9]+-of-([0-9]+)\.gguf")


class FilesDigest(NamedTuple):
    """A digest of the content of files."""

    digest: str
    """In hex."""
    weight_files: int
    """How many of them hold weights, by their names. 0: the weights come from somewhere else, or are dummies, and are
    not in the digest."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that counts, as it was when it was listed. Two are equal if the file was not written to in between."""

    name: str
    """Within the model's directory, with slashes."""
    path: str
    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @property
    def holds_weights(self) -> bool:
        """Whether it holds weights, by its name."""
        return self.name.endswith(_WEIGHTS)

    @property
    def pieces(self) -> int:
        """How many pieces it has; at least one."""
        return max(1, -(-self.size_bytes // PIECE_BYTES))


def is_local(model: str) -> bool:
    """Whether ``model`` is a file or a directory of this machine, as it is for vLLM, and not a name on a hub."""
    return os.path.isfile(model) or os.path.isdir(model)


def digest_of_file(path: str) -> str:
    """Return the digest of a file's content, or of all files in a directory that count. Raises as ``digest_files``."""
    return digest_files(path, alone=os.path.isfile(path)).digest


def digest_files(
    path: str, *, alone: bool = False, threads: int | None = None, stop: threading.Event | None = None
) -> FilesDigest:
    """Read the files of the model at ``path``, a directory or a file of weights, and return their digest.

    ``alone``: only the content of the file ``path`` counts, not its name, nor the files beside it. ``threads``: how
    many read; by default half of the cores, at most 4. ``stop``: set it from another thread to give up soon.

    Raises NamespaceError: a file cannot be read, is not a regular file, or changed while it was read; there are more
    than a model has; or ``stop`` was set.
    """
    try:
        files = list_files(path, alone=alone)
        threads = threads or max(1, min(_THREADS_MAX, len(os.sched_getaffinity(0)) // 2))
        sums = _sums(path, files, threads, stop or threading.Event())
        if changed := set(files) ^ set(list_files(path, alone=alone)):
            raise _changed(min(changed, key=lambda file: file.name).path)
    except NamespaceError:
        raise
    except Exception as error:
        raise NamespaceError(f"cannot tell which model {path} is: {error!r}") from error
    whole = hashlib.sha256(_DOMAIN)
    for file, of_pieces in zip(files, sums, strict=True):
        name = os.fsencode(file.name)
        whole.update(struct.pack("<Q", len(name)) + name + hashlib.sha256(b"".join(of_pieces)).digest())
    return FilesDigest(whole.hexdigest(), sum(file.holds_weights for file in files))


def list_files(path: str, *, alone: bool = False) -> tuple[ModelFile, ...]:
    """Return the files of a local model that count, ordered by name; ``alone``: the one at ``path``, without a name.

    Raises NamespaceError: one cannot be looked at, is not a regular file, or there are more than a model has.
    """
    found: list[ModelFile] = []
    try:
        if alone:
            return (_model_file("", path, os.stat(path)),)
        for file in _walk(path, "", frozenset()) if os.path.isdir(path) else _parts(path):
            found.append(file)
            if len(found) > _FILES_MAX:
                raise NamespaceError(f"cannot tell which model {path} is: it has more than {_FILES_MAX} files")
    except OSError as error:
        raise _unreadable(error.filename or path, error) from error
    return tuple(sorted(found, key=lambda file: os.fsencode(file.name)))


def _walk(directory: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[ModelFile]:
    status = os.stat(directory)
    identity = (status.st_dev, status.st_ino)
    if identity in above:  # a link to a directory above itself adds nothing
        return
    with os.scandir(directory) as entries:
        for entry in entries:
            name = prefix + entry.name
            if _is_harmless(name):
                continue
            if entry.is_file() or (not entry.is_dir() and name.endswith(_WEIGHTS)):
                yield _model_file(name, entry.path, entry.stat())
            elif entry.is_dir() and not _is_harmless(f"{name}/"):
                yield from _walk(entry.path, f"{name}/", above | {identity})


def _is_harmless(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in HARMLESS)


def _parts(path: str) -> Iterator[ModelFile]:
    """Yield the file and those that a GGUF loader finds beside it: the other parts, and the image projector."""
    directory, own_name = os.path.split(os.path.abspath(path))
    yield _model_file(own_name, path, os.stat(path))
    own_part = _GGUF_PART.fullmatch(own_name)
    with os.scandir(directory) as entries:
        for entry in entries:
            part = _GGUF_PART.fullmatch(entry.name)
            beside = own_part is not None and part is not None and part.groups() == own_part.groups()
            beside |= entry.name.endswith(".gguf") and "mmproj" in entry.name
            if beside and entry.name != own_name:
                yield _model_file(entry.name, entry.path, entry.stat())


def _model_file(name: str, path: str, status: os.stat_result) -> ModelFile:
    if not stat.S_ISREG(status.st_mode):
        raise NamespaceError(f"cannot tell which model this is: {path} is not a regular file")
    return ModelFile(name, path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _sums(model: str, files: Sequence[ModelFile], threads: int, stop: threading.Event) -> list[list[bytes]]:
    """Return the sums of each file's pieces. Raises NamespaceError."""
    sums = [[b""] * file.pieces for file in files]
    left = deque((at, file, piece) for at, file in enumerate(files) for piece in range(file.pieces))
    total_bytes, began_s = sum(file.size_bytes for file in files), time.monotonic()

    def work() -> None:
        """Sum pieces until there are none left."""
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while not stop.is_set():
            try:
                at, file, piece = left.popleft()
            except IndexError:
                break
            sums[at][piece] = _sum(file, piece, buffer, stop)

    def log(what: str) -> None:
        passed_s, read_bytes = time.monotonic() - began_s, max(0, total_bytes - len(left) * PIECE_BYTES)
        speed, gib = read_bytes / 2**30 / passed_s, (read_bytes / 2**30, total_bytes / 2**30)
        logger.info(
            "%s the files of %s, to know which weights they are: %.1f of %.1f GiB in %.0f s, %.1f GiB/s",
            *(what, model, *gib, passed_s, speed),
        )

    with closing(CallThreads("weights-read", threads)) as pool:
        calls: set[Future[None]] = {pool.start(work) for _ in range(threads)}
        try:
            while calls and not stop.is_set():
                ended, calls = wait(calls, _PROGRESS_S, FIRST_EXCEPTION)
                for call in ended:
                    call.result()
                if calls:
                    log("Reading")
                    pool.keep_up()
        finally:
            left.clear()
    if stop.is_set():
        raise NamespaceError(f"the files of {model} were not read to the end: stopped")
    if time.monotonic() - began_s > _SLOW_S:
        log("Read")
    return sums


def _sum(file: ModelFile, piece: int, buffer: memoryview, stop: threading.Event) -> bytes:
    at, end = piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, file.size_bytes)
    whole = xxhash.xxh3_128()
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _model_file(file.name, file.path, os.fstat(fd)) != file:
                raise _changed(file.path)
            with suppress(OSError):  # only a hint for readahead: several times as fast from a disk
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while at < end and not stop.is_set():
                got = os.preadv(fd, [buffer[: end - at]], at)
                if not got:
                    raise _changed(file.path)
                whole.update(buffer[:got])
                at += got
            if at == file.size_bytes and os.pread(fd, 1, at):
                raise _changed(file.path)
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(file.path, error) from error
    return whole.digest()


def _unreadable(path: str, error: OSError) -> NamespaceError:
    why = os.strerror(error.errno) if error.errno else str(error)
    return NamespaceError(f"cannot tell which model this is: {path}: {why}")


def _changed(path: str) -> NamespaceError:
    return NamespaceError(f"cannot tell which model this is: {path} changed while it was read")
