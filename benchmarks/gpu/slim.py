"""Makes a CUDA extension small, for the kit.

Keeps the machine code for one GPU architecture (sm_90), and of FlashAttention 3 only the variants that are named. The
file keeps its layout, because the code that registers kernels points into it: what goes becomes zeros, which compress
away. Needs ``strip`` and ``readelf`` of binutils. Threading: none.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
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
    variant = None if head_dim is None or element is None else (str(head_dim).encode(), element.encode())
    kept: list[tuple[slice, bytes]] = []
    dropped: list[bytes] = []
    for container in _containers(data, *_section(target)):
        wanted: list[bytes] = []
        for is_ours, code in _entries(data, container):
            # Code without a main loop of FlashAttention is never a variant of it.
            variants = FLASH_ATTENTION_LOOP.findall(code) if variant and is_ours else []
            (wanted if is_ours and (not variants or variant in variants) else dropped).append(code)
        kept.append((container, b"".join(wanted)))
    if not any(code for _, code in kept):
        raise ValueError(f"{source}: no CUDA code for sm_{ARCHITECTURE}, head size {head_dim}, element {element}")
    machine_code = [code for code in dropped if ENTRY_HEADER.unpack_from(code)[0] == MACHINE_CODE]
    filler = min(machine_code, key=lambda code: (len(code), code), default=b"")
    for container, code in kept:
        _replace(data, container, code or filler)
    target.write_bytes(data)
    return sum(len(code) for _, code in kept)


def _section(library: Path) -> tuple[int, int]:
    """Return where the section of CUDA code begins and ends in a file; (0, 0): there is none."""
    command = ["readelf", "-SW", str(library)]
    found = re.search(
        rf"{re.escape(SECTION)} +\w+ +\w+ (\w+) (\w+)",
        subprocess.run(command, check=True, capture_output=True, text=True).stdout,
    )
    begin, length = (int(found[1], 16), int(found[2], 16)) if found else (0, 0)
    return begin, begin + length


def _containers(data: bytearray, at: int, end: int) -> Iterator[slice]:
    """Yield where each container between ``at`` and ``end`` lies, its header included."""
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


def _entries(data: bytearray, container: slice) -> Iterator[tuple[bool, bytes]]:
    """Yield each source file's code for one architecture, its header included, and whether it is for sm_90."""
    _, _, header_bytes, _ = CONTAINER_HEADER.unpack_from(data, container.start)
    at = container.start + header_bytes
    while at < container.stop:
        kind, _, header_bytes, code_bytes = ENTRY_HEADER.unpack_from(data, at)
        (architecture,) = struct.unpack_from("<I", data, at + ENTRY_ARCHITECTURE_AT)
        stop = at + header_bytes + code_bytes
        if stop > container.stop or stop == at:
            raise ValueError(f"an entry at {at} does not fit its container")
        yield (kind, architecture) == (MACHINE_CODE, ARCHITECTURE), bytes(data[at:stop])
        at = stop


def _replace(data: bytearray, container: slice, code: bytes) -> None:
    """Let ``container`` hold ``code``, and zeros behind it. It cannot grow: one that is too small is emptied."""
    magic, version, header_bytes, length = CONTAINER_HEADER.unpack_from(data, container.start)
    if len(code) > length:
        code = b""
    data[container.start + header_bytes : container.stop] = code + bytes(length - len(code))
    CONTAINER_HEADER.pack_into(data, container.start, magic, version, header_bytes, len(code))
