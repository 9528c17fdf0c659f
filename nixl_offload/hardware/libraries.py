"""Where the loader would find a shared library, and which version it is, without loading it.

Threading: pure functions that read files; safe anywhere. Loading libcufile only to look would pull the CUDA driver into
processes that never use it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from nixl_offload.hardware.cufile import beneath

_SYSTEM: Final = (
    "/lib",
    "/usr/lib",
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)
_ELSEWHERE: Final = ("/usr/local", "/opt")
"""Where CUDA is installed without the loader knowing."""
_WHEELS: Final = {"libcufile.so": "nvidia_cufile", "libcudart.so": "nvidia_cuda_runtime"}
_CACHE_BYTES: Final = 16 << 20


class Library(NamedTuple):
    """A shared library that was found."""

    path: str
    version: tuple[int, ...]
    """From the name of the real file; empty when that says none."""
    loadable: bool
    """False: it is there, but the loader does not look there."""

    @property
    def words(self) -> str:
        """Return ``libcufile 1.13.1 (/usr/lib/...)``."""
        name = os.path.basename(self.path).split(".so")[0]
        number = ".".join(map(str, self.version))
        return f"{name} {number} ({self.path})" if number else f"{name} ({self.path})"


def find_library(
    stem: str, root: str = "/", environment: Mapping[str, str] | None = None, packages: list[str] | None = None
) -> Library | None:
    """Return the best of what ``stem`` (``libcufile.so``) names here: what a process would load comes first.

    Order: loaded already, ``LD_LIBRARY_PATH``, the loader's cache and system directories, beside torch in
    site-packages (``packages``, the import path by default; torch loads it), then where the loader does not look.
    None: there is none. Never raises.
    """
    environment = os.environ if environment is None else environment
    packages = sys.path if packages is None else packages
    pattern = re.compile(re.escape(stem) + r"\.(\d+)(?:\.\d+)*$")
    for path in _candidates(stem, pattern, root, environment):
        if os.path.exists(beneath(root, path)):
            return _library(path, root, loadable=True)
    for directory in packages:
        for path in _in_packages(directory, pattern):
            loadable = os.path.isdir(os.path.join(directory, "torch"))
            return Library(path, _version_of_wheel(directory, stem), loadable)
    for place in _ELSEWHERE:
        for cuda in sorted(_names(beneath(root, place)), reverse=True):
            for inner in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
                directory = os.path.join(place, cuda, inner)
                for name in _matching(beneath(root, directory), pattern):
                    return _library(os.path.join(directory, name), root, loadable=False)
    return None


def _candidates(stem: str, pattern: re.Pattern[str], root: str, environment: Mapping[str, str]) -> Iterator[str]:
    """Paths that the loader would take, best first. The file of a path may have gone."""
    for line in _text(beneath(root, "/proc/self/maps")).splitlines():
        path = line.split(maxsplit=5)[-1] if "/" in line else ""
        if pattern.match(os.path.basename(path)):
            yield path
    for directory in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if directory:
            yield from (os.path.join(directory, name) for name in _matching(beneath(root, directory), pattern))
    try:
        with open(beneath(root, "/etc/ld.so.cache"), "rb") as cache:
            cached = cache.read(_CACHE_BYTES)
    except OSError:
        cached = b""
    for entry in re.findall(rb"/[\x21-\x7e]*/" + re.escape(stem).encode() + rb"\.[0-9.]+", cached):
        yield entry.decode()
    for directory in _SYSTEM:
        yield from (os.path.join(directory, name) for name in _matching(beneath(root, directory), pattern))


def _in_packages(directory: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """NVIDIA's wheels: ``nvidia/cufile/lib`` of CUDA 12, ``nvidia/cu13/lib``."""
    wheels = os.path.join(directory, "nvidia")
    for wheel in _names(wheels):
        libraries = os.path.join(wheels, wheel, "lib")
        yield from (os.path.join(libraries, name) for name in _matching(libraries, pattern))


def _version_of_wheel(directory: str, stem: str) -> tuple[int, ...]:
    wheel = re.compile(rf"{_WHEELS.get(stem, '(?!)')}(?:_cu\d+)?-([\d.]+)\.dist-info$")
    for name in _names(directory):
        match = wheel.match(name)
        if match:
            return _numbers(match.group(1))
    return ()


def _library(path: str, root: str, *, loadable: bool) -> Library:
    real = os.path.basename(os.path.realpath(beneath(root, path)))
    number = real.partition(".so.")[2]
    # "libcufile.so.0" alone is the name to link by, no version.
    return Library(path, _numbers(number) if "." in number else (), loadable)


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def _matching(directory: str, pattern: re.Pattern[str]) -> list[str]:
    """Names with a number behind, shortest first: that is the one that programs ask for."""
    return sorted((name for name in _names(directory) if pattern.match(name)), key=len)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
