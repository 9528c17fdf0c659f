"""Unpacks the kit on a machine without a registry: ``python3 benchmarks/gpu/unpack.py KIT TARGET``.

Runs before anything is installed, so it uses the standard library and pip alone. Nothing outside TARGET is written. The
last line of output is JSON: ``{"words": ..., "pythonpath": [...]}``. Threading: one process for each archive, and one
for pip; then all cores compile.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.metadata
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def unpack(kit: Path, target: Path) -> list[Path]:
    """Unpack ``kit`` into ``target`` and return what belongs on PYTHONPATH, in that order.

    Raises OSError, ValueError, EOFError, lzma.LZMAError, tarfile.TarError, or RuntimeError (by pip) when a part of the
    kit is missing, damaged, or for another Python.
    """
    archives: dict[str, str] = json.loads((kit / "manifest.json").read_text())["archives"]
    with ProcessPoolExecutor(len(archives) + 1) as pool:
        jobs = [pool.submit(_unpack_archive, kit / name, target / place) for name, place in archives.items()]
        jobs.append(pool.submit(_install, _wheels(kit), target / "site"))
        for job in jobs:
            job.result()
    _write_plugin(target / "plugins")
    compileall.compile_dir(target, quiet=2, workers=0)
    folders = [name for name in ("vllm", "deps") if (target / name).is_dir()]
    return [*(target / name for name in [*folders, "site", "plugins"]), REPOSITORY]


def _unpack_archive(archive: Path, place: Path) -> None:
    if archive.name.endswith(".tar.xz"):
        with tarfile.open(archive) as source:
            source.extractall(place, filter="data")
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        with lzma.open(archive) as source, place.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)


def _wheels(kit: Path) -> list[Path]:
    """All wheels that this Python needs: of those in ``fallback/`` only what is not installed."""
    missing = []
    for wheel in sorted((kit / "fallback").glob("*.whl")):
        try:
            importlib.metadata.distribution(wheel.name.split("-")[0].replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            missing.append(wheel)
    if missing:
        print(f"missing here, taken from the kit: {' '.join(wheel.name.split('-')[0] for wheel in missing)}")
    return [*sorted(kit.glob("*.whl")), *missing]


def _install(wheels: list[Path], site: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--root-user-action=ignore", "--target", str(site)]
    done = subprocess.run([*command, *map(str, wheels)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip: {done.stderr.strip()[-500:]}")


def _write_plugin(plugins: Path) -> None:
    """Write the metadata by which vLLM finds this repository's plugin, as an installed package would have it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    name = project["name"].replace("-", "_")
    found = re.search(r'^__version__ = "(.+)"', (REPOSITORY / name / "__init__.py").read_text(), re.MULTILINE)
    version = found[1] if found else "0"
    info = plugins / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n")
    entries = [f"{key} = {value}\n" for key, value in project["entry-points"]["vllm.general_plugins"].items()]
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "".join(entries))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kit", type=Path, metavar="KIT", help="the folder that `make gpu-kit` filled")
    parser.add_argument("target", type=Path, metavar="TARGET", help="a folder that is new or empty")
    options = parser.parse_args()
    start = time.monotonic()
    try:
        paths = unpack(options.kit.resolve(), options.target.resolve())
    except (OSError, ValueError, EOFError, lzma.LZMAError, tarfile.TarError, RuntimeError) as error:
        print(f"unpack: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"words": f"{time.monotonic() - start:.0f} s", "pythonpath": [str(path) for path in paths]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
