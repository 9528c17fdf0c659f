"""Gathers what a CUDA machine without a registry lacks: ``python -m benchmarks.gpu.kit`` (``make gpu-kit``).

Needs a registry and binutils, no GPU. Each file of pins in ``wheels`` becomes an archive of installed packages for one
version of Python; ``unpack.py`` unpacks it. vLLM keeps its code for sm_90 alone, NIXL the plugins that are used.
Exits with 1 when the kit is too large to be carried. Threading: two processes make the archives.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.gpu.slim import slim

HERE = Path(__file__).parent
LIMIT_MIB = 55
"""64 MiB may be carried to the machine; the rest is for the repository and for what a session adds."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
"""pip takes a wheel only if its platform is named to the letter."""
HOST_LIBRARIES = ("spinloop.abi3.so", "fs_io_C.abi3.so", "cumem_allocator.abi3.so")
"""vLLM's extensions that have no CUDA code."""
CUDA_LIBRARIES: dict[str, Callable[[Path, Path], int]] = {
    "_C_stable_libtorch.abi3.so": slim,
    "vllm_flash_attn/_vllm_fa3_C.abi3.so": partial(slim, head_dim=128, element="10bfloat16_t"),
}
"""vLLM's extensions with CUDA code that are kept, and which variants of it."""
NIXL_PLUGINS = ("POSIX", "GDS", "GDS_MT")
"""OBJ stays out: it brings an SDK of 5 MiB, and cannot be loaded without a CUDA library that torch does not bring."""
MIB = 1 << 20


def install(requirements: str, target: Path, python_version: str) -> None:
    """Install pinned wheels for ``python_version`` on x86-64 Linux. Raises CalledProcessError if one is not found."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-compile"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python_version, "--platform=any"]
    command += [f"--platform={name}_x86_64" for name in PLATFORMS]
    command += ["--target", str(target), "-r", "/dev/stdin"]
    subprocess.run(command, input=requirements, text=True, check=True)
    for name in ("bin", "include", "share"):
        shutil.rmtree(target / name, ignore_errors=True)


def pack(pins: Path, kit: Path, python_version: str) -> Path:
    """Install what ``pins`` lists, cut it down, and return its archive in ``kit``."""
    archive = kit / f"{pins.stem}.tar.xz"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if pins.stem == "fallback":  # each apart, as the machine may need only some
            for requirement in pins.read_text().splitlines():
                install(requirement, folder / requirement.partition("==")[0], python_version)
        else:
            install(pins.read_text(), folder, python_version)
        if pins.stem == "vllm":
            _slim_vllm(folder)
        elif pins.stem == "site":
            _slim_nixl(folder)
        with tarfile.open(archive, "w:xz", preset=9) as out:
            out.add(folder, "")
    return archive


def _slim_vllm(site: Path) -> None:
    """Keep the Python, the metadata and the extensions that are named above."""
    root = site / "vllm"
    for name, cut in CUDA_LIBRARIES.items():
        cut(root / name, root / f"{name}.small")
        (root / f"{name}.small").replace(root / name)
    kept = {root / name for name in (*HOST_LIBRARIES, *CUDA_LIBRARIES)}
    if missing := [path.name for path in kept if not path.exists()]:
        raise ValueError(f"vLLM's wheel lacks {', '.join(missing)}")
    for path in root.rglob("*"):
        if path.is_file() and path.suffix not in {".py", ".jinja"} and path not in kept:
            path.unlink()


def _slim_nixl(site: Path) -> None:
    """Keep NIXL's package, ``NIXL_PLUGINS``, and the libraries that they are linked with. Raises ValueError if one of
    the plugins is missing.
    """
    for unused in site.glob("nixl_ep*"):
        shutil.rmtree(unused)
    wanted = {f"libplugin_{name}.so" for name in NIXL_PLUGINS}
    plugins = list(site.glob(".nixl_*.libs/plugins/*"))
    kept = [path for path in plugins if path.name in wanted]
    if len(kept) < len(wanted):
        raise ValueError(f"NIXL's wheel has of its plugins only {', '.join(path.name for path in kept)}")
    unneeded = [path for path in plugins if path not in kept]
    while unneeded:
        for path in unneeded:
            path.unlink()
        linked = [path for path in site.rglob("*.so*") if path.is_file()]
        command = ["readelf", "-dW", *map(str, linked)]
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", subprocess.run(command, check=True, stdout=-1, text=True).stdout)
        libraries = [path for path in linked if re.search(r"nixl\S*\.libs/", str(path)) and path not in kept]
        unneeded = [path for path in libraries if path.name not in needed]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=HERE.parents[1] / "build" / "gpu-kit")
    parser.add_argument("--python-version", default="3.12", help="of the machine's Python (default: 3.12)")
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True, help="with vLLM (default: yes)")
    options = parser.parse_args()
    pins = [path for path in sorted((HERE / "wheels").iterdir()) if options.vllm or path.stem in {"site", "fallback"}]
    shutil.rmtree(options.dir, ignore_errors=True)
    options.dir.mkdir(parents=True)
    total_bytes = 0
    with ProcessPoolExecutor(2) as pool:
        for job in [pool.submit(pack, each, options.dir, options.python_version) for each in reversed(pins)]:
            archive = job.result()
            total_bytes += archive.stat().st_size
            print(f"{archive.stat().st_size / MIB:8.2f} MiB  {archive.name}", flush=True)
    print(f"{total_bytes / MIB:8.2f} MiB  of {LIMIT_MIB} that may be carried beside the repository")
    if total_bytes > LIMIT_MIB * MIB:
        print("too large to be carried", file=sys.stderr)
        return 1
    print(f"Carry the repository and {options.dir}; on the machine: make gpu-check CALL=1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
