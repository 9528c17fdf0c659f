"""Faults that come and go by a seeded timetable: of the bucket's server, of the filesystem, of what rests on both.

Threading: one thread of its own begins and ends them, while the context lasts.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from tests.faults.conftest import SmallFilesystem
from tests.prove.happenings import DAMAGES, Outage, Piece, bucket_outages, disk_outages, files
from tests.s3.proxy import FaultProxy, Rule
from tests.s3.servers import RcloneServer

LASTS_S: Final = (1.0, 4.0)
PAUSE_S: Final = (0.5, 2.0)
UNTIL_ASKED_S: Final = 20.0
"""So much longer lasts what no request has met: after another fault, the bucket may not be asked for a while."""
DAMAGED: Final = 6
"""So many files, objects or places of the slab at a time."""
SLOT_BYTES: Final = 1 << 16
"""Smaller files are no shards; of a slab such pieces are damaged."""
OFTEN: Final = 5
"""Of fewer times, a tier that is still out of use after the fault before explains that nothing asked it."""


class Troubles:
    """Begins with the next fault when the last one is over and some time has passed."""

    def __init__(
        self,
        seed: int,
        server: RcloneServer,
        proxy: FaultProxy,
        disk: SmallFilesystem | None,
        directories: Mapping[str, Path],
    ) -> None:
        """``disk`` holds the tree and the slab of ``directories``; None: it is no filesystem of its own and cannot be
        filled.
        """
        self._source = random.Random(f"troubles {seed}")
        self._server = server
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="troubles")
        self._failed: Exception | None = None
        self._begun: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        """How often each found something to break."""
        self.now = ""
        """Which one there is; none: a pause."""
        self._kinds: dict[str, Outage] = bucket_outages(server, proxy)
        for place, directory in directories.items():
            for damage in (
                ("flipped",) if place == "slab" else ("flipped", "truncated", "emptied", "swapped", "deleted")
            ):
                name = f"{place} {damage}"
                self._kinds[name] = partial(self._damaged, name, directory, damage)
        if disk is not None:
            self._kinds |= disk_outages(disk)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """End what lasts. Raises what went wrong in the thread: then less was tried than it seems."""
        self._stopping.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed

    @property
    def idle(self) -> list[str]:
        """A sentence for each kind that broke nothing, though it came often."""
        idle = [name for name in self._kinds if not self.struck[name] and self._begun[name] >= OFTEN]
        return [f"{name} broke nothing, {self._begun[name]} times" for name in idle]

    def _run(self) -> None:
        try:
            while True:
                for name in self._source.sample(sorted(self._kinds), len(self._kinds)):
                    if self._stopping.wait(self._source.uniform(*PAUSE_S)):
                        return
                    with self._kinds[name]() as rule:
                        self.now = name
                        self._begun[name] += 1
                        over = self._stopping.wait(self._source.uniform(*LASTS_S))
                        until_s = time.monotonic() + UNTIL_ASKED_S
                        while isinstance(rule, Rule) and not rule.hits and not over and time.monotonic() < until_s:
                            over = self._stopping.wait(PAUSE_S[0])
                    self.now = ""
                    self.struck[name] += (
                        rule.hits > 0 if isinstance(rule, Rule) else name.startswith(("S3", "disk", "read"))
                    )
                    if over:
                        return
        except Exception as error:  # noqa: BLE001 - raised at the end
            self._failed = error

    @contextlib.contextmanager
    def _damaged(self, name: str, directory: Path, damage: str) -> Iterator[None]:
        pieces = [
            Piece(path, at, SLOT_BYTES) if path.suffix == ".slab" else Piece(path)
            for path, status in sorted(files(directory), key=lambda found: found[0])
            if status.st_size > SLOT_BYTES and not path.name.startswith(".")
            for at in range(0, status.st_size if path.suffix == ".slab" else 1, SLOT_BYTES)
        ]
        chosen = self._source.sample(pieces, min(DAMAGED, len(pieces)))
        for mine, other in zip(chosen, chosen[1:] + chosen[:1], strict=True):
            with contextlib.suppress(FileNotFoundError):
                DAMAGES[damage](mine, other, 0.5)
                self.struck[name] += 1
        self._server.forget()
        yield
