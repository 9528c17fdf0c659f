"""What ``nixl-offload check`` says of a tier in files: its directory, GPUDirect Storage, movers, how fast it is.

Threading: one thread; movers run in the child. A filesystem that hangs holds nobody up for long: what touches it is
done by a daemon thread that is left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from nixl_offload.cli.check import directory
from nixl_offload.cli.check.child import Answer, Trials
from nixl_offload.cli.check.lines import Line, Section, ok, unknown, warning, wrong
from nixl_offload.cli.check.report import Doing
from nixl_offload.cli.terminal import about_size
from nixl_offload.config import DirectoryConfig, SharedDirConfig
from nixl_offload.hardware.gds import GdsReport, gds_report

T = TypeVar("T")

HANG_S: Final = 15.0
_ABOVE: Final = "see its library and plugin under Environment"
_MENDS: Final = {
    "posix_uring": f"{_ABOVE}; sysctl kernel.io_uring_disabled=0, docker run --security-opt seccomp=unconfined; or "
    "posix_api: aio",
    "posix_aio": f"{_ABOVE}; sysctl -w fs.aio-max-nr=1048576; or posix_api: io_uring",
    "gds_mt": f"{_ABOVE}, and the lines of GDS here",
    "kvikio": f"{_ABOVE}; where cuFile is not to be had: export KVIKIO_COMPAT_MODE=ON",
    "copy": "mend the directory",
}
_PIECE_BYTES: Final = 2 << 20
_TITLES: Final = {"slab": "Slab tier", "shared_dir": "Shared directory tier"}


def file_section(
    tier: DirectoryConfig,
    trials: Trials,
    doing: Doing,
    *,
    capacity_bytes: int | None,
    io: bool,
    piece_bytes: int = _PIECE_BYTES,
    root: str = "/",
) -> Section:
    """Look at a tier in files. ``capacity_bytes``: None where nobody said; ``io``: measure; ``root``: as in ``gds``."""
    section = Section(tier.kind, f"{_TITLES[tier.kind]} {tier.path} (mover: {tier.mover})")
    section.facts = {"path": tier.path, "mover": tier.mover, "taken": None, "io": None}
    doing(f"looking at {tier.path}")
    try:
        place, gds = within(HANG_S, lambda: _look(section, tier, capacity_bytes, root))
    except TimeoutError:
        words = f"nothing there answers within {HANG_S:.0f} s: a network filesystem whose server is gone?"
        section.lines.append(wrong("directory", words, f"umount -l {tier.path}, then mount it again"))
        return section
    section.facts["gds"] = {
        "real": gds.real,
        "verdict": gds.verdict,
        "facts": [fact._asdict() for fact in gds.facts],
    }
    gpu = any(fact.name == "GPU driver" and fact.ok for fact in gds.facts)
    section.add(gds_lines(tier, gds, gpu=gpu))
    if section.has("directory", "wrong"):
        section.lines.append(unknown("movers", "not tried: there is nowhere to write"))
        return section
    _try_movers(section, tier, place.standing, trials, doing, gpu=gpu, io=io, piece_bytes=piece_bytes)
    return section


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Return what ``work`` returns. Raises what it raises, or TimeoutError after ``limit_s``: then it goes on alone."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run, name="nixl-offload-check", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def speed_line(io: Answer) -> Line:
    """Say what a short I/O test gave."""
    if "failed" in io:
        return warning("speed", f"not measured: {io['failed']}", "see what stands above")
    pieces = f"{about_size(io['piece_bytes'])} at a time"
    speeds = f"read {io['read_bytes_s'] / 1e6:,.0f} MB/s, write {io['write_bytes_s'] / 1e6:,.0f} MB/s ({pieces})"
    times = f"a page in {_ms(io['read_latency_s'])}, out {_ms(io['write_latency_s'])}"
    return ok("speed", f"{speeds}; {times}, by {io['mover']}")


def _look(
    section: Section, tier: DirectoryConfig, capacity_bytes: int | None, root: str
) -> tuple[directory.Place, GdsReport]:
    place = directory.find_place(tier.path)
    section.add([directory.access_line(place)])
    section.add(directory.filesystem_lines(place, tier, root))
    if not section.has("directory", "wrong"):
        section.add([directory.space_line(place, capacity_bytes), directory.direct_io_line(place, tier)])
        section.add(directory.tree_lines(place) if isinstance(tier, SharedDirConfig) else [directory.lock_line(place)])
    return place, gds_report(place.standing, root=root)


def gds_lines(tier: DirectoryConfig, gds: GdsReport, *, gpu: bool) -> list[Line]:
    """Return the verdict, and with a GPU each thing that decides it. That it is not real costs speed, no more."""
    name = "GPUDirect Storage"
    if tier.mover == "posix":
        return [ok(name, "not asked for: mover: posix goes through host memory")]
    if gds.real:
        lines = [ok(name, gds.verdict.partition(": ")[2] or gds.verdict)]
    elif not gpu:
        return [ok(name, "does not matter without a GPU: files are moved through host memory")]
    else:
        certain = all(fact.ok is not None for fact in gds.facts)
        words = gds.verdict.partition("; fix:")[0]
        mend = "mend what is named below (GDS: ...), or say mover: posix if it is not wanted"
        lines = [warning(name, words, mend) if certain else unknown(name, words, "gdscheck -p")]
    for fact in gds.facts:
        title = f"GDS: {fact.name}"
        if fact.ok:
            lines.append(ok(title, fact.words))
        elif fact.fix is None and gds.real:
            lines.append(ok(title, f"{fact.words}; not needed"))
        elif fact.ok is None:
            lines.append(unknown(title, fact.words, fact.fix))
        else:
            lines.append(warning(title, fact.words, fact.fix))
    return lines


def _try_movers(
    section: Section,
    tier: DirectoryConfig,
    where: str,
    trials: Trials,
    doing: Doing,
    *,
    gpu: bool,
    io: bool,
    piece_bytes: int,
) -> None:
    """Start each mover, say which the server would take, and measure through that."""
    # numpy comes along: not before something is to be moved.
    from nixl_offload.movers.base import MemoryKind
    from nixl_offload.movers.select import candidates

    allowed = candidates(tier.mover, MemoryKind.VRAM if gpu else MemoryKind.DRAM, tier.posix_api)
    # Those that would need a GPU are named as well, so that nobody wonders where they are.
    everything = list(dict.fromkeys([*allowed, *candidates("auto", MemoryKind.VRAM, tier.posix_api)]))
    doing(f"trying movers in {where}", long="NIXL brings torch along")
    options = {"threads": tier.threads, "bounce_bytes": tier.bounce_bytes}
    tasks = [trials.begin("mover", name=name, directory=where, gpu=gpu, **options) for name in everything]
    found = {name: _probe(trials.answer(task)) for name, task in zip(everything, tasks, strict=True)}
    taken = next((name for name in allowed if found[name]["ok"]), None)
    section.facts |= {
        "taken": taken,
        "movers": [{"name": name, **probe, "allowed": name in allowed} for name, probe in found.items()],
    }
    section.add(_mover_line(name, probe, tier, name in allowed, name == taken) for name, probe in found.items())
    if taken is None:
        section.lines.append(_nothing_starts(tier, starts_elsewhere=any(probe["ok"] for probe in found.values())))
    if taken is None or not io:
        return
    doing(f"measuring {where} by {taken}")
    direct = tier.direct_io and section.has("O_DIRECT", "ok")
    answer = trials.run(
        "file_io", name=taken, directory=where, gpu=gpu, direct_io=direct, piece_bytes=piece_bytes, **options
    )
    section.facts["io"] = None if "failed" in answer else answer
    section.lines.append(speed_line(answer))


def _probe(answer: Answer) -> dict[str, Any]:
    if "failed" in answer:
        return {"ok": False, "reason": str(answer["failed"])}
    return {"ok": bool(answer["ok"]), "reason": str(answer["reason"])}


def _mover_line(name: str, probe: dict[str, Any], tier: DirectoryConfig, allowed: bool, taken: bool) -> Line:
    title = f"mover {name}"
    if taken:
        return ok(title, f"{probe['reason']}: this is the one that the server takes")
    if not allowed:
        unless = "" if tier.mover == "auto" else f"; `mover: {tier.mover}` does not allow it"
        return ok(title, f"{'would start' if probe['ok'] else 'not for here: ' + probe['reason']}{unless}")
    if probe["ok"]:
        return ok(title, f"{probe['reason']}; slower, or after the one taken")
    return warning(title, f"passed over: {probe['reason']}", _MENDS[name])


def _nothing_starts(tier: DirectoryConfig, *, starts_elsewhere: bool) -> Line:
    words = f"none of the movers that `mover: {tier.mover}` allows starts here"
    return wrong("movers", words, "mover: auto" if starts_elsewhere else "see above what each of them lacks")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
