"""What an interrupted ``nixl-offload verify`` remembers, so that ``--resume`` can continue.

The file lies in the user's cache directory, not beside the data: a bucket has no such place, a directory may be
read-only for the user, and in a slab's directory every byte counts against the capacity. One small file per config,
selection and ``--delete-bad``; mode 0600, for it names what is stored. Threading: one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pydantic

from nixl_offload.cli.verify.judge import VERDICTS

_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20


class TierProgress(pydantic.BaseModel):
    """How far the verification of one tier is."""

    model_config = pydantic.ConfigDict(strict=True)

    done: bool = False
    namespace: str = ""
    """``NamespaceInfo.path`` of the namespace that was being read."""
    cursor: str = ""
    """The last chunk of it that has a verdict."""
    chunks: dict[str, int] = pydantic.Field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))
    """By verdict."""
    bytes_checked: int = 0
    deleted: int = 0
    left: int = 0
    """Bad chunks that could not be deleted."""
    failures: int = 0
    """Namespaces that could not be read."""

    def add(self, kind: str, size_bytes: int) -> None:
        """Count a verdict."""
        self.chunks[kind] += 1
        self.bytes_checked += size_bytes


class _Stored(pydantic.BaseModel):
    version: int
    tiers: dict[str, TierProgress]


class ResumeFile:
    """The file. If it cannot be read or written, only resuming is lost."""

    def __init__(self, identity: Mapping[str, Any]) -> None:
        """``identity``: what a run must have in common with the one that it resumes."""
        text = json.dumps(identity, sort_keys=True)
        self.path = _cache_directory() / "nixl-offload" / f"verify-{sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self) -> dict[str, TierProgress] | None:
        """Return what an interrupted run left, by tier; None where there is nothing usable."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                if os.fstat(fd).st_uid != os.geteuid():
                    return None  # another user's claim that something was verified counts for nothing
                stored = _Stored.model_validate_json(file.read(_MAX_BYTES))
        except (OSError, ValueError):
            return None
        whole = all(
            tier.model_fields_set == set(TierProgress.model_fields) and set(tier.chunks) == set(VERDICTS)
            for tier in stored.tiers.values()
        )
        return stored.tiers if whole and stored.version == _VERSION else None

    def save(self, tiers: dict[str, TierProgress]) -> bool:
        """Replace the file atomically. False: it could not be written."""
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(_Stored(version=_VERSION, tiers=tiers).model_dump_json())
            draft.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            return False
        return True

    def remove(self) -> None:
        """Forget a run that ended."""
        with contextlib.suppress(OSError):
            self.path.unlink()


def _cache_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache:
        return Path(cache)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # a container's user without a name and without HOME
        return Path(os.devnull)  # nothing can be kept below it
