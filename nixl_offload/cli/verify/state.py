"""What an interrupted ``nixl-offload verify`` remembers, so that ``--resume`` goes on where it was.

It lies in the user's cache directory, not beside the data: a bucket has no beside, a directory may be read-only for
whoever verifies, and in a slab's directory everything counts against the capacity. One small file per config, selection
and ``--delete-bad``; 0600, for it names what is stored. Threading: one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from nixl_offload.cli.verify.judge import VERDICTS

_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20


@dataclass(slots=True)
class TierProgress:
    """How far one tier is."""

    done: bool = False
    namespace: str = ""
    """``Held.path`` of the namespace that was being read."""
    cursor: str = ""
    """The last chunk of it that has a verdict."""
    chunks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(VERDICTS, 0))
    """By verdict."""
    bytes_checked: int = 0
    deleted: int = 0
    left: int = 0
    """Bad ones that were to be deleted, and could not be."""
    failures: int = 0
    """Namespaces that could not be read."""

    def add(self, kind: str, size_bytes: int) -> None:
        """Take note of a verdict."""
        self.chunks[kind] += 1
        self.bytes_checked += size_bytes


class State:
    """The file. Trouble with it costs only the resuming."""

    def __init__(self, identity: Mapping[str, Any]) -> None:
        """``identity``: all that a run must have in common with the one that it resumes."""
        text = json.dumps(identity, sort_keys=True)
        self.path = _cache_directory() / "nixl-offload" / f"verify-{sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self) -> dict[str, TierProgress] | None:
        """Return what an interrupted run left, by tier; None where there is none."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                if os.fstat(fd).st_uid != os.geteuid():
                    return None  # what others say was verified was not
                stored = json.loads(file.read(_MAX_BYTES))
            if stored["version"] != _VERSION:
                return None
            return {where: _progress(plain) for where, plain in stored["tiers"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def save(self, tiers: Mapping[str, TierProgress]) -> bool:
        """Put it in place whole. False: it could not be written, and the run cannot be resumed."""
        stored = {"version": _VERSION, "tiers": {where: asdict(progress) for where, progress in tiers.items()}}
        draft = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(stored, file)
            draft.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            return False
        return True

    def remove(self) -> None:
        """The run is over."""
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


def _progress(plain: Mapping[str, Any]) -> TierProgress:
    """Raises KeyError, TypeError for what ``save`` would not have written."""
    progress = TierProgress(**{item.name: plain[item.name] for item in fields(TierProgress)})
    numbers = [*progress.chunks.values(), progress.bytes_checked, progress.deleted, progress.left, progress.failures]
    if set(progress.chunks) != set(VERDICTS) or any(type(number) is not int for number in numbers):
        raise TypeError("not what was saved")
    if type(progress.namespace) is not str or type(progress.cursor) is not str or type(progress.done) is not bool:
        raise TypeError("not what was saved")
    return progress
