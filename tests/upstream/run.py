"""Runs vLLM's own tests of its offloading scheduler over our scheduler's half: ``make test-vllm-upstream``.

The tests come from vLLM's source distribution, which the package index has and a wheel has not. It is downloaded once
(45 MB), compared with a digest, and kept in ``build/``. Arguments go to pytest.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path

VERSION = "0.32.0"
URL = (
    "https://files.pythonhosted.org/packages/d5/df/5471312c76e335eaa2b8333e87ea39f0d37bfe24f10a582620e34ff12e33/"
    f"vllm-{VERSION}.tar.gz"
)
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / f"vllm-{VERSION}.tar.gz"
WANTED = ("tests/v1/kv_connector/", "tests/v1/kv_offload/", "tests/utils.py", "tests/v1/core/utils.py")
FOLDER = "tests/v1/kv_connector/unit/offloading_connector"
FILES = ("test_scheduler.py", "test_events.py")
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


def main() -> int:
    if not KEPT.is_file():
        KEPT.parent.mkdir(exist_ok=True)
        part = KEPT.with_suffix(".part")
        urllib.request.urlretrieve(URL, part)
        part.rename(KEPT)
    if hashlib.sha256(KEPT.read_bytes()).hexdigest() != SHA256:
        print(f"{KEPT} is not what it should be; remove it", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="nixl-offload-upstream-") as scratch_name:
        scratch = Path(scratch_name)
        with tarfile.open(KEPT) as archive:
            for member in archive:
                member.name = member.name.partition("/")[2]
                if member.isfile() and member.name.startswith(WANTED):
                    archive.extract(member, scratch, filter="data")
        for folder in ("tests", "tests/v1", "tests/v1/core"):
            (scratch / folder / "__init__.py").touch()
        model = scratch / "facebook" / "opt-125m"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        (scratch / "over_our_half.py").write_text(Path(__file__).with_name("over_our_half.py").read_text())
        (scratch / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "over_our_half", "-p", "no:cacheprovider"]
        tests = [f"{FOLDER}/{name}" for name in FILES]
        # The scratch directory first: its ``tests`` is vLLM's, ours has the same name.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join((scratch_name, str(ROOT)))}
        return subprocess.run([*command, *sys.argv[1:], *tests], cwd=scratch, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
