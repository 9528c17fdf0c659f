"""What ``nixl-offload check`` does in a process of its own: loads NIXL's plugins, starts movers, measures through them,
has vLLM make a server's configuration.

Threading: one thread, which drives all movers. Reads tasks as lines of JSON from stdin, answers each by a line. What a
task raises becomes its answer; what crashes the process is the parent's to tell (``child``).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import sys
from typing import Any, Final

from nixl_offload.config import S3Config, parse_config
from nixl_offload.errors import ConfigError, MoverError, NixlOffloadError


def main() -> None:
    """Do tasks until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # NIXL logs to stdout.
    for line in sys.stdin:
        number, task = json.loads(line)
        try:
            answer = _TASKS[task.pop("do")](**task)
        except NixlOffloadError as error:
            answer = {"failed": str(error)}
        except Exception as error:  # noqa: BLE001 - of a third party, which the next task may do without
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"number": number, **answer}) + "\n")
        answers.flush()
    # Not by way of destructors of libraries that may hang.
    os._exit(0)


def _plugin(name: str, tier: dict[str, Any] | None = None) -> dict[str, Any]:
    """Have NIXL load and start a plugin. For ``obj``, ``tier`` says how."""
    from nixl_offload.movers.nixl_agent import NixlAgent
    from nixl_offload.movers.nixl_plugins import PLUGINS, object_plugin

    plugin = PLUGINS[name] if tier is None else object_plugin(_s3_tier(tier))
    agent = NixlAgent(plugin, plugin.params)
    try:
        agent.get()
    except MoverError as error:
        file = _plugin_file(plugin.plugin)
        return {"failed": str(error).removeprefix(f"{name}: "), "file": file, "loader": _why_not_loaded(file)}
    return {"memory": sorted(kind.value for kind in agent.memory_kinds)}


def _plugin_file(plugin: str) -> str | None:
    """Return where the plugin's library lies, as far as NIXL would look."""
    name = f"libplugin_{plugin}.so"
    own = os.environ.get("NIXL_PLUGIN_DIR")
    if own:
        return os.path.join(own, name) if os.path.exists(os.path.join(own, name)) else None
    # "nixl" is a front for the wheel that fits torch's CUDA, whose libraries lie beside it.
    loaded = {
        module: sys.modules[f"{module}._api"]
        for module in ("nixl_cu13", "nixl_cu12")
        if f"{module}._api" in sys.modules
    }
    for wheel, api in loaded.items():
        home = os.path.dirname(os.path.dirname(api.__file__ or ""))
        for below in (f"{wheel}.libs/nixl", f".{wheel}.mesonpy.libs/plugins"):
            file = os.path.join(home, below, name)
            if os.path.exists(file):
                return file
    return None


def _why_not_loaded(file: str | None) -> str | None:
    """Return the loader's own words: which library a plugin misses."""
    if file is None:
        return None
    try:
        ctypes.CDLL(file)
    except OSError as error:
        return str(error)
    return None


def _mover(name: str, directory: str, gpu: bool, **options: Any) -> dict[str, Any]:
    """Start a file mover and move a page with it, from and to the memory that it would be used with."""
    from nixl_offload.movers.base import MemoryKind
    from nixl_offload.movers.select import make_mover, probe_round_trip

    mover = make_mover(name, **options)
    try:
        on_device = MemoryKind.VRAM in mover.memory_kinds and name != "copy"
        if on_device and not gpu:
            return {"ok": False, "reason": "no NVIDIA driver here"}
        note = probe_round_trip(mover, MemoryKind.VRAM if on_device else MemoryKind.DRAM, directory)
    except MoverError as error:
        return {"ok": False, "reason": str(error).removeprefix(f"{name}: ")}
    finally:
        mover.close()
    return {"ok": True, "reason": f"{note}; packs through host memory" if gpu and not on_device else note}


def _file_io(name: str, directory: str, gpu: bool, direct_io: bool, piece_bytes: int, **options: Any) -> dict[str, Any]:
    from nixl_offload.cli.check.io import measure_files

    return measure_files(name, directory, gpu=gpu, direct_io=direct_io, piece_bytes=piece_bytes, options=options)


def _objects(tier: dict[str, Any], io: bool, piece_bytes: int) -> dict[str, Any]:
    """Open the mover that the server would take for a bucket, and measure through it."""
    from nixl_offload.cli.check.io import measure_objects
    from nixl_offload.movers.base import MemoryKind
    from nixl_offload.movers.select_object import open_object_mover
    from nixl_offload.stores.select import open_store

    wanted = _s3_tier(tier)
    opened = open_object_mover(wanted, MemoryKind.DRAM, lambda client: open_store(wanted, client))
    answer: dict[str, Any] = {"movers": [probe._asdict() for probe in opened.report]}
    try:
        if io:
            with contextlib.closing(open_store(wanted)) as control:
                answer["io"] = measure_objects(opened.mover, control, wanted.connections, piece_bytes)
    except NixlOffloadError as error:
        answer["io"] = {"failed": str(error)}
    finally:
        opened.mover.close()
    return answer


def _memory() -> dict[str, Any]:
    """Return what a rank could take of the host's memory, by the engine's own reckoning."""
    from nixl_offload.engine import host
    from nixl_offload.hardware import memory_limits

    available_bytes, limited_by = memory_limits.room()
    reserve_bytes = min(int(available_bytes * host.RESERVE_SHARE), host.RESERVE_LIMIT_BYTES)
    return {"available_bytes": available_bytes, "usable_bytes": available_bytes - reserve_bytes, "by": limited_by}


def _server(words: list[str], other: list[str] | None, transfer: dict[str, Any]) -> dict[str, Any]:
    """Have vLLM read a server's arguments. ``usage``: what is wrong with them."""
    try:
        from nixl_offload.vllm.compat import check_version

        check_version()
        from nixl_offload.vllm.compare import describe
    except ImportError as error:
        return {"failed": f"vLLM cannot be imported here: {error}", "mend": "run this check where the server runs"}
    try:
        return {"server": dataclasses.asdict(describe(words, other, transfer))}
    except ConfigError as error:
        return {"usage": str(error)}


def _s3_tier(tier: dict[str, Any]) -> S3Config:
    (found,) = parse_config({"tiers": [tier]}).tiers
    assert isinstance(found, S3Config)
    return found


_TASKS: Final[dict[str, Any]] = {
    "plugin": _plugin,
    "mover": _mover,
    "file_io": _file_io,
    "objects": _objects,
    "memory": _memory,
    "server": _server,
}


if __name__ == "__main__":
    main()
