"""Builds the emulated cuFile and CUDA runtime with gcc, and talks to the emulation through its control file.

Threading: none. The libraries are for ``LD_LIBRARY_PATH`` of a child process: the loader reads it at start only.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent

PLACES = [
    "reads",
    "writes",
    "buffers",
    "files",
    "fail_read_nth",
    "fail_write_nth",
    "short_read_nth",
    "short_write_nth",
    "short_bytes",
    "delay_us",
    "fail_register",
    "fail_status",
]
"""As the enum in cufile.c."""


def build_emulation(directory: Path) -> None:
    """Compile both libraries into ``directory``. Raises CalledProcessError with gcc's words."""
    common = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    libraries = {
        "libcufile.so.0": ["cufile.c", "-pthread"],
        "libcudart.so.12": ["cudart.c", f"-Wl,--version-script={HERE / 'cudart.map'}"],
    }
    for library, (source, option) in libraries.items():
        command = [*common, f"-Wl,-soname,{library}", "-o", str(directory / library), str(HERE / source), option]
        subprocess.run(command, check=True, capture_output=True, text=True)


class Control:
    """The numbers of the control file, by name: ``control["fail_read_nth"] = 3``."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(PLACES)))
        self._numbers = np.memmap(path, dtype=np.int64, mode="r+", shape=(len(PLACES),))

    def __getitem__(self, place: str) -> int:
        return int(self._numbers[PLACES.index(place)])

    def __setitem__(self, place: str, value: int) -> None:
        self._numbers[PLACES.index(place)] = value

    def reset(self) -> None:
        """No faults, and counting from 0; what is registered stays counted."""
        for place in PLACES:
            if place not in {"buffers", "files"}:
                self[place] = 0
