"""A Hugging Face Hub on loopback, as far as vLLM needs one: models with commits, the branch ``main``, and their files.

An engine uses it with ``HubStandIn.environment`` and a cache directory of its own. huggingface_hub reads its
environment once, before an engine is forked; ``main`` of this module, which the environment names, makes it read again.
With ``SECOND_SOURCE`` in the environment, Llama also loads the weights of the model ``text_model_id`` of its
configuration, as Ultravox does.

Threading: one thread accepts, each request has one of its own. Leaving the ``with`` block ends all threads.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.vllm.zygote import MAIN_MODULE

SECOND_SOURCE = "NIXL_OFFLOAD_TEST_SECOND_SOURCE"
"""Environment variable."""


class HubStandIn:
    """The Hub. Its models are what ``publish`` was given last; older commits stay reachable by name."""

    def __init__(self) -> None:
        self._revisions: dict[tuple[str, str], tuple[str, dict[str, bytes]]] = {}
        """By model and revision: commit and files."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = False  # closing waits for all of them
        self._server.revisions = self._revisions  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="hub stand-in")

    def publish(self, model: str, directory: Path) -> str:
        """Make the files of ``directory`` a commit of ``model``, move ``main`` there, and return the commit's hash."""
        files = {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
        commit = _git_hash(*(name.encode() + data for name, data in files.items()))
        self._revisions[model, commit] = self._revisions[model, "main"] = commit, files
        return commit

    def environment(self, cache: Path, *, offline: bool = False) -> dict[str, str]:
        """Environment of an engine that asks this Hub and keeps its files in ``cache``; ``offline``: asks nobody."""
        host, port = self._server.server_address[:2]
        return {
            "HF_ENDPOINT": f"http://{host!s}:{port}",
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": str(host),
            MAIN_MODULE: __name__,
        }

    def __enter__(self) -> HubStandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One request. Paths: ``api/models/ORG/NAME[/revision/REV | /tree/REV]`` and ``ORG/NAME/resolve/REV/FILE``."""

    def do_GET(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        is_api = parts[:2] == ["api", "models"]
        org, name, *rest = (*parts[2:], "", "") if is_api else (*parts, "", "")
        verb, revision, *file = rest if rest[0] else ("revision", "main")
        found = self.server.revisions.get((f"{org}/{name}", revision))  # type: ignore[attr-defined]
        if found is None:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        commit, files = found
        if is_api and verb == "revision":
            siblings = [{"rfilename": each} for each in files]
            self._tell({"id": f"{org}/{name}", "modelId": f"{org}/{name}", "sha": commit, "siblings": siblings})
        elif is_api and verb == "tree":
            of_file = {each: {"size": len(data), "oid": _git_hash(data)} for each, data in files.items()}
            self._tell([{"type": "file", "path": each, **facts} for each, facts in of_file.items()])
        elif verb == "resolve" and file[0] in files:
            data = files[file[0]]
            self._answer(200, data, {"ETag": f'"{_git_hash(data)}"', "X-Repo-Commit": commit})
        else:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _tell(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

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


def main() -> int:
    """Run first by a forked engine in the stand-in's environment."""
    importlib.reload(importlib.import_module("huggingface_hub.constants"))
    if SECOND_SOURCE in os.environ:
        _load_a_second_source()
    code: int = importlib.import_module("examples.demo.engine_process").main()
    return code


def _load_a_second_source() -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.models.llama import LlamaForCausalLM

    make: Any = LlamaForCausalLM.__init__

    @functools.wraps(make)  # vLLM looks at its parameters
    def made(self: Any, *, vllm_config: Any, **more: Any) -> None:
        make(self, vllm_config=vllm_config, **more)
        name = vllm_config.model_config.hf_config.text_model_id
        self.secondary_weights = [DefaultModelLoader.Source(model_or_path=name, revision=None)]

    LlamaForCausalLM.__init__ = made
