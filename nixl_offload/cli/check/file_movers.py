"""What ``nixl-offload check`` finds of movers to and from a directory: whether GPUDirect Storage is real, which movers
start there, and which of them is the fastest.

Threading: one thread; movers run in the child process.
"""

from __future__ import annotations

from typing import Any, Final

from nixl_offload.cli.check.child import Answer, ChildProcess
from nixl_offload.cli.check.report import Finding, Section, ok, speed_finding, unknown, warning, wrong
from nixl_offload.config import DirectoryConfig
from nixl_offload.hardware.gds import GdsReport
from nixl_offload.movers.base import MemoryKind
from nixl_offload.movers.select import candidates

_FIXES: Final = {
    "posix_uring": "sysctl kernel.io_uring_disabled=0; in a container a seccomp profile that allows io_uring "
    "(examples/docker/README.md)",
    "posix_aio": "sysctl -w fs.aio-max-nr=1048576",
    "kvikio": "where cuFile is not to be had: export KVIKIO_COMPAT_MODE=ON",
}
_PACKAGES: Final = {"kvikio": "pip install kvikio-cu13 (or kvikio-cu12, whichever fits torch's CUDA)"}
_SEE_LIBRARY: Final = "see the findings of its library and plugin"
_CONFIG_LINES: Final = {"posix_uring": "mover: posix", "posix_aio": "mover: posix", "copy": None}
"""What the config says to use a mover, where that is not ``mover:`` and its name; None: it cannot be asked for."""


def add_gds(section: Section, tier: DirectoryConfig, gds: GdsReport, *, gpu: bool) -> None:
    """Add the verdict, and on a GPU each condition. That GPUDirect Storage is not real costs speed, no more."""
    name = "GPUDirect Storage"
    if tier.mover == "posix" or not gpu:
        section.add(name, ok("not used: files are moved through host memory" + ("" if gpu else ", without a GPU")))
        return
    certain = all(fact.ok is not None for fact in gds.facts)
    fix = "fix what is named below (GDS: ...), or say mover: posix if it is not wanted"
    good = gds.real or (False if certain else None)
    section.add(name, finding_of(good, gds.verdict, fix if certain else "gdscheck -p"))
    for fact in gds.facts:
        not_needed = gds.real and not fact.ok and fact.fix is None
        words = f"{fact.words}; not needed" if not_needed else fact.words
        section.add(f"GDS: {fact.name}", finding_of(True if not_needed else fact.ok, words, fact.fix))


def finding_of(good: bool | None, words: str, fix: str | None) -> Finding:
    """Return ok, a warning, or (None) that it is not known."""
    return ok(words) if good else unknown(words, fix) if good is None else warning(words, fix)


def try_movers(
    section: Section, tier: DirectoryConfig, at: str, child: ChildProcess, *, gpu: bool, io: bool, piece_bytes: int
) -> None:
    """Start each mover in the directory ``at``, measure those that the config allows, and name the fastest."""
    allowed = candidates(tier.mover, MemoryKind.VRAM if gpu else MemoryKind.DRAM)
    common: dict[str, Any] = {"directory": at, "gpu": gpu, "threads": tier.threads}
    running = []
    section.facts["movers"] = []
    # Those that need a GPU are named as well, so that nobody wonders where they are.
    for name in dict.fromkeys([*allowed, *candidates("auto", MemoryKind.VRAM)]):
        answer = child.run("mover", name=name, **common)
        starts, reason = answer.get("ok", False), answer.get("failed") or answer["reason"]
        section.facts["movers"].append({"name": name, "ok": starts, "reason": reason, "allowed": name in allowed})
        if name not in allowed:
            found = ok(f"{reason}; not for here, or not allowed by mover: {tier.mover}")
        elif starts:
            found = ok(reason)
            running.append(name)
        else:
            fixes = (_PACKAGES, 'pip install "nixl>=1.5"') if answer.get("not_installed") else (_FIXES, _SEE_LIBRARY)
            fix = fixes[0].get(name, fixes[1])
            found = warning(f"passed over: {reason}", fix)
        section.add(f"mover {name}", found)
    if not running:
        fix = "see above what each of them lacks" if tier.mover == "auto" else "mover: auto"
        section.add("movers", wrong(f"none of those that mover: {tier.mover} allows starts here", fix))
        return
    section.facts["taken"] = running[0]
    if io:
        # Copy is what is left when nothing else starts.
        names = [name for name in running if name != "copy"] or running
        direct_io = tier.direct_io and section.state("O_DIRECT") == "ok"
        answer = child.run("file_speeds", names=names, direct_io=direct_io, piece_bytes=piece_bytes, **common)
        add_speeds(section, tier, answer, gpu=gpu)


def add_speeds(section: Section, tier: DirectoryConfig, answer: Answer, *, gpu: bool) -> None:
    """Add each mover's figures and, with ``mover: auto``, the line of the config for the fastest.

    On a GPU a server with ``mover: auto`` compares them itself at each start; else it takes the first that starts.
    """
    if "failed" in answer:
        section.add("speed", speed_finding(answer))
        return
    for name, figures in answer["speeds"].items():
        section.add(f"speed of {name}", speed_finding(figures))
    fastest = answer["fastest"]
    if fastest is None:
        return
    section.facts |= {"fastest": fastest, "io": answer["speeds"][fastest]}
    if tier.mover != "auto":
        return
    if gpu:
        section.facts["taken"] = fastest
    line = _CONFIG_LINES.get(fastest, f"mover: {fastest}")
    section.facts["config"] = line
    saves = "; this line of the config saves comparing them at each start" if gpu and line else ""
    section.add("fastest mover", ok(f"{fastest}{saves}", line))
