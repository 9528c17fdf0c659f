"""Which files of a local model count: all of them, except those in the table below, which cannot change stored bytes.

Threading: functions over the filesystem, safe anywhere.

Directories are walked to the bottom, links followed, for weights do lie below the top: Cosmos3 loads
``[tv]*er/*.safetensors``, Kimi-Audio ``whisper-large-v3/``, MiMo-Audio ``audio_tokenizer/``, the npcache loader
``np/``; a pattern of the sharded_state loader may name any directory, and remote code comes in packages.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from nixl_offload.errors import NamespaceError

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

Tokenizers count: Engram layers make their table from one, and Voxtral reads a delay there.
"""

_WEIGHTS: Final = (".bin", ".ckpt", ".gguf", ".npy", ".pt", ".pth", ".safetensors", ".tensors")
_FILES_MAX: Final = 10_000
"""More files than a model has: the path is that of something else, such as a home directory."""
_GGUF_PART: Final = re.compile(r"(.+)-[0-9]+-of-([0-9]+)\.gguf")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that counts, as it was when it was listed. Two are equal when nothing was written to it in between."""

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
        """Whether its name is that of a file with weights."""
        return self.name.endswith(_WEIGHTS)


def is_local(model: str) -> bool:
    """Whether ``model`` is a file or a directory of this machine, as it is for vLLM, and not a name on a hub."""
    return os.path.isfile(model) or os.path.isdir(model)


def list_files(model: str) -> tuple[ModelFile, ...]:
    """Return the files of a local model that count, ordered by name.

    Raises NamespaceError: one cannot be looked at, is not a regular file, or there are more than a model has.
    """
    found: list[ModelFile] = []
    try:
        for file in _walk(model, "", frozenset()) if os.path.isdir(model) else _parts(model):
            found.append(file)
            if len(found) > _FILES_MAX:
                raise NamespaceError(f"cannot tell which model {model} is: it has more than {_FILES_MAX} files")
    except OSError as error:
        raise unreadable(error.filename or model, error) from error
    return tuple(sorted(found, key=lambda file: os.fsencode(file.name)))


def list_alone(path: str) -> tuple[ModelFile, ...]:
    """Return the file ``path`` without a name, so that its content alone counts. Raises NamespaceError: it cannot be
    looked at, or is not a regular file.
    """
    try:
        return (model_file("", path, os.stat(path)),)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError) -> NamespaceError:
    """Return ``error`` in words."""
    why = os.strerror(error.errno) if error.errno else str(error)
    return NamespaceError(f"cannot tell which model this is: {path}: {why}")


def model_file(name: str, path: str, status: os.stat_result) -> ModelFile:
    """Return what ``status`` says of a file. Raises NamespaceError: it is something else."""
    if not stat.S_ISREG(status.st_mode):
        raise NamespaceError(f"cannot tell which model this is: {path} is not a regular file")
    return ModelFile(name, path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_harmless(name: str) -> bool:
    """Whether a file, or with a slash at the end a directory, of this name does not count."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in HARMLESS)


def _walk(directory: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[ModelFile]:
    status = os.stat(directory)
    identity = (status.st_dev, status.st_ino)
    if identity in above:  # a link to a directory above itself adds nothing
        return
    with os.scandir(directory) as entries:
        for entry in entries:
            name = prefix + entry.name
            if is_harmless(name):
                continue
            if entry.is_file() or (not entry.is_dir() and name.endswith(_WEIGHTS)):
                yield model_file(name, entry.path, entry.stat())
            elif entry.is_dir() and not is_harmless(f"{name}/"):
                yield from _walk(entry.path, f"{name}/", above | {identity})


def _parts(path: str) -> Iterator[ModelFile]:
    """Yield the file and what a loader of GGUF finds beside it: the other parts, the projector of images."""
    directory, own_name = os.path.split(os.path.abspath(path))
    yield model_file(own_name, path, os.stat(path))
    own_part = _GGUF_PART.fullmatch(own_name)
    with os.scandir(directory) as entries:
        for entry in entries:
            part = _GGUF_PART.fullmatch(entry.name)
            beside = own_part is not None and part is not None and part.groups() == own_part.groups()
            beside |= entry.name.endswith(".gguf") and "mmproj" in entry.name
            if beside and entry.name != own_name:
                yield model_file(entry.name, entry.path, entry.stat())
