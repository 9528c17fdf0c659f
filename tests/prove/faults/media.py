"""What a tier of each kind rests on: a directory, or a bucket of a real server behind a proxy; and ways to damage it.

Threading: the cell's thread. Ownership: a medium owns its server; ``close`` ends it.
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
from tests.s3.proxy import Answer, Cut, Fault, FaultProxy, Flip, Hold, Reset, Rule, Stretch
from tests.s3.servers import RcloneServer

PREFIX: Final = "kv"
SHARED_DIR_BYTES: Final = 512 << 10
"""Where chunks are evicted; else far more."""
PRESENT_S: Final = 600.0
"""How long a lookup's answer is believed."""
LOOKUP: Final = {"timeout": "1s", "absent_for": "1ms", "present_for": f"{PRESENT_S:.0f}s"}
MEMORY_BYTES: Final = 768 << 10


class Medium:
    """A directory, or a bucket of rclone's S3 server and a proxy in front of it that fails on cue."""

    def __init__(self, kind: str, root: Path, *, is_small: bool) -> None:
        """``kind`` as in ``faults.TIERS``. ``is_small``: so that chunks are evicted from a shared directory."""
        self._kind = kind
        self._is_small = is_small
        self.root = root
        self.slab_bytes = 0
        """What a slab may take."""
        self._stack = contextlib.ExitStack()
        self._server: RcloneServer | None = None
        if kind.startswith("s3"):
            self._server = self._stack.enter_context(RcloneServer())
            self._proxy = self._stack.enter_context(FaultProxy(self._server.port))
            os.environ.update(self._server.environment)
            self.root = self._server.directory / PREFIX

    @property
    def is_bucket(self) -> bool:
        """Whether a server's answers may be wrong."""
        return self._server is not None

    def tier(self) -> dict[str, Any]:
        """Return what the config says of the tier."""
        if self._kind == "slab":
            return {"kind": "slab", "path": str(self.root), "capacity": self.slab_bytes}
        if self._server is None:
            capacity = SHARED_DIR_BYTES if self._is_small else 1 << 30
            return {"kind": "shared_dir", "path": str(self.root), "capacity": capacity, "lookup": LOOKUP}
        options = {"connections": 4, "request_timeout": "1s", "lookup": LOOKUP}
        mover = self._kind.removeprefix("s3_")
        return self._server.tier(PREFIX, endpoint=self._proxy.endpoint, mover=mover, **options)

    def inject(self, fault: str, rng: random.Random) -> Rule | None:
        """Break a bucket's requests from now on, if ``fault`` is one of theirs."""
        at = rng.choice(("request", "upload", "answer", "headers", "body"))
        more = rng.choice((1, 100, 4096, 65_536))
        answers: dict[str, Fault] = {
            "500": Answer(500, "InternalError"),
            "503": Answer(503, "SlowDown"),
            "403": Answer(403, "AccessDenied"),
            "ENOSPC": Answer(507, "InsufficientStorage"),
            "reset": Reset(at),  # type: ignore[arg-type]
            "slow": Hold(rng.choice(("request", "answer")), rng.uniform(0.001, 0.03)),  # type: ignore[arg-type]
            "hang": Hold("request"),
            "short": Cut(rng.random(), lying=rng.random() < 0.5),
            "flipped": Flip(rng.random()),
            "long": Stretch(more),
            "wrong length": Stretch(more, lying=True),
        }
        made = answers.get(fault)
        if made is None:
            return None
        share = rng.choice((0.3, 0.7, 1.0))
        operation = {Cut: "GET", Flip: "GET", Stretch: "GET|HEAD"}.get(type(made))
        times = 3 if isinstance(made, Hold) else None
        return self._proxy.inject(
            made, operation=operation, probability=share, seed=rng.randrange(1 << 30), times=times
        )

    def damage(self, fault: str, pieces: Sequence[Piece], rng: random.Random) -> list[Piece]:
        """Spoil some of ``pieces``. Returns which."""
        spoilt: list[Piece] = []
        name = {"stale": "another's", "vanished": "deleted", "wrong length": "truncated"}.get(fault, fault)
        for piece in rng.sample(pieces, rng.randint(1, len(pieces))):
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                before, size = piece.read(), piece.path.stat().st_size
                if self._kind == "slab" and fault in {"truncated", "long"}:  # the file of them all
                    if fault == "truncated" and size <= piece.offset:
                        continue  # the file was cut before it, and nobody has asked for it since
                    os.truncate(piece.path, rng.randrange(piece.offset, size) if fault == "truncated" else size + 4096)
                    spoilt.append(piece)
                    break
                if fault == "wrong length" and rng.random() < 0.5:
                    piece.write((2 * before)[: rng.choice((1, len(before) + 1, 2 * len(before)))])
                else:
                    DAMAGES[name](piece, rng.choice(pieces), rng.random())
                if not piece.path.exists() or piece.read() != before:
                    spoilt.append(piece)
        if self._server is not None:
            self._server.forget()
        return spoilt

    def wipe(self) -> None:
        """Everything vanishes from a shared directory or bucket. In a slab that did nothing is stored until a start."""
        for path in self.root.glob("*") if self._kind != "slab" and self.root.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)
        if self._server is not None:
            self._server.forget()

    def close(self) -> None:
        """End what runs."""
        self._stack.close()
