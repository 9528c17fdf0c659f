"""Builds the emulated cuFile, CUDA runtime and CUDA driver with gcc, and talks to the emulation.

Threading: none. The libraries are for ``LD_LIBRARY_PATH`` of a child process: the loader reads it at start only.
"""

from __future__ import annotations

import ctypes
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
    "max_register",
    "largest",
    "bounced",
    "fail_file",
]
"""As the enum in cufile.c."""

DRIVER_PLACES = ["copies", "syncs", "fail_copy_nth", "fail_pin", "sync_us"]
"""As the enum in cuda.c."""


def build_emulation(directory: Path) -> None:
    """Compile cuFile and the runtime into ``directory``. Raises CalledProcessError with gcc's words."""
    _compile(directory / "libcufile.so.0", "cufile.c", "-pthread", "-ldl")
    _compile(directory / "libcudart.so.12", "cudart.c", f"-Wl,--version-script={HERE / 'cudart.map'}")


def build_driver(directory: Path) -> None:
    """Compile the driver into ``directory``, apart from the rest: with it, torch and others believe in a GPU."""
    _compile(directory / "libcuda.so.1", "cuda.c", "-pthread")


def _compile(library: Path, source: str, *options: str) -> None:
    command = ["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += [f"-Wl,-soname,{library.name}", "-o", str(library), str(HERE / source), *options]
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


class Driver:
    """The emulated driver as this process has loaded it: device memory, and its numbers by name."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self._numbers = (ctypes.c_int64 * len(DRIVER_PLACES)).in_dll(self.library, "emulated_cuda")

    def __getitem__(self, place: str) -> int:
        return int(self._numbers[DRIVER_PLACES.index(place)])

    def __setitem__(self, place: str, value: int) -> None:
        self._numbers[DRIVER_PLACES.index(place)] = value

    def reset(self) -> None:
        """No faults, and counting from 0."""
        for place in DRIVER_PLACES:
            self[place] = 0
