"""A Hugging Face Hub on loopback, as far as vLLM asks one: models with commits, the branch ``main``, and their files.

An engine that is to ask it gets ``HubStandIn.environment`` and a cache directory of its own. A forked engine comes from
a process that has imported huggingface_hub, which reads its environment once; ``main`` of this module, which the
environment names, makes it read again.

Threading: one thread accepts, each request has one of its own; what is published lies behind a lock. Ownership: leaving
the ``with`` block ends all threads.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.vllm.zygote import MAIN_MODULE


class HubStandIn:
    """The Hub. Its models are what ``publish`` was given last; older commits stay reachable by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self._main: dict[str, str] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = False  # closing waits for all of them
        self._server.hub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="hub stand-in")

    def publish(self, model: str, directory: Path) -> str:
        """Make the files of ``directory`` a commit of ``model``, move ``main`` there, and return the commit's hash."""
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
        commit = _git_hash(*(name.encode() + data for name, data in files.items()))
        with self._lock:
            self._commits.setdefault(model, {})[commit] = files
            self._main[model] = commit
        return commit

    def environment(self, cache: Path, *, offline: bool = False) -> dict[str, str]:
        """What makes an engine ask this Hub and keep its files in ``cache``; ``offline``: what makes it ask nobody."""
        host, port = self._server.server_address[:2]
        return {
            "HF_ENDPOINT": f"http://{host!s}:{port}",
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": str(host),
            MAIN_MODULE: __name__,
        }

    def find(self, model: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """Return commit and files of a revision: ``main`` or a commit's hash; None if there is none."""
        with self._lock:
            commit = self._main.get(model, "") if revision == "main" else revision
            files = self._commits.get(model, {}).get(commit)
        return None if files is None else (commit, files)

    def __enter__(self) -> HubStandIn:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One request. Paths: ``api/models/ORG/NAME[/revision/REV | /tree/REV]`` and ``ORG/NAME/resolve/REV/FILE``."""

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        hub: HubStandIn = self.server.hub  # type: ignore[attr-defined]
        match parts:
            case ["api", "models", org, name]:
                self._tell(hub.find(f"{org}/{name}", "main"), _model_info, f"{org}/{name}")
            case ["api", "models", org, name, "revision", revision]:
                self._tell(hub.find(f"{org}/{name}", revision), _model_info, f"{org}/{name}")
            case ["api", "models", org, name, "tree", revision]:
                self._tell(hub.find(f"{org}/{name}", revision), _tree, f"{org}/{name}")
            case [org, name, "resolve", revision, file]:
                self._give(hub.find(f"{org}/{name}", revision), file)
            case _:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _tell(self, found: tuple[str, Mapping[str, bytes]] | None, say: Any, model: str) -> None:
        if found is None:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self._answer(200, json.dumps(say(model, *found)).encode(), {"Content-Type": "application/json"})

    def _give(self, found: tuple[str, Mapping[str, bytes]] | None, file: str) -> None:
        if found is None or file not in found[1]:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound" if found else "RevisionNotFound"})
        else:
            data = found[1][file]
            self._answer(200, data, {"ETag": f'"{_git_hash(data)}"', "X-Repo-Commit": found[0]})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a failing test shows the engine's log."""


def _git_hash(*pieces: bytes) -> str:
    return hashlib.sha1(b"\0".join(pieces), usedforsecurity=False).hexdigest()


def _model_info(model: str, commit: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    return {"id": model, "modelId": model, "sha": commit, "siblings": [{"rfilename": name} for name in files]}


def _tree(model: str, commit: str, files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    return [{"type": "file", "path": name, "size": len(data), "oid": _git_hash(data)} for name, data in files.items()]


def main() -> int:
    """What a forked engine runs in the stand-in's environment."""
    importlib.reload(importlib.import_module("huggingface_hub.constants"))
    code: int = importlib.import_module("examples.demo.engine_process").main()
    return code
