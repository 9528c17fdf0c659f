"""Proves on a real vLLM that KV moved between device memory and files gives right answers, on both paths of a GPU node:
packed on the device, and direct, through NIXL's real GDS_MT plugin. The device and cuFile are emulated.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.model import TINY_HYBRID
from tests.contract.emulation.build import Control, build_emulation
from tests.vllm.blocks_outermost import ENVIRONMENT
from tests.vllm.harness import TINY, ModelShape, Workshop, ask_anew, assert_same, chain_config, prompts

EXTENSION = "tests.vllm.emulated_gpu.EmulatedGpuExtension"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulated cuFile and CUDA runtime."""
    directory = tmp_path_factory.mktemp("emulation")
    build_emulation(directory)
    return directory


WAY = "NIXL_OFFLOAD_TEST_WAY"
"""Environment: the path to take. The engine would choose the fastest, which on a busy machine may be any."""


@pytest.mark.parametrize(
    ("shape", "environment", "told"),
    [
        pytest.param(TINY, {WAY: "device"}, "packed on the device", id="a tensor for each layer"),
        pytest.param(TINY_HYBRID, {WAY: "device"}, "packed on the device", id="two groups"),
        pytest.param(TINY, {**ENVIRONMENT, WAY: "direct"}, "direct", id="blocks in one piece"),
    ],
)
def test_answers_are_right_and_damage_is_noticed(
    workshop: Workshop, libraries: Path, tmp_path: Path, shape: ModelShape, environment: dict[str, str], told: str
) -> None:
    """Answers from loaded KV equal computed ones; so do answers after a bit in every page of the slab was flipped."""
    asked, directory = prompts(2, seed=616, shape=shape), tmp_path / "kv"
    control = Control(libraries / "control")
    control.reset()
    unregistered = control["buffers"], control["files"]
    tier = {"kind": "slab", "path": str(directory), "capacity": "256MiB", "mover": "gds_mt"}
    surroundings = {
        "NIXL_OFFLOAD_TEST_LIBRARIES": str(libraries),
        "CUFILE_EMULATION_CONTROL": str(libraries / "control"),
        **environment,
    }
    with workshop.start_engine(
        shape, chain_config(tier), worker_extension_cls=EXTENSION, environment=surroundings
    ) as engine:
        computed = engine.generate(asked)
        loaded = ask_anew(engine, asked)
        assert all(answer.external_hit_tokens > 0 for answer in loaded)
        assert control["reads"] > 0, "not by cuFile"
        assert control["writes"] > 0, "not by cuFile"
        # Sleep: nothing is registered while KV memory is released, and as much as before once it is restored.
        assert engine.settle()
        assert engine.reset_prefix_cache()
        registered = control["buffers"], control["files"]
        for _ in range(2):
            engine.worker("unregister_kv")
            assert (control["buffers"], control["files"]) == unregistered
        engine.worker("clear_kv")
        for _ in range(2):
            engine.worker("restore_kv")
            assert (control["buffers"], control["files"]) == registered != unregistered
        awake = engine.generate(asked)
        assert all(answer.external_hit_tokens > 0 for answer in awake)
        assert engine.reset_prefix_cache()
        _damage(directory)
        anew = engine.generate(asked)
        assert engine.settle()
        log = engine.log.read_text(encoding="utf-8", errors="replace")
    assert f"KV group 0: {told}" in log
    assert "corrupt" in log
    for answers in (loaded, awake, anew):
        assert_same(answers, computed)


def _damage(directory: Path) -> None:
    (slab,) = directory.glob("*/rank-00000.slab")
    content = bytearray(slab.read_bytes())
    content[17::4096] = bytes(byte ^ 1 for byte in content[17::4096])
    with slab.open("r+b") as file:
        file.write(content)
