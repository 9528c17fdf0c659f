"""The model's part of the namespace: other weights never share KV, the same weights do, whatever the process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_offload.errors import NamespaceError
from nixl_offload.vllm.identity import model_digest, weights_digest


def config(commit: str | None = None, load_format: str = "auto", **model: Any) -> Any:
    """Return as much of a VllmConfig as the digest reads."""
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 2, "_name_or_path": "x"}, _commit_hash=commit)
    fields = {"hf_config": hf_config, "dtype": "bfloat16", "quantization": None, "model_weights": "", **model}
    return SimpleNamespace(model_config=SimpleNamespace(**fields), load_config=SimpleNamespace(load_format=load_format))


def test_a_model_that_is_one_file_is_known_by_its_weights(tmp_path: Path) -> None:
    """A GGUF file that was replaced by another of the same name and size is another model."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"a" * 1000)
    before = weights_digest(str(file))
    file.write_bytes(b"b" * 1000)
    assert before
    assert weights_digest(str(file)) not in ("", before)


def test_a_directory_without_weights_says_nothing_of_them(tmp_path: Path) -> None:
    """Or all models whose weights are streamed from elsewhere would be one."""
    (tmp_path / "config.json").write_text("{}")
    assert weights_digest(str(tmp_path)) == ""
    assert weights_digest("org/model") == ""


@pytest.mark.parametrize(
    "other",
    [
        {"commit": "b"},
        {"load_format": "dummy"},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"model_weights": "s3:"},
    ],
)
def test_what_decides_the_weights_decides_the_digest(other: dict[str, Any]) -> None:
    assert model_digest(config(**{"commit": "a", **other}), "w") != model_digest(config(commit="a"), "w")


def test_the_order_of_a_set_decides_nothing() -> None:
    """A set of strings comes out in another order in each process, and the digest must not."""
    one, other = {0, 8}, {8, 0}
    assert str(one) != str(other), "they no longer show what they are here to show"
    digests = {
        model_digest(config(hf_config=SimpleNamespace(to_dict=lambda items=items: {"items": items})), "w")
        for items in (one, other)
    }
    assert len(digests) == 1


def test_a_weight_file_that_cannot_be_read_is_told_in_a_sentence(tmp_path: Path) -> None:
    """A dangling link among the weights: the operator reads which file, not a traceback from the middle of nowhere."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(NamespaceError, match=r"unreadable: .*model\.safetensors"):
        weights_digest(str(tmp_path))
