"""Gathers the wheels that a CUDA machine without a registry lacks: ``python -m benchmarks.gpu.kit`` (``make gpu-kit``).

Needs a registry and no GPU. What is pinned is in ``wheels.txt``; the folder then holds wheels for one Python, NIXL's
made small, and in ``fallback/`` those that are used only where the machine has none of its own. Idempotent: a folder
that is what was asked for is left alone. Exits with 1 when folder and repository are too large to be carried.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.repack import repack_nixl

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
LIMIT_MIB = 64
"""What may be carried to the machine, the repository included."""
MACHINE = ("torch", "triton", "numpy", "cupy-cuda13x")
"""What the machine must have of its own."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
"""pip takes a wheel only if its platform is named to the letter."""
MIB = 1 << 20


def pins() -> tuple[list[str], list[str]]:
    """The requirements of ``wheels.txt``: what is carried for sure, and what is only where missing."""
    always, fallback = (HERE / "wheels.txt").read_text().split("# Only where missing")
    lists = [
        [line for line in part.splitlines() if "==" in line and not line.startswith("#")] for part in (always, fallback)
    ]
    return lists[0], lists[1]


def download(requirements: list[str], python_version: str, directory: Path) -> None:
    """Fetch wheels for ``python_version`` on x86-64 Linux. Raises CalledProcessError when one is not to be had."""
    platforms = [option for name in PLATFORMS for option in ("--platform", f"{name}_x86_64")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python_version, "--implementation", "cp"]
    subprocess.run([*command, *platforms, "--platform", "any", "-d", str(directory), *requirements], check=True)


def gather(directory: Path, python_version: str) -> None:
    """Fill ``directory``, unless it is filled already."""
    always, fallback = pins()
    wanted = "\n".join([f"python {python_version}", *always, "fallback", *fallback, ""])
    stamp = directory / "contents.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{directory}: complete already")
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        fresh = Path(name)
        download(always, python_version, fresh)
        for wheel in sorted(fresh.glob("*.whl")):
            if wheel.name.startswith("nixl_cu"):
                repack_nixl(wheel, directory / wheel.name)
                print(f"{wheel.name}: {wheel.stat().st_size / MIB:.1f} MiB made small")
            else:
                shutil.copy(wheel, directory)
    download(fallback, python_version, directory / "fallback")
    stamp.write_text(wanted)


def repository_bytes() -> int:
    """What of the repository would be carried: all that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout.split(b"\0")
    except (OSError, subprocess.CalledProcessError):  # a copy without git
        return 0
    files = [REPOSITORY / name.decode() for name in names if name]
    return sum(file.stat().st_size for file in files if file.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=REPOSITORY / "build" / "gpu-kit")
    parser.add_argument("--python-version", default="3.12", help="of the machine's Python (default: 3.12)")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help="kit and repository together")
    options = parser.parse_args()
    gather(options.dir, options.python_version)
    wheels = sorted(options.dir.rglob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / MIB:8.2f} MiB  {wheel.relative_to(options.dir)}")
    kit, repository = sum(wheel.stat().st_size for wheel in wheels), repository_bytes()
    print(f"{kit / MIB:8.2f} MiB  in {len(wheels)} wheels, and {repository / MIB:.2f} MiB of repository")
    if kit + repository > options.limit_mib * MIB:
        print(f"more than {options.limit_mib:g} MiB: too large to be carried", file=sys.stderr)
        return 1
    print(f"Carry the repository and {options.dir}; on the machine: benchmarks/gpu/run.sh")
    return 0


if __name__ == "__main__":
    sys.exit(main())
