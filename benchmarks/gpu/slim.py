"""Makes a CUDA extension small, for the kit.

Keeps the machine code for one GPU architecture (sm_90), and of FlashAttention 3 only the variants that are named. The
file keeps its layout, because the code that registers kernels points into it: what goes becomes zeros, which compress
away. Needs ``strip`` and ``readelf`` of binutils. Threading: none.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURE = 90
MACHINE_CODE = 2
"""The kind of an entry that holds machine code. The other kind in use, 1, is PTX."""
CONTAINER_MAGIC = 0xBA55ED50
CONTAINER_HEADER = struct.Struct("<IHHQ")
"""Magic number, version, bytes of this header, bytes of all entries."""
ENTRY_HEADER = struct.Struct("<HHIQ")
"""Kind, version, bytes of this header, bytes of the code. The architecture stands at ``ENTRY_ARCHITECTURE_AT``."""
ENTRY_ARCHITECTURE_AT = 28
SECTION = ".nv_fatbin"
FLASH_ATTENTION_LOOP = re.compile(rb"CollectiveMainloopFwdSm90ILi\d+E.*?EEELi(\d+)ENS_(\d+[a-z0-9_]+?)Ef")
"""The mangled name of FlashAttention 3's main loop. Its groups are the values' head size and the element type."""


@dataclass(frozen=True)
class Entry:
    """The code of one source file for one architecture. ``data`` includes the header."""

    kind: int
    architecture: int
    data: bytes


def slim(source: Path, target: Path, *, head_dim: int | None = None, element: str | None = None) -> int:
    """Write to ``target`` what ``source`` needs on an sm_90 GPU. With ``head_dim`` and ``element``, FlashAttention's
    kernels for other head sizes and element types go too. Returns the bytes of machine code that were kept.

    A container in which nothing is wanted gets the smallest piece of machine code that was dropped. For the driver it
    is then a container for another GPU, as the original file has many, rather than a malformed one. PTX goes, so
    kernels that have no sm_90 machine code in ``source`` cannot be launched.

    Raises CalledProcessError when ``source`` is no ELF file, ValueError when it has no CUDA code that is wanted.
    """
    subprocess.run(["strip", "--strip-unneeded", "-o", str(target), str(source)], check=True)
    data = bytearray(target.read_bytes())
    containers = list(_containers(data, _section(target)))
    if not containers:
        raise ValueError(f"{source}: no CUDA code ({SECTION})")
    wanted = _choice(head_dim, element)
    kept = [[entry for entry in _entries(data, container) if wanted(entry)] for container in containers]
    if not any(kept):
        raise ValueError(f"{source}: nothing for sm_{ARCHITECTURE}, head size {head_dim}, element {element}")
    dropped = (entry for container in containers for entry in _entries(data, container) if not wanted(entry))
    filler = min(
        (entry.data for entry in dropped if entry.kind == MACHINE_CODE), key=lambda code: (len(code), code), default=b""
    )
    for container, entries in zip(containers, kept, strict=True):
        code = b"".join(entry.data for entry in entries)
        _replace(data, container, code or filler)
    target.write_bytes(data)
    return sum(len(entry.data) for entries in kept for entry in entries)


def _choice(head_dim: int | None, element: str | None) -> Callable[[Entry], bool]:
    """Return the test for what is kept. Code without a main loop of FlashAttention is never a variant of it."""
    variant = None if head_dim is None or element is None else (str(head_dim).encode(), element.encode())

    def wanted(entry: Entry) -> bool:
        if entry.kind != MACHINE_CODE or entry.architecture != ARCHITECTURE:
            return False
        variants = FLASH_ATTENTION_LOOP.findall(entry.data) if variant else []
        return not variants or variant in variants

    return wanted


def _section(library: Path) -> tuple[int, int]:
    """Return where the section of CUDA code begins and ends in a file; (0, 0): there is none."""
    command = ["readelf", "-SW", str(library)]
    found = re.search(
        rf"{re.escape(SECTION)} +\w+ +\w+ (\w+) (\w+)",
        subprocess.run(command, check=True, capture_output=True, text=True).stdout,
    )
    begin, length = (int(found[1], 16), int(found[2], 16)) if found else (0, 0)
    return begin, begin + length


def _containers(data: bytearray, section: tuple[int, int]) -> Iterator[slice]:
    """Yield where each container lies, its header included."""
    at, end = section
    while at + CONTAINER_HEADER.size <= end:
        magic, _, header_bytes, length = CONTAINER_HEADER.unpack_from(data, at)
        if magic != CONTAINER_MAGIC:
            at += 8
            continue
        stop = at + header_bytes + length
        if stop > end:
            raise ValueError(f"a container at {at} ends behind its section")
        yield slice(at, stop)
        at = (stop + 7) // 8 * 8


def _entries(data: bytearray, container: slice) -> Iterator[Entry]:
    _, _, header_bytes, _ = CONTAINER_HEADER.unpack_from(data, container.start)
    at = container.start + header_bytes
    while at < container.stop:
        kind, _, header_bytes, code_bytes = ENTRY_HEADER.unpack_from(data, at)
        (architecture,) = struct.unpack_from("<I", data, at + ENTRY_ARCHITECTURE_AT)
        stop = at + header_bytes + code_bytes
        if stop > container.stop or stop == at:
            raise ValueError(f"an entry at {at} does not fit its container")
        yield Entry(kind, architecture, bytes(data[at:stop]))
        at = stop


def _replace(data: bytearray, container: slice, code: bytes) -> None:
    """Let ``container`` hold ``code``, and zeros behind it. It cannot grow: one that is too small is emptied."""
    magic, version, header_bytes, length = CONTAINER_HEADER.unpack_from(data, container.start)
    if len(code) > length:
        code = b""
    data[container.start + header_bytes : container.stop] = code + bytes(length - len(code))
    CONTAINER_HEADER.pack_into(data, container.start, magic, version, header_bytes, len(code))
