"""Runs vLLM's own tests of its offloading scheduler over our scheduler's half: ``make test-vllm-upstream``.

The tests come from vLLM's source distribution (``tools/vllm_source.py``). Arguments go to pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.vllm_source import read_files, source_archive

ROOT = Path(__file__).parents[2]
WANTED = ("tests/v1/kv_connector/", "tests/v1/kv_offload/", "tests/utils.py", "tests/v1/core/utils.py")
FOLDER = "tests/v1/kv_connector/unit/offloading_connector"
FILES = ("test_scheduler.py", "test_events.py")
NOT_OURS = f"{FOLDER}/test_scheduler.py::test_small_hit_loads_synchronously"
"""Loads within a step are off (decision 0007), and this test repeats its step until there is one."""
MODEL = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}
"""``facebook/opt-125m``, as far as a scheduler needs it: nothing is asked of the Hub."""


def run(source: Path, arguments: Sequence[str]) -> int:
    """Run the tests of ``source`` (see ``read_files``) and return pytest's exit status."""
    with tempfile.TemporaryDirectory(prefix="nixl-offload-upstream-") as scratch_name:
        scratch = Path(scratch_name)
        for path, content in read_files(source, *WANTED):
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_bytes(content)
        for folder in ("tests", "tests/v1", "tests/v1/core"):
            (scratch / folder / "__init__.py").touch()
        model = scratch / "facebook" / "opt-125m"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        (scratch / "over_our_half.py").write_text(Path(__file__).with_name("over_our_half.py").read_text())
        (scratch / "pytest.ini").write_text("[pytest]\n")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "over_our_half",
            "-p",
            "no:cacheprovider",
            "--deselect",
            NOT_OURS,
        ]
        tests = [f"{FOLDER}/{name}" for name in FILES]
        # The scratch directory first: its ``tests`` is vLLM's, ours has the same name.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join((scratch_name, str(ROOT)))}
        return subprocess.run([*command, *arguments, *tests], cwd=scratch, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(run(source_archive(), sys.argv[1:]))
