"""A real ``vllm serve`` for tests: vLLM's OpenAI server and its engine core, forked from the zygote, and its /metrics.

Threading: one test at a time. Ownership: ``Server`` owns the process group; ``close`` ends it, and so does the end of
the pipe that the server's first process reads, should this process die.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from examples.demo.engine import quick_environment, transfer_config
from examples.demo.model import TINY, write_model
from examples.s3_server import free_port
from tests.vllm.harness import ONE_CORE, OPTIONS
from tests.vllm.zygote import MAIN_MODULE, ForkedProcess, Zygote

START_S = 120.0
WORDS = 1900
"""Words of the tokenizer: ``w0``, ``w1`` and so on."""


def write_tokenizer(directory: Path, words: Iterable[str]) -> None:
    """Write a tokenizer of whole words beside a model."""
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(["<unk>", "</s>", *words]))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}",
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def series(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of the series of this name, from what ``/metrics`` has exposed."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return [(sample.labels, sample.value) for sample in samples if sample.name == name]


class Server:
    """Answers HTTP on ``url`` from the moment it is made until ``close``."""

    def __init__(
        self,
        zygote: Zygote,
        scratch: Path,
        config: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        has_tokenizer: bool = False,
        **options: Any,
    ) -> None:
        """Serve a tiny model, written to ``scratch``, with tiers as ``config`` says. ``options``: of ``vllm serve``.

        Raises AssertionError when it does not come up.
        """
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = scratch / "server.log"
        self.model = str(write_model(scratch / "served", TINY))
        if has_tokenizer:
            write_tokenizer(Path(self.model), (f"w{number}" for number in range(WORDS)))
        options = {
            "host": "127.0.0.1",
            "port": self.port,
            "model": self.model,
            "max_model_len": TINY.max_tokens,
            **OPTIONS,
            "kv_transfer_config": json.dumps(transfer_config(dict(config))),
            **options,
        }
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        arguments += ["--enforce-eager"] if has_tokenizer else ["--enforce-eager", "--skip-tokenizer-init"]
        own = {**quick_environment(scratch=scratch), **ONE_CORE, "VLLM_SERVER_DEV_MODE": "1", **(environment or {})}
        with self.log.open("ab") as log_file:
            self._process: ForkedProcess = zygote.fork(
                log_file, {**os.environ, **own, MAIN_MODULE: __name__}, spawns=True
            )
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        try:
            self.until(self._healthy, START_S, "the server answers")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The first process, which leads the group of all."""
        return self._process.pid

    def complete(self, prompt: list[int], *, rank: int | None = None, **fields: Any) -> dict[str, Any]:
        """Answer a prompt of token ids, on a data-parallel rank if one is named. Returns the answer as JSON."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "detokenize": False, **fields}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer: dict[str, Any] = json.loads(self._ask("/v1/completions", body, headers))
        return answer

    def reset_prefix_cache(self) -> None:
        """Make vLLM forget its prefix cache (needs VLLM_SERVER_DEV_MODE=1)."""
        self._ask("/reset_prefix_cache", {})

    def metrics(self) -> str:
        """Return the text that Prometheus would read."""
        return self._ask("/metrics").decode()

    def samples(self, name: str, label: str, **having: str) -> dict[str, float]:
        """Values of the series of this name that have some labels, summed by the value of one label."""
        values: dict[str, float] = {}
        for labels, value in series(self.metrics(), name):
            if having.items() <= labels.items():
                values[labels[label]] = values.get(labels[label], 0) + value
        return values

    def until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait for ``condition``. Raises AssertionError, with the end of the log, at the limit."""
        deadline = time.monotonic() + limit_s
        while not condition():
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}\n{tail}"
            time.sleep(0.05)

    def close(self) -> None:
        """End every process of the server. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError, urllib.error.URLError):
            self._ask("/health")
            return True
        return False

    def _ask(self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        with urllib.request.urlopen(request, timeout=60) as reply:
            content: bytes = reply.read()
            return content


def main() -> int:
    """Run ``vllm serve`` in the forked process, with its command line from the first line of stdin."""
    arguments = json.loads(sys.stdin.readline())
    os.dup2(2, 1)

    def end_with_the_owner() -> None:
        sys.stdin.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_the_owner, daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    sys.argv = ["vllm", *arguments]
    serve()
    return 0
