"""Proves that examples/offline.py works as it stands: one process, a real vLLM, a prompt served from files."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

from examples import offline
from examples.demo.engine import quick_environment
from examples.demo.model import write_model
from tests.vllm.harness import ONE_CORE, TINY
from tests.vllm.server import write_tokenizer
from tests.vllm.zygote import MAIN_MODULE, Zygote

_CONFIG = """\
chunk_tokens: 128
slow_hits: take            # a tiny model computes faster than most load
tiers:
  - {{kind: slab, path: {path}, capacity: 256MiB, mover: posix}}
"""


def main() -> int:
    """What the forked process runs: the example, as `python -m examples.offline MODEL CONFIG` would."""
    sys.argv = ["offline.py", *json.loads(os.environ["EXAMPLE_ARGUMENTS"])]
    offline.main()
    return 0


def test_the_second_answer_of_the_offline_example_is_served_from_files(zygote: Zygote) -> None:
    """The same answer twice; the second with all full chunks from files, after the prefix cache has been forgotten."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-tests-") as scratch_name:
        scratch = Path(scratch_name)
        model = write_model(scratch / "model", TINY)
        write_tokenizer(model, re.findall(r"\w+|\.|\?", "The quick brown fox jumps over the lazy dog. What jumps?"))
        config = scratch / "kv.yaml"
        config.write_text(_CONFIG.format(path=scratch / "kv"))
        environment = {
            **os.environ,
            **quick_environment(scratch=scratch, in_process=False),
            **ONE_CORE,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_USE_AOT_COMPILE": "0",  # nothing is to be compiled at all, see quick_environment
            MAIN_MODULE: "tests.vllm.test_example_offline",
            "EXAMPLE_ARGUMENTS": json.dumps([str(model), str(config)]),
        }
        log = scratch / "log"
        with log.open("wb") as log_file:
            process = zygote.fork(log_file, environment, spawns=True)
        with process.stdin, process.stdout:
            said = process.stdout.read().decode()
            code = process.wait(timeout=60)
        assert code == 0, said[-2000:] + log.read_text()[-4000:]
    cached = [int(tokens) for tokens in re.findall(r"s, (\d+) cached tokens", said)]
    assert cached[0] == 0
    assert cached[1] >= 7 * 128, "1,002 tokens have seven full chunks of 128"
    first, second = re.findall(r"^'.*'$", said, re.MULTILINE)
    assert first == second
