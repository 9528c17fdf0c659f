"""A small router in front of vLLM servers that has KV cache read into memory before the request comes that needs it.

    .venv/bin/python -m examples.router --port 9000 http://127.0.0.1:8000 http://127.0.0.1:8001

Requests of a conversation go to one server. A client that knows that a conversation will go on (an agent whose tool is
still running, a chat window with a user who types) posts to ``/prefetch`` what it knows of the next request:

    curl localhost:9000/prefetch -d '{"model": "m", "messages": [...]}' -H 'Content-Type: application/json'

The router asks the server for the prompt's token ids, and sends them as a hint (docs/hints.md) with a request of one
token. Nothing waits for the bytes: the answer to ``/prefetch`` says that the server has the hint.

Clients must not send ``kv_transfer_params`` themselves: this router takes them away.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TIMEOUT_S = 600.0
_TOKENIZED = ("model", "prompt", "messages", "tools", "add_generation_prompt", "add_special_tokens", "chat_template")
_TOKENIZED_TOO = ("chat_template_kwargs", "continue_final_message")
_IN_HASHES = ("model", "cache_salt")
"""What a server mixes into the names of chunks besides tokens; the model's name may be that of a LoRA adapter."""


class Router(ThreadingHTTPServer):
    """Answers on ``127.0.0.1:port`` once ``serve_forever`` runs; port 0 takes any. ``servers``: URLs without a path."""

    daemon_threads = True

    def __init__(self, servers: Sequence[str], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._servers = list(servers)

    def server_of(self, body: dict[str, Any]) -> str:
        """Return the server that has seen this conversation before: the same for all that begins alike."""
        messages = body.get("messages") or [body.get("prompt", "")]
        begin = json.dumps([body.get("cache_salt"), messages[0]])[:2048]
        return self._servers[hashlib.sha256(begin.encode()).digest()[0] % len(self._servers)]


def post(url: str, body: dict[str, Any]) -> HTTPResponse:
    """POST JSON. Raises urllib.error.HTTPError, or OSError where nobody answers."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    return response


def token_ids(server: str, body: dict[str, Any]) -> list[int]:
    """Return the tokens of the prompt that a completion or chat request has. Raises as ``post``."""
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return prompt
    known = {name: body[name] for name in (*_TOKENIZED, *_TOKENIZED_TOO) if name in body}
    with post(f"{server}/tokenize", known) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens


def prefetch(server: str, body: dict[str, Any]) -> None:
    """Have ``server`` read into memory what its tiers hold of this request's prompt. Raises as ``post``."""
    tokens = token_ids(server, body)
    carrier = {name: body[name] for name in _IN_HASHES if name in body} | {
        "prompt": tokens[:1],
        "max_tokens": 1,
        "kv_transfer_params": {"nixl_offload": {"prefetch": True, "token_ids": tokens}},
    }
    post(f"{server}/v1/completions", carrier).close()


class _Handler(BaseHTTPRequestHandler):
    server: Router

    def do_POST(self) -> None:
        """Answer one request: see the module."""
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            body.pop("kv_transfer_params", None)
            server = self.server.server_of(body)
            if self.path == "/prefetch":
                prefetch(server, body)
                self._answer(202, b"{}")
            else:
                with post(server + self.path, body) as response:
                    self._pass_on(response)
        except urllib.error.HTTPError as error:
            with error:
                self._answer(error.code, error.read())
        except (ValueError, AttributeError, TypeError) as error:
            self._answer(400, json.dumps({"error": f"not a completion or chat request: {error}"}).encode())
        except OSError as error:
            with contextlib.suppress(OSError):  # unless it is the client that has gone
                self._answer(502, json.dumps({"error": f"the server does not answer: {error}"}).encode())

    def _pass_on(self, response: HTTPResponse) -> None:
        """Send an answer as it comes, a streamed one too."""
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers.get("Content-Type", "application/json"))
        self.end_headers()
        while piece := response.read1(65536):
            self.wfile.write(piece)
            self.wfile.flush()

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description="A router that sends prefetches.")
    parser.add_argument("servers", nargs="+", metavar="URL", help="vLLM servers, such as http://127.0.0.1:8000")
    parser.add_argument("--port", type=int, default=9000)
    arguments = parser.parse_args()
    router = Router([server.rstrip("/") for server in arguments.servers], arguments.port)
    print(f"http://127.0.0.1:{router.server_port} in front of {', '.join(arguments.servers)}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        router.serve_forever()


if __name__ == "__main__":
    main()
