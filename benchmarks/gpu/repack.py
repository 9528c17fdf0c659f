"""Makes NIXL's wheel small: only the plugins that we use, and the libraries that these need.

A wheel of NIXL is 59 MB, of which a training library is more than half. What is left is found by following what each
ELF file says that it needs, so nothing hangs on names with hashes in them. RECORD stays valid.
Threading: none.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import struct
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

PLUGINS = ("POSIX", "GDS", "GDS_MT")
"""OBJ stays out: it brings an SDK of 5 MiB, and cannot be loaded without a CUDA library that torch does not bring."""
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_STRTAB = 1, 5


def repack_nixl(wheel: Path, target: Path, *, plugins: Sequence[str] = PLUGINS, compress_level: int = 9) -> None:
    """Write to ``target`` what of ``wheel`` is needed to import NIXL and to use ``plugins``. Raises ValueError when
    ``wheel`` is not built as expected: then nothing is written.
    """
    with zipfile.ZipFile(wheel) as source:
        names = [name for name in source.namelist() if not name.endswith("/")]
        kept = _kept(source, names, plugins)
        record_name = next((name for name in names if name.endswith(".dist-info/RECORD")), None)
        if record_name is None:
            raise ValueError(f"{wheel}: no RECORD")
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=compress_level) as out:
            record = []
            for name in kept:
                data = source.read(name)
                out.writestr(source.getinfo(name), data, zipfile.ZIP_DEFLATED, compress_level)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                record.append((name, f"sha256={digest}", str(len(data))))
            table = io.StringIO()
            csv.writer(table, lineterminator="\n").writerows([*record, (record_name, "", "")])
            out.writestr(record_name, table.getvalue())


def _kept(source: zipfile.ZipFile, names: Iterable[str], plugins: Sequence[str]) -> list[str]:
    """The package, its metadata, and the libraries that its extensions and ``plugins`` need, whatever their folder."""
    kept, libraries, roots = [], {}, []
    wanted = {f"libplugin_{plugin}.so" for plugin in plugins}
    for name in names:
        path = PurePosixPath(name)
        top = path.parts[0]
        if top.startswith("nixl_ep"):
            continue
        if top.endswith(".dist-info"):
            if path.name != "RECORD":
                kept.append(name)
        elif "." not in top.lstrip("."):
            kept.append(name)
            if path.suffix == ".so":
                roots.append(name)
        elif path.parent.name == "plugins" and path.name in wanted:
            roots.append(name)
            kept.append(name)
        elif top.endswith(".libs") and "plugin" not in path.name:
            libraries[path.name] = name
    if len({PurePosixPath(name).name for name in roots} & wanted) != len(wanted):
        raise ValueError(f"not all of {', '.join(sorted(wanted))} are in the wheel")
    todo, found = roots, set(roots)
    while todo:
        for needed in needed_by(source.read(todo.pop())):
            library = libraries.get(needed)
            if library is not None and library not in found:
                found.add(library)
                todo.append(library)
                kept.append(library)
    return sorted(kept)


def needed_by(elf: bytes) -> list[str]:
    """Return the names of the libraries that a 64-bit little-endian ELF file is linked with. Raises ValueError."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table_at,) = struct.unpack_from("<Q", elf, 32)
    entry_bytes, entries = struct.unpack_from("<HH", elf, 54)
    loads: list[tuple[int, int, int]] = []
    dynamic = b""
    for number in range(entries):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", elf, table_at + number * entry_bytes)
        if kind == _PT_LOAD:
            loads.append((address, offset, size))
        elif kind == _PT_DYNAMIC:
            dynamic = elf[offset : offset + size]
    tags = list(struct.iter_unpack("<QQ", dynamic[: len(dynamic) // 16 * 16]))
    strings = [value for tag, value in tags if tag == _DT_STRTAB]
    if not strings:
        return []
    base = next(strings[0] - address + offset for address, offset, size in loads if 0 <= strings[0] - address < size)
    names = []
    for tag, value in tags:
        if tag == _DT_NEEDED:
            end = elf.index(b"\0", base + value)
            names.append(elf[base + value : end].decode())
    return names
