"""What may carry chunks between device memory and files, what was measured of it, and which is best.

Threading: immutable values and pure functions, safe anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nixl_offload.engine.image import TransferPath

MARGIN: Final = 0.1
"""Candidates this close to the best are as good as it: what is measured in two seconds is no better than that."""
DIRECT_UNMEASURED_BYTES: Final = 256 << 10
"""Pieces from this size on go direct where nothing could be measured."""
BOUNCE_SHARE: Final = 0.7
"""GPUDirect Storage reads as fast as the drive. Page-locked host memory does so too, with a copy over the bus behind
it: what reads at less than this share of its speed does not go from the drive to the GPU."""
BOUNCE_LEAST_BYTES: Final = 1 << 20
"""Below this size of an image the cost of each call counts, and speed tells nothing of copies."""
HOST_REFERENCE: Final[tuple[str, TransferPath]] = ("posix", "host")
"""What others are held against."""
CUFILE: Final = ("gds", "gds_mt", "kvikio")
"""Movers that may bounce without a word."""
_PATHS: Final[tuple[TransferPath, ...]] = ("direct", "device", "host")


@dataclass(frozen=True, slots=True)
class Shape:
    """What travels, in bytes. Both are multiples of ``PAGE_BYTES``."""

    slot_bytes: int
    """A chunk's image, header page included; of several groups the largest."""
    piece_bytes: int
    """What lies together in the KV tensors; 0: these cannot be moved direct."""


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    """What became of one mover on one transfer path. Speeds are medians, 0.0 where nothing was measured."""

    mover: str
    """As ``select.open_mover`` takes it."""
    path: TransferPath
    ok: bool
    """It ran, as far as it was tried."""
    reason: str = ""
    """Why it cannot run, or has no figures; empty when it has."""
    read_bytes_s: float = 0.0
    write_bytes_s: float = 0.0

    @property
    def measured(self) -> bool:
        """Whether it has figures."""
        return self.ok and self.read_bytes_s > 0 and self.write_bytes_s > 0

    @property
    def cost_s_byte(self) -> float:
        """Seconds per byte, reads counted twice: a load holds up a request, a store goes on behind it."""
        return 2 / self.read_bytes_s + 1 / self.write_bytes_s

    def __str__(self) -> str:
        """For logs."""
        if not self.measured:
            return f"{self.mover} {self.path}: {self.reason}"
        read, write = self.read_bytes_s / 1e9, self.write_bytes_s / 1e9
        return f"{self.mover} {self.path}: read {read:.3g}, write {write:.3g} GB/s"


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The mover to open, with ``select.open_mover``, and the transfer path of chunks."""

    mover: str
    path: TransferPath
    reason: str
    """Why this one, in words."""
    candidates: tuple[MeasuredPath, ...] = ()
    """All that were looked at; empty where there was nothing to choose."""


def candidates_of(mover: str, shape: Shape, *, accelerator: bool) -> tuple[tuple[str, TransferPath], ...]:
    """Return the movers and paths that ``mover`` of a config allows; the first is taken where nothing is measured.

    Fewer copies first, where the pieces are not small; then gds_mt before kvikio, which needs a thread pool of its own.
    """
    if not accelerator or mover in ("posix", "copy"):
        return ((mover, "host"),)
    on_device: tuple[TransferPath, ...] = ("device",)
    if shape.piece_bytes:
        on_device = ("direct", "device") if shape.piece_bytes >= DIRECT_UNMEASURED_BYTES else ("device", "direct")
    movers = ("gds_mt", "kvikio") if mover == "auto" else (mover,)
    found = tuple((name, path) for name in movers for path in on_device)
    return (*found, ("posix", "host")) if mover == "auto" else found


def best_of(candidates: Sequence[MeasuredPath]) -> MeasuredPath | None:
    """Return the cheapest, or among those within ``MARGIN`` of it the one with the fewest copies, the first of those;
    None: no figures.
    """
    measured = [candidate for candidate in candidates if candidate.measured]
    limit = (1 + MARGIN) * min((candidate.cost_s_byte for candidate in measured), default=0)
    close = [candidate for candidate in measured if candidate.cost_s_byte <= limit]
    return min(close, key=lambda candidate: _PATHS.index(candidate.path), default=None)


def told_to_bounce(candidates: Sequence[MeasuredPath], shape: Shape) -> tuple[MeasuredPath, MeasuredPath] | None:
    """Return the fastest reader by cuFile and the host path that it is held against, if its speed says that it copies
    through host memory; None: it does not, or nothing can be told.
    """
    measured = [candidate for candidate in candidates if candidate.measured]
    host = next((candidate for candidate in measured if (candidate.mover, candidate.path) == HOST_REFERENCE), None)
    by_cufile = [candidate for candidate in measured if candidate.mover in CUFILE]
    if host is None or not by_cufile or shape.slot_bytes < BOUNCE_LEAST_BYTES:
        return None
    best = max(by_cufile, key=lambda candidate: candidate.read_bytes_s)
    return (best, host) if best.read_bytes_s < BOUNCE_SHARE * host.read_bytes_s else None
