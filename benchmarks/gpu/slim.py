"""Makes a CUDA extension small: ``python -m benchmarks.gpu.slim IN OUT [--head-dim 128 --element 10bfloat16_t]``.

Keeps the machine code for one GPU architecture (sm_90), and of FlashAttention 3 only the variants that are named. The
file keeps its layout, because the code that registers kernels points into it: what goes becomes zeros, which compress
away. Needs ``strip`` of binutils. Threading: none.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
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
MIB = 1 << 20
FLASH_ATTENTION_LOOP = re.compile(rb"CollectiveMainloopFwdSm90ILi\d+E.*?EEELi(\d+)ENS_(\d+[a-z0-9_]+?)Ef")
"""The mangled name of FlashAttention 3's main loop. Its groups are the values' head size and the element type."""


@dataclass(frozen=True)
class Entry:
    """The code of one source file for one architecture. ``data`` includes the header."""

    kind: int
    architecture: int
    data: bytes


@dataclass(frozen=True)
class Slimmed:
    """What ``slim`` did."""

    containers: int
    emptied: int
    kept_bytes: int


def slim(source: Path, target: Path, *, head_dim: int | None = None, element: str | None = None) -> Slimmed:
    """Write to ``target`` what ``source`` needs on an sm_90 GPU. With ``head_dim`` and ``element``, FlashAttention's
    kernels for other head sizes and element types go too.

    A container in which nothing is wanted gets the smallest piece of machine code that was dropped. For the driver it
    is then a container for another GPU, as the original file has many, rather than a malformed one. PTX goes, so
    kernels that have no sm_90 machine code in ``source`` cannot be launched.

    Raises ValueError when ``source`` is no ELF file with CUDA code, or when nothing in it is wanted.
    """
    with source.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise ValueError(f"{source}: not a 64-bit little-endian ELF file")
    subprocess.run(["strip", "--strip-unneeded", "-o", str(target), str(source)], check=True)
    data = bytearray(target.read_bytes())
    containers = list(_containers(data))
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
    return Slimmed(
        containers=len(containers),
        emptied=sum(not entries for entries in kept),
        kept_bytes=sum(len(entry.data) for entries in kept for entry in entries),
    )


def _choice(head_dim: int | None, element: str | None) -> Callable[[Entry], bool]:
    """Return the test for what is kept. Code without a main loop of FlashAttention is never a variant of it."""
    variant = None if head_dim is None or element is None else (str(head_dim).encode(), element.encode())

    def wanted(entry: Entry) -> bool:
        if entry.kind != MACHINE_CODE or entry.architecture != ARCHITECTURE:
            return False
        variants = FLASH_ATTENTION_LOOP.findall(entry.data) if variant else []
        return not variants or variant in variants

    return wanted


def _containers(data: bytearray) -> Iterator[slice]:
    """Yield where each container of the ELF file lies, its header included."""
    for begin, end in _sections(data, SECTION):
        at = begin
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


def _sections(data: bytearray, name: str) -> Iterator[tuple[int, int]]:
    (table_at,) = struct.unpack_from("<Q", data, 40)
    header_bytes, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table_at + n * header_bytes) for n in range(count)]
    names_at = headers[names_index][4]
    for header in headers:
        begin = names_at + header[0]
        if data[begin : data.index(b"\0", begin)] == name.encode():
            yield header[4], header[4] + header[5]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, metavar="IN")
    parser.add_argument("target", type=Path, metavar="OUT")
    parser.add_argument("--head-dim", type=int, help="of FlashAttention's variants, keep this head size")
    parser.add_argument("--element", help="and this element type, by its mangled name")
    options = parser.parse_args()
    if (options.head_dim is None) != (options.element is None):
        parser.error("--head-dim and --element go together")
    try:
        done = slim(options.source, options.target, head_dim=options.head_dim, element=options.element)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"slim: {error}", file=sys.stderr)
        return 1
    kept = f"{done.kept_bytes / MIB:.1f} MiB of sm_{ARCHITECTURE} code"
    print(f"{options.target}: kept {kept}; none in {done.emptied} of {done.containers} containers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
