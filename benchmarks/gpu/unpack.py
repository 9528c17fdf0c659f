"""Unpacks the kit on a machine without a registry: ``python3 -m benchmarks.gpu.unpack KIT TARGET``.

Runs before anything is installed, so it uses the standard library alone. Nothing outside TARGET is written. The last
line of output is JSON: ``{"words": ..., "pythonpath": [...]}``. Threading: one process for each archive; then all cores
compile.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.metadata
import json
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.serving.model import write_plugin

REPOSITORY = Path(__file__).resolve().parents[2]
PLUGIN = "[vllm.general_plugins]\nnixl_offload = nixl_offload.vllm.plugin:register\n"
"""As in pyproject.toml."""


def unpack(kit: Path, target: Path) -> list[Path]:
    """Unpack ``kit`` into ``target`` and return what belongs on PYTHONPATH, in that order.

    Raises OSError, EOFError, lzma.LZMAError or tarfile.TarError when an archive is missing or damaged.
    """
    archives = sorted(kit.glob("*.tar.xz"))
    if not archives:
        raise OSError(f"no archives in {kit}")
    with ProcessPoolExecutor(len(archives)) as pool:
        folders = [*pool.map(partial(_extract, target), archives)]
    fallback = target / "fallback"
    missing = [folder for folder in sorted(fallback.iterdir()) if not _is_installed(folder.name)]
    print("missing here, taken from the kit:", *(folder.name for folder in missing))
    plugin = write_plugin(target / "plugins", "nixl_offload", PLUGIN)
    compileall.compile_dir(target, quiet=2, workers=0)
    return [*(folder for folder in reversed(folders) if folder != fallback), *missing, plugin, REPOSITORY]


def _extract(target: Path, archive: Path) -> Path:
    folder = target / archive.name.removesuffix(".tar.xz")
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return folder


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kit", type=Path, metavar="KIT", help="the folder that `make gpu-kit` filled")
    parser.add_argument("target", type=Path, metavar="TARGET", help="a folder that is new or empty")
    options = parser.parse_args()
    start = time.monotonic()
    paths = unpack(options.kit.resolve(), options.target.resolve())
    print(json.dumps({"words": f"{time.monotonic() - start:.0f} s", "pythonpath": [str(path) for path in paths]}))


if __name__ == "__main__":
    main()
