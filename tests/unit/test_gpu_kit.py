"""The kit for CUDA machines: a library of CUDA code made small still loads, a kit of small packages is made once and
unpacked, and the real kit's vLLM registers its kernels without a GPU and without a network.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import kit
from benchmarks.gpu.slim import CONTAINER_HEADER, CONTAINER_MAGIC, ENTRY_HEADER, slim

REPOSITORY = Path(__file__).parent.parent.parent
PTX, MACHINE_CODE = 1, 2

needs_gcc = pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("strip")), reason="needs gcc and strip")


def _entry(kind: int, architecture: int, code: bytes) -> bytes:
    code += bytes(-len(code) % 8)
    header = bytearray(64)
    ENTRY_HEADER.pack_into(header, 0, kind, 0x101, len(header), len(code))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + code


def _cuda_library(path: Path, containers: Mapping[str, Sequence[bytes]]) -> Path:
    """Link a library as nvcc does: a section of containers, each with a symbol, and code beside it. The function
    ``answer`` returns 42.
    """
    lines = ['.section .nv_fatbin, "a"', ".balign 8"]
    for name, entries in containers.items():
        body = b"".join(entries)
        whole = CONTAINER_HEADER.pack(CONTAINER_MAGIC, 1, CONTAINER_HEADER.size, len(body)) + body
        lines += [f".globl {name}", f"{name}:", f".byte {','.join(map(str, whole))}", ".balign 8"]
    if not containers:
        lines = []
    assembler, source = path.with_suffix(".s"), path.with_suffix(".c")
    assembler.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]))
    source.write_text("int answer(void) { return 42; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(source), str(assembler)], check=True)
    return path


def _loaded(library: Path, names: Sequence[str]) -> dict[str, bytes]:
    """What the containers hold where the dynamic linker put them: there the driver reads them."""
    loaded = ctypes.CDLL(str(library))
    assert loaded.answer() == 42
    found = {}
    for name in names:
        address = ctypes.addressof(ctypes.c_char.in_dll(loaded, name))
        magic, _, header_bytes, length = CONTAINER_HEADER.unpack(ctypes.string_at(address, CONTAINER_HEADER.size))
        assert magic == CONTAINER_MAGIC
        found[name] = ctypes.string_at(address + header_bytes, length)
    return found


@needs_gcc
def test_a_slimmed_library_loads_and_has_sm_90_code_alone(tmp_path: Path) -> None:
    """Order is kept. A container with nothing for sm_90 gets the smallest machine code that was dropped, if it fits."""
    first, second = _entry(MACHINE_CODE, 90, b"first" * 100), _entry(MACHINE_CODE, 90, b"second")
    other, small = _entry(MACHINE_CODE, 100, b"other" * 50), _entry(MACHINE_CODE, 75, b"small")
    assembler = _entry(PTX, 90, b"p")
    containers = {
        "mixed": [other, first, assembler, _entry(MACHINE_CODE, 80, b"eighty" * 20), second],
        "foreign": [other, _entry(PTX, 80, b"ptx")],
        "only_small": [small],
        "no_room": [_entry(PTX, 90, b"")],
        "wanted": [second],
    }
    source, target = _cuda_library(tmp_path / "whole.so", containers), tmp_path / "small.so"
    done = slim(source, target)
    assert (done.containers, done.emptied, done.kept_bytes) == (5, 3, len(first) + 2 * len(second))
    assert _loaded(target, list(containers)) == {
        "mixed": first + second,
        "foreign": small,
        "only_small": small,
        "no_room": b"",
        "wanted": second,
    }
    data = target.read_bytes()
    assert all(gone not in data for gone in (b"othero", b"eighty", b"ptx"))
    assert _loaded(source, ["foreign"])["foreign"] == b"".join(containers["foreign"])


def _wheel(directory: Path, name: str, files: Mapping[str, bytes]) -> Path:
    info = f"{name}-1.0.dist-info"
    wheel = directory / f"{name}-1.0-py3-none-any.whl"
    members = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as out:
        for member, data in members.items():
            out.writestr(member, data)
        out.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"]))
    return wheel


@pytest.fixture
def small_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a kit of small packages goes, which no registry has."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    kernels = _cuda_library(
        tmp_path / "kernels.so", {"only": [_entry(MACHINE_CODE, 90, b"code"), _entry(PTX, 80, b"p")]}
    )
    vllm = {
        "vllm/__init__.py": b"from vllm import _C_stable_libtorch, spinloop",
        "vllm/tuning.json": b"{}",
        **{f"vllm/{name}.abi3.so": b"small" for name in kit.SMALL_LIBRARIES},
        **{member: kernels.read_bytes() for member, _ in kit.LIBRARIES.values()},
    }
    made = {
        "site": [_wheel(wheels, "always_there", {"always_there.py": b"here = __file__"})],
        "fallback": [_wheel(wheels, "pytest", {"pytest.py": b""}), _wheel(wheels, "seldom", {"seldom.py": b""})],
        "vllm": [_wheel(wheels, "vllm", vllm)],
        "vllm-deps": [_wheel(wheels, "needed", {"needed/__init__.py": b""})],
    }
    monkeypatch.setattr(kit, "pins", lambda: {section: [section] for section in made})
    monkeypatch.setattr(kit, "download", lambda requirements, downloads, python_version: made[requirements[0]])
    return tmp_path / "build" / "gpu-kit"


def _make(directory: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kit", "--dir", str(directory), "--python-version", "3.12", *options])
    return kit.main()


def _unpack(python: str, directory: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [python, str(REPOSITORY / "benchmarks" / "gpu" / "unpack.py"), str(directory), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@needs_gcc
def test_a_damaged_kit_is_refused(small_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1 and a sentence; the kit is then made anew."""
    _make(small_kit, monkeypatch)
    whole = (small_kit / "C.so.xz").read_bytes()
    (small_kit / "C.so.xz").write_bytes(whole[: len(whole) // 2])
    ended = _unpack(sys.executable, small_kit, tmp_path / "target")
    assert ended.returncode == 1
    assert ended.stderr.startswith("unpack: ")
    _make(small_kit, monkeypatch)
    assert (small_kit / "C.so.xz").read_bytes() == whole
