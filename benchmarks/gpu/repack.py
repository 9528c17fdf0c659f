"""Makes NIXL's wheel small: only the plugins that we use, and the libraries that these need.

A wheel of NIXL is 59 MB, of which a training library is more than half. What is left is found by following what
``readelf`` says that each file is linked with, so nothing hangs on names with hashes in them. RECORD stays valid.
Threading: none.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

PLUGINS = ("POSIX", "GDS", "GDS_MT")
"""OBJ stays out: it brings an SDK of 5 MiB, and cannot be loaded without a CUDA library that torch does not bring."""
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")


def repack_nixl(wheel: Path, target: Path, plugins: Sequence[str] = PLUGINS) -> None:
    """Write to ``target`` what of ``wheel`` is needed to import NIXL and to use ``plugins``. Raises ValueError when
    ``wheel`` is not built as expected: then nothing is written.
    """
    with zipfile.ZipFile(wheel) as source, tempfile.TemporaryDirectory() as scratch:
        source.extractall(scratch)
        kept = _kept(Path(scratch), [name for name in source.namelist() if not name.endswith("/")], plugins)
        record_name = next(name for name in source.namelist() if name.endswith(".dist-info/RECORD"))
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
            record = []
            for name in kept:
                data = source.read(name)
                out.writestr(source.getinfo(name), data, zipfile.ZIP_DEFLATED, 9)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                record.append((name, f"sha256={digest}", str(len(data))))
            table = io.StringIO()
            csv.writer(table, lineterminator="\n").writerows([*record, (record_name, "", "")])
            out.writestr(record_name, table.getvalue())


def _kept(root: Path, names: Sequence[str], plugins: Sequence[str]) -> list[str]:
    """Return the package, its metadata, and the libraries that its extensions and ``plugins`` are linked with."""
    paths = [PurePosixPath(name) for name in names if not name.startswith("nixl_ep")]
    metadata = {path for path in paths if path.parts[0].endswith(".dist-info") and path.name != "RECORD"}
    package = {path for path in paths if "." not in path.parts[0].lstrip(".")}
    wanted = {f"libplugin_{plugin}.so" for plugin in plugins}
    found = {path for path in paths if path.parent.name == "plugins" and path.name in wanted}
    if {path.name for path in found} != wanted:
        raise ValueError(f"not all of {', '.join(sorted(wanted))} are in the wheel")
    libraries = {path.name: path for path in paths if path.parts[0].endswith(".libs") and "plugin" not in path.name}
    todo = [*found, *(path for path in package if path.suffix == ".so")]
    while todo:
        command = ["readelf", "-dW", str(root / todo.pop())]
        for name in _NEEDED.findall(subprocess.run(command, check=True, capture_output=True, text=True).stdout):
            library = libraries.get(name)
            if library is not None and library not in found:
                found.add(library)
                todo.append(library)
    return sorted(map(str, metadata | package | found))
