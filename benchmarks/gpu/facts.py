"""What machine this is: ``python3 benchmarks/gpu/facts.py DIR``, DIR on the filesystem to be measured.

Standard library only. Some virtual machines start with little memory and grow as it is touched, so it is touched first:
a memory tier asks for what is available. Threading: one thread.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

WANTED_BYTES = 24 << 30
"""For a memory tier of 16 GiB, and for vLLM."""
COMMANDS = """nvidia-smi
nvidia-smi -q -d PCIE,MEMORY
findmnt -T {directory}
lsblk
df -h {directory} /dev/shm
lscpu
ulimit -l
ls -l /run/udev /proc/driver/nvidia-fs
python3 -m pip list"""
GPU = "nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader"


def output_of(command: str) -> str:
    """Return what a shell command prints, errors included."""
    done = subprocess.run(command, shell=True, stdout=-1, stderr=subprocess.STDOUT, text=True, timeout=20, check=False)
    return done.stdout.strip()


def available_bytes() -> int:
    """Return what the kernel could give to processes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def grow() -> None:
    """Touch as much memory as is there, and let go of it."""
    size_bytes = min(available_bytes() // 2, WANTED_BYTES)
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size_bytes, mmap.PAGESIZE):
            memory[at] = 1


def main(directory: str) -> None:
    for command in COMMANDS.format(directory=directory).splitlines():
        print(f"$ {command}\n{output_of(command)}", flush=True)
    before_bytes = available_bytes()
    if before_bytes < WANTED_BYTES and "NIXL_OFFLOAD_PLAYED" not in os.environ:
        grow()
    after_bytes = available_bytes()
    words = (
        f"{output_of(GPU)}; {os.cpu_count()} cores, {before_bytes / 2**30:.0f} GiB available, "
        f"{after_bytes / 2**30:.0f} after touching; kernel {platform.release()}; data in {directory}"
    )
    print(json.dumps({"words": words, "available_bytes": after_bytes}))


if __name__ == "__main__":
    main(sys.argv[1])
