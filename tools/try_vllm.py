"""Says what breaks with another vLLM: ``make try-vllm VLLM=PATH``, a source tree, source distribution or wheel.

Its Python runs over the compiled kernels of the installed vLLM, under a version that we accept, so that our refusal of
other versions does not hide what comes behind it. Nothing of the environment changes. Exit status 1 where a part fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import vllm

from nixl_offload.vllm.plugin import SUPPORTED
from tools.vllm_source import read_files

ROOT: Final = Path(__file__).resolve().parents[1]
VERSION: Final = f"{SUPPORTED}.999+cpu"
PYTEST: Final = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")


class Part(NamedTuple):
    """A part of the trial: what it shows and how it is run."""

    shows: str
    command: Sequence[str]
    limit_s: int


def parts(source: Path) -> list[Part]:
    """Return what is tried, the quickest first. A wheel has none of vLLM's own tests."""
    contract = ("tests/vllm/test_contract.py", "tests/vllm/test_lookups.py", "tests/vllm/test_identity.py")
    rigs = ("tests/vllm/test_end_to_end.py", "tests/vllm/test_hints.py", "tests/vllm/test_faults.py")
    upstream = f"import sys, pathlib, tests.upstream.run as u; sys.exit(u.run(pathlib.Path({str(source)!r}), []))"
    own = Part("vLLM's own tests of offloading over our half", (sys.executable, "-c", upstream), 300)
    return [
        Part("signatures and orders of calls that we rely on", (*PYTEST, *contract), 300),
        *([] if source.suffix == ".whl" else [own]),
        Part("engines: store, restart, load, faults", (*PYTEST, *rigs), 900),
        Part("engines as on a GPU, host memory as the device", (*PYTEST, "tests/vllm/test_played_device.py"), 900),
    ]


def lay_over(source: Path, folder: Path) -> None:
    """Write the Python of ``source`` into ``folder``, linked with the installed vLLM's libraries."""
    for path, content in read_files(source, "vllm/"):
        if path.endswith(".so"):
            continue
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    for library in Path(vllm.__file__).parent.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    (folder / "vllm" / "_version.py").write_text(
        f"__version__ = version = {VERSION!r}\n__version_tuple__ = (0, 0, 0)\n"
    )
    information = folder / f"vllm-{VERSION}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {VERSION}\n")


def main() -> int:
    """Try each part, print what breaks as it is found, and a table last."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).exists():
        print("usage: make try-vllm VLLM=PATH (a source tree, source distribution or wheel of vLLM)", file=sys.stderr)
        return 2
    source, lines, status = Path(sys.argv[1]).resolve(), [], 0
    with tempfile.TemporaryDirectory(prefix="nixl-offload-try-vllm-") as scratch:
        lay_over(source, Path(scratch))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((scratch, str(ROOT))), "HF_HUB_OFFLINE": "1"}
        for part in parts(source):
            print(f"== {part.shows}", flush=True)
            begin_s = time.monotonic()
            try:
                done = subprocess.run(
                    part.command,
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=part.limit_s,
                    check=False,
                )
                failed, output = done.returncode != 0, done.stdout
            except subprocess.TimeoutExpired as error:
                failed, output = True, f"{(error.stdout or b'').decode()}\nnot over within {part.limit_s} s"
            seconds = time.monotonic() - begin_s
            breaks = re.findall(r"^(?:FAILED|ERROR) .*|^E   .*Error.*", output, re.MULTILINE)
            for line in [*dict.fromkeys(breaks)][:40]:
                print(f"   {line[:200]}")
            last = output.strip().splitlines()[-1].strip("= ") if output.strip() else "no output"
            lines.append(f"{'breaks' if failed else 'works':7} {part.shows}: {last} ({seconds:.0f} s)")
            status |= failed
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
