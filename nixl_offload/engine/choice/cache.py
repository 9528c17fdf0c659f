"""Choices beside the data: a small JSON file for each machine, shape and setting, written whole or not at all.

Threading: functions without state; several processes at once. Anybody may have written what is read here: a file that
is damaged, of another machine or too old counts for nothing and is written anew. Nothing here raises for storage.

    <directory>/.mover-choice-<digest>.json      a choice
    <directory>/.mover-choice.lock               held by the rank that measures
    <directory>/.mover-choice-<random>.scratch   what is measured with; it loses its name before it is written

Names begin with a dot, so a tree does not list them and gc leaves them alone; slabs count them as small files of their
own (``tiers.foreign``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nixl_offload.engine.choice.base import Candidate, Choice, Shape
from nixl_offload.engine.choice.machine import Fingerprint, digest_of
from nixl_offload.engine.image import Way
from nixl_offload.tiers.slab.other_namespaces import MOVER_CHOICE_PREFIX

logger = logging.getLogger(__name__)

LIFETIME_S: Final = 7 * 86_400.0
"""Then it is measured again: drives age and fill up, and firmware changes unseen."""
UNFINISHED_LIFETIME_S: Final = 60.0
"""Of a choice among candidates that were not all measured: it serves the ranks that start now."""
_AHEAD_S: Final = 300.0
"""Clocks of machines that share a directory may differ by so much."""
_FORGOTTEN_S: Final = 30 * 86_400.0
"""Choices that nobody has renewed for so long are of machines or models that are gone."""
_LEFT_S: Final = 300.0
"""Scratch files and drafts that still have a name after so long were left by a process that was killed."""
_MAX_BYTES: Final = 1 << 16
_VERSION: Final = 1

_CHOICE: Final = re.compile(re.escape(MOVER_CHOICE_PREFIX) + r"-[0-9a-f]{32}\.json")
_LEFTOVER: Final = re.compile(
    re.escape(MOVER_CHOICE_PREFIX) + r"-[0-9a-f-]+\.(?:scratch|tmp)|\.mover-probe-[a-z0-9_]{8}"
)

_Speed = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(max_length=4096)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Shape(_Model):
    slot_bytes: int = Field(gt=0)
    piece_bytes: int = Field(ge=0)


class _Candidate(_Model):
    mover: _Text
    way: Way
    ok: bool
    reason: _Text
    read_bytes_s: _Speed
    write_bytes_s: _Speed


class _Document(_Model):
    version: Literal[1]
    measured_at: _Speed
    finished: bool
    mover: _Text
    way: Way
    reason: _Text
    shape: _Shape
    candidates: Annotated[list[_Candidate], Field(max_length=32)]
    machine: dict[_Text, _Text]


@dataclass(frozen=True, slots=True)
class CachedChoice:
    """A choice as it lies in a directory."""

    path: str
    choice: Choice
    shape: Shape
    machine: Fingerprint
    """All that it was measured with, by name."""
    age_s: float
    """Negative where another machine's clock is ahead."""
    current: bool
    """Young enough to be used, by a start with the same ``machine``."""


def choice_path(directory: str, machine: Fingerprint) -> str:
    """Return the file of the choice for ``machine``."""
    return os.path.join(directory, f"{MOVER_CHOICE_PREFIX}-{digest_of(machine)}.json")


def lock_path(directory: str) -> Path:
    """Return the file that the rank which measures holds a lock on."""
    return Path(directory) / f"{MOVER_CHOICE_PREFIX}.lock"


def new_scratch_path(directory: str) -> str:
    """Return a name that nobody uses."""
    return os.path.join(directory, f"{MOVER_CHOICE_PREFIX}-{secrets.token_hex(8)}.scratch")


def read_choice(directory: str, machine: Fingerprint) -> Choice | None:
    """Return the choice for ``machine`` if there is one that may be used."""
    found = _read(choice_path(directory, machine), time.time())
    return found.choice if found and found.current and found.machine == machine else None


def read_cached(directory: str) -> list[CachedChoice]:
    """Return all choices in a tier's directory that can be read, old ones too."""
    try:
        with os.scandir(directory) as entries:
            paths = sorted(entry.path for entry in entries if _CHOICE.fullmatch(entry.name))
    except OSError:
        return []
    now_s = time.time()
    return [found for path in paths if (found := _read(path, now_s))]


def write_choice(directory: str, machine: Fingerprint, shape: Shape, choice: Choice, *, finished: bool) -> None:
    """Keep a choice, if it can be written. ``finished``: whether all that can run was measured."""
    document = _Document(
        version=_VERSION,
        measured_at=choice.measured_at,
        finished=finished,
        mover=choice.mover,
        way=choice.way,
        reason=choice.reason,
        shape=_Shape(slot_bytes=shape.slot_bytes, piece_bytes=shape.piece_bytes),
        candidates=[_Candidate(**asdict(candidate)) for candidate in choice.candidates],
        machine=machine,
    )
    path = choice_path(directory, machine)
    draft = f"{path.removesuffix('.json')}-{secrets.token_hex(8)}.tmp"
    try:
        with contextlib.ExitStack() as undo:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            undo.callback(_unlink, draft)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(document.model_dump_json(indent=1) + "\n")
            os.replace(draft, path)
            undo.pop_all()
    except OSError as error:
        logger.debug("%s is not kept: %s", path, error)


def clean(directory: str) -> None:
    """Remove what killed processes left, and choices that nobody renews. For the holder of the lock."""
    now_s = time.time()
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            kept_s = _LEFT_S if _LEFTOVER.fullmatch(entry.name) else _FORGOTTEN_S
            if kept_s == _FORGOTTEN_S and not _CHOICE.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                if now_s - entry.stat(follow_symlinks=False).st_mtime > kept_s:
                    os.unlink(entry.path)


def _read(path: str, now_s: float) -> CachedChoice | None:
    """Return what is in ``path``; None when it is not there or not what ``write_choice`` writes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            document = _Document.model_validate_json(file.read(_MAX_BYTES))
    except (OSError, ValidationError):
        return None
    candidates = tuple(Candidate(**entry.model_dump()) for entry in document.candidates)
    if not any((known.mover, known.way) == (document.mover, document.way) and known.ok for known in candidates):
        return None
    choice = Choice(document.mover, document.way, candidates, document.measured_at, True, document.reason)
    age_s = now_s - document.measured_at
    return CachedChoice(
        path,
        choice,
        Shape(document.shape.slot_bytes, document.shape.piece_bytes),
        document.machine,
        age_s,
        -_AHEAD_S < age_s < (LIFETIME_S if document.finished else UNFINISHED_LIFETIME_S),
    )


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
