"""Gathers what a CUDA machine without a registry lacks: ``python -m benchmarks.gpu.kit`` (``make gpu-kit``).

Needs a registry and no GPU. ``wheels.txt`` has the pins. The kit holds wheels for one Python and, unless ``--no-vllm``,
archives of vLLM for sm_90 and of what it imports. ``unpack.py`` unpacks it. Idempotent: a complete kit is left alone,
and downloads are kept beside it. Exits with 1 when the kit and the repository are too large to be carried. Threading:
two processes make the archives.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path, PurePosixPath

from benchmarks.gpu.slim import slim

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
LIMIT_MIB = 62
"""What may be carried to the machine, the repository included: 64 MiB, less room for what a session adds."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
"""pip takes a wheel only if its platform is named to the letter."""
SMALL_LIBRARIES = ("spinloop", "fs_io_C", "cumem_allocator")
"""vLLM's extensions that have no CUDA code."""
LIBRARIES = {
    "C.so.xz": ("vllm/_C_stable_libtorch.abi3.so", {}),
    "fa3.so.xz": ("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", {"head_dim": 128, "element": "10bfloat16_t"}),
}
"""vLLM's extensions with CUDA code: archive, name in the wheel, and which variants are kept."""
MIB = 1 << 20
PLUGINS = ("POSIX", "GDS", "GDS_MT")
"""OBJ stays out: it brings an SDK of 5 MiB, and cannot be loaded without a CUDA library that torch does not bring."""
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")


def pins() -> dict[str, list[str]]:
    """Return the requirements of ``wheels.txt`` by section."""
    sections: dict[str, list[str]] = {}
    for line in (HERE / "wheels.txt").read_text().splitlines():
        if line.startswith("["):
            requirements = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            requirements.append(line)
    return sections


def pip(*arguments: str, python_version: str) -> None:
    """Run pip for ``python_version`` on x86-64 Linux. Raises CalledProcessError when a wheel is not to be had."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments, "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python_version, "--implementation", "cp"]
    platforms = [option for name in PLATFORMS for option in ("--platform", f"{name}_x86_64")]
    subprocess.run([*command, *platforms, "--platform", "any"], check=True)


def download(requirements: list[str], directory: Path, python_version: str) -> list[Path]:
    """Return the wheels of ``requirements``. Those that are in ``directory`` already are not fetched again."""
    directory.mkdir(parents=True, exist_ok=True)
    listed = directory / "requirements.txt"
    listed.write_text("\n".join([*requirements, ""]))
    pip("download", "-d", str(directory), "-r", str(listed), python_version=python_version)
    names = [line.partition("==")[0].replace("-", "_").lower() for line in requirements]
    versions = [line.partition("==")[2].partition(" ")[0] for line in requirements]
    return [
        next(path for path in directory.glob("*.whl") if path.name.lower().startswith(f"{name}-{version}-"))
        for name, version in zip(names, versions, strict=True)
    ]


def gather(kit: Path, downloads: Path, python_version: str, with_vllm: bool) -> None:
    """Fill ``kit``, unless it is filled already."""
    sources = [HERE / name for name in ("wheels.txt", "kit.py", "slim.py")]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    wanted = {"python": python_version, "vllm": with_vllm, "made_by": digest}
    if _is_complete(kit, wanted):
        print(f"{kit}: complete already")
        return
    kit.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kit.parent, prefix="gpu-kit-") as name:
        fresh = Path(name, "kit")
        requirements = pins()
        (fresh / "fallback").mkdir(parents=True)
        for wheel in download(requirements["site"], downloads, python_version):
            if wheel.name.startswith("nixl_cu"):
                repack_nixl(wheel, fresh / wheel.name)
                print(f"{wheel.name}: {wheel.stat().st_size / MIB:.1f} MiB made small")
            else:
                shutil.copy(wheel, fresh)
        for wheel in download(requirements["fallback"], downloads, python_version):
            shutil.copy(wheel, fresh / "fallback")
        archives = {}
        if with_vllm:
            (vllm,) = download(requirements["vllm"], downloads, python_version)
            deps = download(requirements["vllm-deps"], downloads, python_version)
            archives = _archive(vllm, deps, fresh, python_version)
        files = {
            str(file.relative_to(fresh)): file.stat().st_size for file in sorted(fresh.rglob("*")) if file.is_file()
        }
        manifest = {"wanted": wanted, "archives": archives, "bytes": files}
        (fresh / "manifest.json").write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(kit, ignore_errors=True)
        fresh.rename(kit)


def _is_complete(kit: Path, wanted: dict[str, object]) -> bool:
    try:
        manifest = json.loads((kit / "manifest.json").read_text())
        return manifest["wanted"] == wanted and all(
            (kit / name).stat().st_size == size for name, size in manifest["bytes"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _archive(vllm: Path, deps: list[Path], kit: Path, python_version: str) -> dict[str, str]:
    """Write the archives into ``kit``. Return for each what it becomes below ``unpack.py``'s target: a folder for a
    tar file, else a file.
    """
    archives = {"vllm.tar.xz": "vllm", "deps.tar.xz": "deps"}
    with ProcessPoolExecutor(2) as pool:
        jobs = []
        for archive, (member, variants) in LIBRARIES.items():
            archives[archive] = f"vllm/{member}"
            jobs.append(pool.submit(_pack_library, vllm, member, variants, kit / archive))
        jobs.append(pool.submit(_pack_python, vllm, kit / "vllm.tar.xz"))
        jobs.append(pool.submit(_pack_installed, deps, python_version, kit / "deps.tar.xz"))
        for job in jobs:
            print(job.result())
    return archives


def _pack_library(wheel: Path, member: str, variants: dict[str, str | int], archive: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(wheel) as source:
            whole = Path(source.extract(member, name))
        small = Path(name, "small.so")
        kept_bytes = slim(whole, small, **variants)
        archive.write_bytes(lzma.compress(small.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        return f"{member}: {whole.stat().st_size / MIB:.1f} MiB made small, {kept_bytes / MIB:.1f} MiB of sm_90 code"


def _pack_python(wheel: Path, archive: Path) -> str:
    """Pack vLLM's Python, its metadata, and the extensions that have no CUDA code."""
    libraries = {f"vllm/{name}.abi3.so" for name in SMALL_LIBRARIES}
    with zipfile.ZipFile(wheel) as source:
        names = [
            name
            for name in source.namelist()
            if name in libraries or PurePosixPath(name).suffix in {".py", ".jinja"} or ".dist-info/" in name
        ]
        if not libraries <= set(names):
            raise ValueError(f"{wheel.name}: not all of {', '.join(sorted(libraries))} are there")
        _tar(archive, ((name, source.read(name)) for name in names))
    return f"{archive.name}: {len(names)} files of {wheel.name}"


def _pack_installed(wheels: list[Path], python_version: str, archive: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        installed = Path(name, "deps")
        command = ("install", "--no-index", "--no-compile", "--target", str(installed))
        pip(*command, *map(str, wheels), python_version=python_version)
        shutil.rmtree(installed / "bin", ignore_errors=True)
        files = [file for file in installed.rglob("*") if file.is_file()]
        _tar(archive, ((str(file.relative_to(installed)), file.read_bytes()) for file in files))
    return f"{archive.name}: {len(files)} files of {len(wheels)} wheels"


def _tar(archive: Path, members: Iterable[tuple[str, bytes]]) -> None:
    with tarfile.open(archive, "w:xz", preset=9 | lzma.PRESET_EXTREME) as out:
        for name, data in sorted(members):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))


def repack_nixl(wheel: Path, target: Path) -> None:
    """Write to ``target`` what of ``wheel`` is needed to import NIXL and to use ``PLUGINS``. Raises ValueError when
    ``wheel`` is not built as expected: then nothing is written.
    """
    with zipfile.ZipFile(wheel) as source, tempfile.TemporaryDirectory() as scratch:
        source.extractall(scratch)
        kept = _kept(Path(scratch), [name for name in source.namelist() if not name.endswith("/")], PLUGINS)
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


def repository_bytes() -> int:
    """What of the repository would be carried: all that git knows or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True).stdout.split(b"\0")
    except (OSError, subprocess.CalledProcessError):  # a copy without git
        return 0
    files = [REPOSITORY / name.decode() for name in names if name]
    return sum(file.stat().st_size for file in files if file.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=REPOSITORY / "build" / "gpu-kit")
    parser.add_argument("--python-version", default="3.12", help="of the machine's Python (default: 3.12)")
    parser.add_argument("--vllm", action=argparse.BooleanOptionalAction, default=True, help="with vLLM (default: yes)")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB, help="kit and repository together")
    options = parser.parse_args()
    gather(options.dir, options.dir.with_name("gpu-kit-downloads"), options.python_version, options.vllm)
    files = [file for file in sorted(options.dir.rglob("*")) if file.is_file()]
    for file in files:
        print(f"{file.stat().st_size / MIB:8.2f} MiB  {file.relative_to(options.dir)}")
    kit, repository = sum(file.stat().st_size for file in files), repository_bytes()
    print(f"{kit / MIB:8.2f} MiB  in {len(files)} files of the kit")
    print(f"{repository / MIB:8.2f} MiB  of repository")
    print(f"{(kit + repository) / MIB:8.2f} MiB  together, of {options.limit_mib:g} that may be carried")
    if kit + repository > options.limit_mib * MIB:
        print("too large to be carried", file=sys.stderr)
        return 1
    print(f"Carry the repository and {options.dir}; on the machine: make gpu-check CALL=1")
    return 0


if __name__ == "__main__":
    sys.exit(main())
