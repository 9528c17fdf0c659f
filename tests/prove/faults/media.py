"""What a tier of each kind rests on: a directory, or a bucket of a real server behind a proxy; and ways to damage it.

Threading: the cell's thread. Ownership: a medium owns its servers; ``close`` ends them.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tests.prove.happenings import DAMAGES, Piece
from tests.s3.proxy import Answer, Cut, Delay, Fault, FaultProxy, Flip, Hold, Reset, Rule, Stretch
from tests.s3.servers import RcloneServer

PREFIX: Final = "kv"
SHARED_DIR_BYTES: Final = 512 << 10
"""Where chunks are evicted; else far more."""
PRESENT_S: Final = 600.0
"""How long a lookup's answer is believed."""
LOOKUP: Final = {"timeout": "1s", "absent_for": "1ms", "present_for": f"{PRESENT_S:.0f}s"}
MEMORY_BYTES: Final = 768 << 10


class Medium:
    """A directory. ``kind`` as in ``table.TIERS``."""

    def __init__(self, kind: str, root: Path, *, is_small: bool) -> None:
        """``is_small``: so that chunks are evicted."""
        self.kind = kind
        self.root = root
        self.is_small = is_small
        self.slab_bytes = 0
        """What a slab may take."""

    @property
    def is_shared(self) -> bool:
        """Whether each shard is a file of its own."""
        return self.kind != "slab"

    def tier(self) -> dict[str, Any]:
        """Return what the config says of the tier."""
        if self.kind == "slab":
            return {"kind": "slab", "path": str(self.root), "capacity": self.slab_bytes}
        capacity = SHARED_DIR_BYTES if self.is_small else 1 << 30
        return {"kind": "shared_dir", "path": str(self.root), "capacity": capacity, "lookup": LOOKUP}

    def changed(self) -> None:
        """Bytes were changed behind everybody's back."""

    def inject(self, fault: str, rng: random.Random) -> Rule | None:
        """Break requests from now on, where there are any."""
        return None

    def wipe(self) -> None:
        """Everything in a shared directory vanishes. Nothing is stored in a slab that did, until the next start."""
        for path in self.root.glob("*") if self.is_shared else ():
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """End what runs."""


class Bucket(Medium):
    """A bucket of rclone's S3 server, and a proxy in front of it that fails on cue."""

    def __init__(self, kind: str, root: Path) -> None:
        super().__init__(kind, root, is_small=False)
        self.server = RcloneServer()
        self.server.start()
        self.proxy = FaultProxy(self.server.port)
        os.environ.update(self.server.environment)
        self.root = self.server.directory / PREFIX

    def tier(self) -> dict[str, Any]:
        """See Medium."""
        mover = self.kind.removeprefix("s3_")
        return self.server.tier(
            PREFIX, endpoint=self.proxy.endpoint, mover=mover, connections=4, request_timeout="1s", lookup=LOOKUP
        )

    def changed(self) -> None:
        """See Medium."""
        self.server.forget()

    def inject(self, fault: str, rng: random.Random) -> Rule | None:
        """See Medium."""
        made = self._fault(fault, rng)
        if made is None:
            return None
        share = rng.choice((0.3, 0.7, 1.0))
        operation = {Cut: "GET", Flip: "GET", Stretch: "GET|HEAD"}.get(type(made))
        times = 3 if isinstance(made, Hold) else None
        return self.proxy.inject(made, operation=operation, probability=share, seed=rng.randrange(1 << 30), times=times)

    def _fault(self, fault: str, rng: random.Random) -> Fault | None:
        at = rng.choice(("request", "upload", "answer", "headers", "body"))
        more = rng.choice((1, 100, 4096, 65_536))
        answers: dict[str, Fault] = {
            "500": Answer(500, "InternalError"),
            "503": Answer(503, "SlowDown"),
            "403": Answer(403, "AccessDenied"),
            "ENOSPC": Answer(507, "InsufficientStorage"),
            "reset": Reset(at),  # type: ignore[arg-type]
            "slow": Delay(rng.uniform(0.001, 0.03), rng.choice(("request", "answer"))),  # type: ignore[arg-type]
            "hang": Hold("request"),
            "short": Cut(rng.random(), lying=rng.random() < 0.5),
            "flipped": Flip(rng.random()),
            "long": Stretch(more),
            "wrong length": Stretch(more, lying=True),
        }
        return answers.get(fault)

    def wipe(self) -> None:
        """See Medium."""
        for path in self.root.glob("*") if self.root.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)
        self.server.forget()

    def close(self) -> None:
        """See Medium."""
        self.proxy.close()
        self.server.close()


def damage(fault: str, medium: Medium, pieces: Sequence[Piece], rng: random.Random) -> list[Piece]:
    """Spoil some of ``pieces``. Returns which."""
    spoilt: list[Piece] = []
    name = {"stale": "another's", "vanished": "deleted", "wrong length": "truncated"}.get(fault, fault)
    for piece in rng.sample(pieces, rng.randint(1, len(pieces))):
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            before, size = piece.read(), piece.path.stat().st_size
            if not medium.is_shared and fault in {"truncated", "long"}:  # the file of them all
                os.truncate(piece.path, rng.randrange(piece.offset, size) if fault == "truncated" else size + 4096)
                spoilt.append(piece)
                break
            if fault == "wrong length" and rng.random() < 0.5:
                piece.write((2 * before)[: rng.choice((1, len(before) + 1, 2 * len(before)))])
            else:
                DAMAGES[name](piece, rng.choice(pieces), rng.random())
            if not piece.path.exists() or piece.read() != before:
                spoilt.append(piece)
    medium.changed()
    return spoilt
