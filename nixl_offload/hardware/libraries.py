"""Where the loader would find a shared library, and which version it is, without loading it.

Threading: pure functions that read files; safe anywhere. Loading libcufile only to look would pull the CUDA driver into
processes that never use it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

from nixl_offload.hardware.files import beneath, names, read

_SYSTEM: Final = [
    f"{top}{below}" for top in ("/lib", "/usr/lib") for below in ("", "64", "/x86_64-linux-gnu", "/aarch64-linux-gnu")
]
_WHEELS: Final = {"libcufile.so": "nvidia_cufile", "libcudart.so": "nvidia_cuda_runtime"}


class Library(NamedTuple):
    """A shared library that was found."""

    path: str
    version: tuple[int, ...]
    """From the name of the real file, or of the wheel; empty when neither says one."""
    loadable: bool
    """False: it is there, but the loader does not look there."""

    @property
    def words(self) -> str:
        """Return ``libcufile 1.13.1 (/usr/lib/...)``."""
        name = os.path.basename(self.path).split(".so")[0]
        return " ".join(filter(None, [name, ".".join(map(str, self.version)), f"({self.path})"]))


def find_library(stem: str, root: str = "/") -> Library | None:
    """Return the best of what ``stem`` (``libcufile.so``) names here: what a process would load comes first.

    Order: loaded already, ``LD_LIBRARY_PATH``, the loader's cache and system directories, beside torch in
    site-packages (torch loads it), then CUDA's own directories, where the loader does not look. None: there is none.
    """
    pattern = re.compile(re.escape(stem) + r"\.(\d+)(?:\.\d+)*$")
    for path in _where_the_loader_looks(pattern, root):
        if os.path.exists(beneath(root, path)):
            return Library(path, _version_of_file(beneath(root, path)), loadable=True)
    for directory in sys.path:
        for wheel in names("/", os.path.join(directory, "nvidia")):  # nvidia/cufile/lib of CUDA 12, nvidia/cu13/lib
            for path in _matching(os.path.join(directory, "nvidia", wheel, "lib"), pattern):
                dist = re.compile(rf"{_WHEELS.get(stem, '(?!)')}(?:_cu\d+)?-([\d.]+)\.dist-info$")
                versions = (_numbers(found[1]) for found in map(dist.match, names("/", directory)) if found)
                return Library(path, next(versions, ()), "torch" in names("/", directory))
    for folder in ("/usr/local", "/opt"):
        for cuda in reversed(names(root, folder)):
            for inner in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
                for path in _matching(os.path.join(folder, cuda, inner), pattern, root):
                    return Library(path, _version_of_file(beneath(root, path)), loadable=False)
    return None


def _where_the_loader_looks(pattern: re.Pattern[str], root: str) -> Iterator[str]:
    """Paths, best first. The file of a path may have gone."""
    for listing, directories in (
        ("/proc/self/maps", filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))),
        ("/etc/ld.so.cache", _SYSTEM),
    ):
        paths = re.findall(r"/[\x21-\x7e]*", read(root, listing) or "")
        yield from (path for path in paths if pattern.match(os.path.basename(path)))
        for directory in directories:
            yield from _matching(directory, pattern, root)


def _version_of_file(path: str) -> tuple[int, ...]:
    number = os.path.basename(os.path.realpath(path)).partition(".so.")[2]
    # "libcufile.so.0" alone is the name to link by, no version.
    return _numbers(number) if "." in number else ()


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def _matching(directory: str, pattern: re.Pattern[str], root: str = "/") -> list[str]:
    """Libraries with a number behind, shortest first: that is the one that programs ask for."""
    found = sorted(filter(pattern.match, names(root, directory)), key=len)
    return [os.path.join(directory, name) for name in found]
