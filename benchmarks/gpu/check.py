"""Everything that only a CUDA machine can show, in two calls: ``python3 benchmarks/gpu/check.py --call 1`` (or ``make
gpu-check CALL=1``), then ``--call 2``. Standard library only: the rest comes out of the kit. See README.md beside this.

The tables ``CALL_1`` and ``CALL_2`` are the program. Each stage is a process group with a limit of its own, which is
killed at the end. Its result is appended to ``results.jsonl`` in ``$OUT`` as it ends. The last lines of output are
the verdicts. Exit status: 0 nothing was wrong (a stage that its limit cut off is not), 1 something was, 4 no GPU here.
Threading: one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import itertools
import json
import mmap
import os
import platform
import re
import shlex
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
OK, WRONG, FAILED, CUT_OFF, SKIPPED = "ok", "WRONG", "FAILED", "cut off", "skipped"
"""WRONG: other bytes, other tokens, a red test. FAILED: the stage did not come to a result."""

# The ladder: on which of its own kernels vLLM runs. A stage that climbs goes to the next rung when it fails.
RUNGS: dict[str, dict[str, str]] = {
    "fa3": {"GPU_CHECK_ATTENTION": "FLASH_ATTN"},
    "triton": {"GPU_CHECK_ATTENTION": "TRITON_ATTN"},
    "triton-v1": {"GPU_CHECK_ATTENTION": "TRITON_ATTN", "VLLM_USE_V2_MODEL_RUNNER": "0"},
}


@dataclass(frozen=True)
class Verdict:
    """What came of a stage: a kind, a sentence, and the figures for the log."""

    kind: str
    words: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def said(code: int | None, output: str) -> Verdict:
    """Of a stage whose last JSON line has ``words``, and perhaps ``wrong`` or ``skipped``. ``code`` None: cut off."""
    for line in reversed(output.splitlines()):
        if line.startswith("{") and '"words"' in line:
            with contextlib.suppress(ValueError):
                figures = json.loads(line)
                kind = next((kind for kind in (WRONG, SKIPPED) if figures.get(kind.lower())), OK)
                return Verdict(kind, figures.pop("words"), figures)
    return _without_result(code, output)


_TEST = re.compile(
    r"^(tests/\S+?\.py::[\w:]+(?:\[.*?\])?) ?(?:(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b)?", re.MULTILINE
)
_BROKEN = re.compile(r"the device's context is broken.*")
PYTEST_ENDS = (None, 0, 1, 5)
"""Any other status: a test crashed, or left the device's context broken. The tests behind it have not run."""


def tested(code: int | None, output: str) -> Verdict:
    """Of ``pytest -v``, run once or more; also of one that was cut off, or that crashed in the midst of a test."""
    outcomes: dict[str, str] = {}
    for name, outcome in _TEST.findall(output):
        outcomes[name] = outcome or outcomes.get(name, "")
    counts = Counter(outcome.lower() for outcome in outcomes.values() if outcome)
    bad = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")] + _BROKEN.findall(output)
    unended = [name for name, outcome in outcomes.items() if not outcome]
    bad += unended[:-1] if code is None else unended
    words = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "no test"
    figures = {"counts": dict(counts), "bad": bad}
    if bad:
        return Verdict(WRONG, f"{words}; {len(bad)} bad, first {bad[0]}", figures)
    if code not in (None, 0, 5):
        return replace(_without_result(code, output), figures=figures)
    if code is None:
        return Verdict(CUT_OFF, f"{words}; then {unended[-1] if unended else 'nothing'}", figures)
    return Verdict(OK if counts["passed"] else SKIPPED, words, figures)


def _without_result(code: int | None, output: str) -> Verdict:
    if code is None:
        return Verdict(CUT_OFF, "not over by its limit")
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    causes = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: (?!Engine core)", line)] or lines
    how = f"killed by signal {-code}" if code < 0 else f"status {code}"
    return Verdict(FAILED, f"{how}: {causes[-1].strip()[:200]}")


@dataclass(frozen=True)
class Stage:
    """``command`` may name {python} {bench} {kit} {scratch} {data} {repository}."""

    name: str
    limit_s: float
    command: str
    verdict: Callable[[int | None, str], Verdict] = said
    climbs: bool = False
    """Goes to the next rung when it fails, and what works is kept."""
    early: bool = False
    """Started while the stage before it runs; it imports, then waits for a line on stdin.

    Stages that climb or are early, and the last one, may use the time that earlier ones left over.
    """


PYTEST = "{python} -m pytest -v -m gpu -c pyproject.toml -p no:cacheprovider --timeout=60 -W default --tb=short "
PYTEST += "--basetemp={data}/pytest "
# A filesystem in memory shows the movers where the disk is not the limit. All of it is gone with the process group: the
# mount is private, the loop device is released with it, the image has no name.
LOOP = """unshare -m bash -c '
cd {scratch}; mkdir -p loop; image=$(mktemp -p /dev/shm); truncate -s 8G $image; mkfs.ext4 -q $image
device=$(losetup --find --show --direct-io=on $image) && mount $device loop || skipped=yes
rm $image; losetup -d $device
[ -z "$skipped" ] || {{ echo {{\\"words\\": \\"no loop device with direct I/O\\", \\"skipped\\": true}}; exit; }}
cd {repository}; exec {bench} engine --dir {scratch}/loop --seconds 45'"""
KERNELS = " ".join(f"tests/gpu/test_{name}_cuda.py" for name in ("kernels", "streams", "packer"))
ENGINE = "tests/gpu/test_engine_cuda.py -k 'per_layer or large or rots or came_with'"
REST = ("movers", "autotune", "tensor_digests")
SMOKE = "{python} -m benchmarks.gpu.smoke "
RACE = "{python} -m benchmarks.gpu.race --dir {data} "

CALL_1 = (
    Stage("unpack", 20, "{python} -m benchmarks.gpu.unpack {kit} {scratch}/kit"),
    Stage("machine", 8, "{python} benchmarks/gpu/check.py --facts {data}"),
    Stage("movers", 20, "env CUFILE_LOGGING_LEVEL=INFO {bench} movers --dir {data}"),
    Stage("tests of kernels", 50, PYTEST + KERNELS, tested),
    Stage("vLLM with ours", 22, SMOKE + "memory+slab {data}/ours", climbs=True, early=True),
    Stage("another, restarted", 14, SMOKE + "memory+slab {data}/ours --again", early=True),
    Stage("vLLM with its own", 14, SMOKE + "vllm-cpu {data}/its-own", early=True),
)
CALL_2 = (
    Stage("unpack", 20, "{python} -m benchmarks.gpu.unpack {kit} {scratch}/kit"),
    Stage("machine", 8, "{python} benchmarks/gpu/check.py --facts {data}"),
    Stage("kernels and bus", 47, "{bench} kernels bus --dir {data} --seconds 45"),
    Stage("prefix", 45, RACE + "prefix", climbs=True, early=True),
    Stage("memory", 40, RACE + "memory", early=True),
    Stage("vllm-cpu", 40, RACE + "vllm-cpu", early=True),
    Stage("prefix", 33, RACE + "prefix", early=True),
    Stage("memory", 33, RACE + "memory", early=True),
    Stage("vllm-cpu", 33, RACE + "vllm-cpu", early=True),
    Stage("memory+slab", 38, RACE + "memory+slab", early=True),
    Stage("with graphs", 40, RACE + "memory --graphs", early=True),
    Stage("vLLM's layout", 33, RACE + "memory --keep-layout", early=True),
    Stage("files in memory", 50, LOOP),
    Stage("tests of the engine", 45, PYTEST + ENGINE, tested),
    Stage("tests of movers", 25, PYTEST + " ".join(f"tests/gpu/test_{name}_cuda.py" for name in REST), tested),
)
CALLS = {1: CALL_1, 2: CALL_2}
TOTAL_S = {1: 150, 2: 540}
"""What a call may take; the limits of its stages add up to less."""
SLOW = 10
"""How many times that the stages of a rehearsal may take, on two cores or so."""

WANTED_BYTES = 24 << 30
"""For a memory tier of 16 GiB, and for vLLM. Some virtual machines have less available until it is touched."""
FACTS = """nvidia-smi
nvidia-smi -q -d PCIE,MEMORY
findmnt -T {directory}
lsblk
df -h {directory} /dev/shm
lscpu
ulimit -l
ls -l /run/udev /proc/driver/nvidia-fs
python3 -m pip list"""
GPU = "nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader"


class _Process(NamedTuple):
    started: subprocess.Popen[bytes]
    log: Path


class Check:
    """Runs stages one after the other. ``words``: what commands may name. Owns the processes it starts."""

    def __init__(self, out: Path, scratch: Path, environment: Mapping[str, str], words: Mapping[str, str]) -> None:
        self._out, self._scratch, self._words = out, scratch, {"repository": str(REPOSITORY), **words}
        self.environment = dict(environment)
        self._early: tuple[Stage, str, _Process] | None = None
        self.rungs = list(RUNGS)
        """From the one on that is known or hoped to work."""
        self.verdicts: list[tuple[Stage, Verdict]] = []

    def run(self, stages: Sequence[Stage]) -> int:
        """Run all and return the exit status."""
        begun_s, allowed_s = time.monotonic(), 0.0
        for stage, following in itertools.zip_longest(stages, stages[1:]):
            allowed_s += stage.limit_s
            stage_begun_s = time.monotonic()
            end_s = begun_s + allowed_s
            if following and not (stage.climbs or stage.early):
                end_s = min(end_s, stage_begun_s + stage.limit_s)
            verdict = self._run_stage(stage, end_s, following if following and following.early else None)
            self.verdicts.append((stage, verdict))
            seconds = round(time.monotonic() - stage_begun_s, 1)
            record = {"stage": stage.name, "seconds": seconds, "rung": self.rungs[0], **asdict(verdict)}
            with (self._out / "results.jsonl").open("a") as results:
                results.write(json.dumps(record) + "\n")
            print(f"{stage.name}: {verdict.kind}, {seconds:.0f} s: {verdict.words}", flush=True)
            self.add_packages(verdict.figures.get("pythonpath", []))
        print(f"\n{time.monotonic() - begun_s:.0f} s", *self._summary(), sep="\n")
        return int(any(verdict.kind in (WRONG, FAILED) for _, verdict in self.verdicts))

    def close(self) -> None:
        """End what was started early and has had no turn."""
        if self._early:
            self._end(self._early[2])
            self._early = None

    def _run_stage(self, stage: Stage, end_s: float, following: Stage | None) -> Verdict:
        """Run one, as often as the ladder or a crashed test asks for."""
        rungs, output, options = self.rungs, "", ""
        if self._early and self._early[:2] == (stage, rungs[0]):
            process, self._early = self._early[2], None
        else:
            self.close()
            process = self._start(stage, rungs[0])
        if following:
            self._early = (following, rungs[0], self._start(following, rungs[0]))
        while True:
            code = self._wait(process, end_s)
            output += process.log.read_text(errors="replace")
            verdict = stage.verdict(code, output)
            if stage.climbs and verdict.kind in (OK, WRONG):
                self.rungs = rungs
                (self._out / "rung").write_text(rungs[0])
            if stage.climbs and verdict.kind == FAILED and len(rungs) > 1 and time.monotonic() < end_s:
                print(f"{stage.name}: {rungs[0]} failed, {verdict.words}", flush=True)
                rungs, output = rungs[1:], ""
            elif stage.verdict is tested and code not in PYTEST_ENDS:
                before = options
                options = "".join(f" --deselect {shlex.quote(name)}" for name, _ in _TEST.findall(output))
                if options == before:  # not even one more test was started
                    return verdict
            else:
                return verdict
            process = self._start(stage, rungs[0], options)

    def _start(self, stage: Stage, rung: str, options: str = "") -> _Process:
        number, log = tempfile.mkstemp(prefix=f"{stage.name}, {rung}, ", suffix=".log", dir=self._scratch)
        with open(number, "wb") as file:
            process = subprocess.Popen(
                shlex.split(stage.command.format_map(self._words) + options),
                cwd=REPOSITORY,
                env=self.environment | RUNGS[rung],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return _Process(process, Path(log))

    def _wait(self, process: _Process, end_s: float) -> int | None:
        """Let a process go on, wait for it, and end its whole group. None: it was not over in time."""
        try:
            with contextlib.suppress(OSError):
                process.started.stdin.write(b"go\n")  # type: ignore[union-attr]
                process.started.stdin.close()  # type: ignore[union-attr]
            return process.started.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._end(process)

    def _end(self, process: _Process) -> None:
        """End the group of a process, keep what it said, and remove its engine's shared memory."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.started.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.started.wait(10)  # a driver that hangs may keep even this from ending it
        with (self._out / "check.log").open("ab") as log:
            log.write(f"\n== {process.log.name}\n".encode() + process.log.read_bytes())
        for path in glob.glob(f"/dev/shm/*{self._scratch.name}*"):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def add_packages(self, folders: Sequence[str]) -> None:
        """Put folders first on the path of Python, and their CUDA libraries on that of the loader."""
        for name, first in (("PYTHONPATH", folders), ("LD_LIBRARY_PATH", libraries(folders))):
            paths = [*first, *self.environment.get(name, "").split(os.pathsep)]
            self.environment[name] = os.pathsep.join(dict.fromkeys(filter(None, paths)))

    def _summary(self) -> list[str]:
        """Return at most ten lines: one for each stage, one for all stages of the race."""
        lines: dict[str, list[str]] = {}
        for stage, verdict in self.verdicts:
            if stage.command.startswith(RACE):
                lines.setdefault("race", []).append(f"{stage.name} {verdict.figures.get('short', verdict.kind)}")
            else:
                lines[stage.name] = [f"{verdict.kind}: {verdict.words}"]
        return [f"{name}: {'; '.join(words)}"[:500] for name, words in lines.items()]


def libraries(folders: Sequence[str]) -> list[str]:
    """Where libcudart and libcufile are, which NIXL wants of the loader: in torch's packages, or CUDA's own."""
    places = [f"{folder}/nvidia/{name}/lib" for folder in folders for name in ("cu13", "cuda_runtime", "cufile")]
    wanted = ("libcudart.so.1[23]", "libcufile.so.0")
    return [
        place for place in (*places, "/usr/local/cuda/lib64") if any(glob.glob(f"{place}/{name}") for name in wanted)
    ]


def data_directory(scratch: Path) -> Path:
    """The first of the usual places on ext4 or XFS that takes O_DIRECT: cuFile refuses a filesystem in memory."""
    for place in (os.environ.get("TMPDIR"), "/var/tmp", str(REPOSITORY), os.environ.get("HOME")):
        if not place or not os.access(place, os.W_OK):
            continue
        kind = subprocess.run(["stat", "-fc", "%T", place], capture_output=True, text=True, check=False).stdout.strip()
        with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=place) as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
            if kind in ("ext2/ext3", "xfs"):
                return Path(tempfile.mkdtemp(prefix="gpu-check-", dir=place))
    return scratch


def environment_of(out: Path, scratch: Path) -> dict[str, str]:
    """What every stage starts with: nobody is asked, only loopback is used, caches lie in ``scratch``."""
    own = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TRITON_CACHE_DIR": f"{scratch}/tc",
        "VLLM_CACHE_ROOT": f"{scratch}/vc",
        "TMPDIR": str(scratch),
        "GPU_CHECK_ID": scratch.name,
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "300",
        "CUFILE_ENV_PATH_JSON": f"{REPOSITORY}/nixl_offload/configs/cufile.json",
        "CUFILE_LOGFILE_PATH": f"{out}/cufile.log",
        "CUFILE_LOGGING_LEVEL": "ERROR",
    }
    found = libraries([*sys.path, *site.getsitepackages()])
    own["LD_LIBRARY_PATH"] = os.pathsep.join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {"HOME": str(scratch), **os.environ, **own}


def played_environment(scratch: Path) -> dict[str, str]:
    """The environment in which host memory plays the device.

    vLLM's libraries are linked with a driver: this makes one whose functions all fail.
    """
    sys.path.insert(0, str(REPOSITORY))
    from tests.vllm.played import plugin

    made = plugin.environment(scratch / "played")
    names = ("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
    source = "".join(f"int {name}() {{ return 999; }}\n" for name in names)
    library = scratch / "played" / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-o", library, "-xc", "-"], input=source, text=True, check=True)
    return made


def output_of(command: str) -> str:
    """Return what a shell command prints, errors included."""
    done = subprocess.run(command, shell=True, stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=20, check=False)
    return done.stdout.strip()


def available_bytes() -> int:
    """Return what the kernel could give to processes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def grow() -> None:
    """Touch half of the memory, and let go of it."""
    size_bytes = min(available_bytes() // 2, WANTED_BYTES)
    mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def facts(directory: str) -> None:
    """Print what machine this is. ``directory`` is on the filesystem to be measured."""
    subprocess.run(f"set -x\n{FACTS.format(directory=directory)}", shell=True, stderr=subprocess.STDOUT, check=False)
    before_bytes = available_bytes()
    if before_bytes < WANTED_BYTES and "NIXL_OFFLOAD_PLAYED" not in os.environ:
        grow()
    after_bytes = available_bytes()
    words = (
        f"{output_of(GPU)}; {os.cpu_count()} cores, {before_bytes / 2**30:.0f} GiB available, "
        f"{after_bytes / 2**30:.0f} after touching; kernel {platform.release()}; data in {directory}"
    )
    print(json.dumps({"words": words, "available_bytes": after_bytes}))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--call", type=int, choices=CALLS)
    parser.add_argument("--facts", metavar="DIR", help="only print what machine this is")
    parser.add_argument("--played", action="store_true", help="a rehearsal: host memory plays the GPU, in small")
    options = parser.parse_args()
    if options.facts:
        facts(options.facts)
        return 0
    if not options.call:
        parser.error("--call 1 or --call 2")
    if not options.played and subprocess.run("nvidia-smi", shell=True, capture_output=True, check=False).returncode:
        print("gpu-check: no NVIDIA GPU here: nvidia-smi does not answer", file=sys.stderr)
        return 4
    out = Path(os.environ.get("OUT", "gpu-results")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        data = data_directory(scratch)
        kit = os.environ.get("KIT", f"{REPOSITORY}/build/gpu-kit")
        bench = f"{sys.executable} -m benchmarks.gpu{' --emulate' if options.played else ''}"
        words = {"python": sys.executable, "bench": bench, "kit": kit, "scratch": name, "data": str(data)}
        check = Check(out, scratch, environment_of(out, scratch), words)
        if options.played:
            check.environment |= played_environment(scratch)
            check.environment["LD_LIBRARY_PATH"] += f":{scratch}/played"
        rung = os.environ.get("RUNG") or ((out / "rung").read_text() if (out / "rung").exists() else "fa3")
        if rung not in RUNGS:
            parser.error(f"RUNG is one of {', '.join(RUNGS)}, not {rung}")
        check.rungs = check.rungs[check.rungs.index(rung) :]
        try:
            slow = SLOW if options.played else 1
            stages = [replace(stage, limit_s=slow * stage.limit_s) for stage in CALLS[options.call]]
            return check.run(stages if Path(kit).is_dir() else stages[1:])
        finally:
            check.close()
            shutil.rmtree(data, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
