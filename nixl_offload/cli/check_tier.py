"""What ``nixl-offload check`` does with one tier: looks at the directory, tries the movers, reads what was measured.

Threading: one thread. Scratch pages are written into the directory and removed. NIXL is loaded to try its movers;
torch only where there is a GPU, or a measurement to be read.
"""

from __future__ import annotations

import glob
import os
import sys
from typing import Final

from nixl_offload.cli.check_report import Measured, TierReport
from nixl_offload.config import FileTier
from nixl_offload.errors import MoverError
from nixl_offload.movers.base import MemoryKind, MemoryRegion
from nixl_offload.movers.gds import gds_report
from nixl_offload.movers.pinning import check_pinning
from nixl_offload.movers.select import Probe, candidates, make_mover, probe_round_trip
from nixl_offload.units import format_size

_CHOICES: Final = ".mover-choice-*.json"


def look_at(tier: FileTier, staging_bytes: int | None) -> TierReport:
    """Return what there is to tell about a tier. ``staging_bytes``: what each rank would register; None: not known."""
    gds = gds_report(tier.path)
    problems = [fact.words for fact in gds.facts if fact.name == "directory" and not fact.ok]
    has_gpu = any(fact.name == "GPU driver" and fact.ok for fact in gds.facts)
    memory = MemoryKind.VRAM if has_gpu else MemoryKind.DRAM
    allowed = candidates(tier.mover, memory, tier.posix_api)
    # Those that would need a GPU are named as well, so that nobody wonders where they are.
    everything = candidates("auto", MemoryKind.VRAM, tier.posix_api)
    movers: tuple[Probe, ...] = ()
    if not problems:
        movers = tuple(_try(name, has_gpu, tier.path) for name in dict.fromkeys([*allowed, *everything]))
        if not any(probe.ok for probe in movers if probe.name in allowed):
            problems.append(f"none of the movers that `mover: {tier.mover}` allows starts here")
    if has_gpu and staging_bytes is not None:
        problems += _not_pinned(staging_bytes)
    return TierReport(tier.path, tier.mover, gds, movers, tuple(allowed), _measured(tier.path), tuple(problems))


def _try(name: str, has_gpu: bool, directory: str) -> Probe:
    """Start a mover and move a page with it, from and to the memory that it would be used with."""
    mover = make_mover(name)
    try:
        on_device = MemoryKind.VRAM in mover.memory_kinds and name != "copy"
        if on_device and not has_gpu:
            return Probe(name, False, "no NVIDIA driver here")
        note = probe_round_trip(mover, MemoryKind.VRAM if on_device else MemoryKind.DRAM, directory)
    except MoverError as error:
        return Probe(name, False, str(error).removeprefix(f"{name}: "))
    finally:
        mover.close()
    return Probe(name, True, f"{note}; packs through host memory" if has_gpu and not on_device else note)


def _not_pinned(staging_bytes: int) -> list[str]:
    try:
        check_pinning(f"staging of {format_size(staging_bytes)}", MemoryRegion(0, staging_bytes, MemoryKind.VRAM), 0)
    except MoverError as error:
        return [str(error)]
    return []


def _measured(directory: str) -> tuple[Measured, ...]:
    """Return what ``auto`` measured, here or elsewhere. The engine is imported only where there is something."""
    patterns = (os.path.join(glob.escape(directory), *deeper, _CHOICES) for deeper in ((), ("*",), ("*", "*")))
    if not any(_has_match(pattern) for pattern in patterns):
        return ()
    try:
        from nixl_offload.engine.choice.cache import read_cached
    except ImportError as error:
        print(f"nixl-offload: what was measured cannot be read: {error}", file=sys.stderr)
        return ()
    return tuple(
        Measured(
            cached.path,
            cached.choice.mover,
            cached.choice.way,
            cached.choice.reason,
            cached.choice.measured_at,
            cached.current,
            tuple(
                (each.mover, each.way, each.ok, each.reason, each.read_bytes_s, each.write_bytes_s)
                for each in cached.choice.candidates
            ),
        )
        for cached in read_cached(directory)
    )


def _has_match(pattern: str) -> bool:
    return next(glob.iglob(pattern), None) is not None
