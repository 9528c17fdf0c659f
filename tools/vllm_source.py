"""Reads the files of a vLLM; downloads its source distribution, compares the digest, and keeps it in ``build/``.

Threading: one process at a time; an interrupted download leaves nothing under the final name. Standard library only.
"""

from __future__ import annotations

import hashlib
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

VERSION: Final = "0.33.0"
"""The version of vLLM that the tests run."""
URL: Final = (
    "https://files.pythonhosted.org/packages/f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/"
    f"vllm-{VERSION}.tar.gz"
)
SHA256: Final = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
ARCHIVE: Final = Path(__file__).resolve().parents[1] / "build" / f"vllm-{VERSION}.tar.gz"


def source_archive() -> Path:
    """Return the source distribution (45 MB), downloaded on first use. Raises ValueError if its digest is wrong."""
    if not ARCHIVE.is_file():
        ARCHIVE.parent.mkdir(exist_ok=True)
        part = ARCHIVE.with_suffix(".part")
        urllib.request.urlretrieve(URL, part)
        part.rename(ARCHIVE)
    if hashlib.sha256(ARCHIVE.read_bytes()).hexdigest() != SHA256:
        raise ValueError(f"{ARCHIVE} does not have the digest {SHA256}; remove it and try again")
    return ARCHIVE


def read_files(source: Path, *folders: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of each file whose path, relative to the root, starts with one of ``folders``.

    ``source``: a source tree, a source distribution (``.tar.gz``) or a wheel.
    """
    if source.is_dir():
        for file in sorted(source.rglob("*")):
            path = file.relative_to(source).as_posix()
            if path.startswith(folders) and file.is_file():
                yield path, file.read_bytes()
    elif source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            for path in wheel.namelist():
                if path.startswith(folders) and not path.endswith("/"):
                    yield path, wheel.read(path)
    else:
        with tarfile.open(source) as archive:
            for member in archive:
                path = member.name.partition("/")[2]
                if member.isfile() and path.startswith(folders):
                    content = archive.extractfile(member)
                    assert content is not None
                    yield path, content.read()
