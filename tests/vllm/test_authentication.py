"""Engines with ``authenticate``: they share with those that have the key, and with nobody else; what somebody without
the key has put there costs a recompute, and no answer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from examples.demo.engine import EngineError
from nixl_offload.chunk.header import HEADER_BYTES
from tests.unit.forgeries import sealed
from tests.vllm.damage import (
    ENGINE_OPTIONS,
    FULL_TOKENS,
    PROMPT_CHUNKS,
    chunk_prompts,
    hits,
    let_beliefs_lapse,
    said,
    until_stored,
)
from tests.vllm.harness import Engine, Workshop
from tests.vllm.media import LOOKING, tree

PROMPTS = chunk_prompts(2, seed=341)


@pytest.fixture(scope="module")
def key_file(workshop: Workshop) -> Path:
    path = workshop.scratch / "authenticate-keys"
    path.touch(0o600)
    path.write_text(f"{os.urandom(32).hex()}\n")
    return path


def start(workshop: Workshop, medium: Any, **fields: Any) -> Engine:
    return workshop.start_engine(connector=medium.config(lookup=LOOKING, **fields), **ENGINE_OPTIONS)


def test_only_those_with_the_key_share(workshop: Workshop, key_file: Path) -> None:
    medium = tree(workshop.scratch / "authenticated")
    authenticate = {"key_file": str(key_file)}
    writer = start(workshop, medium, authenticate=authenticate)
    expected = until_stored(writer, medium, PROMPTS, len(PROMPTS) * PROMPT_CHUNKS)
    writer.stop()
    assert "authenticated by key" in writer.log.read_text(errors="replace")
    assert key_file.read_text().strip() not in writer.log.read_text(errors="replace")

    plain = start(workshop, medium)
    answers = plain.generate(PROMPTS)
    assert hits(answers) == 0, "it believes in checksums, and has a namespace of its own"
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    plain.stop()

    reader = start(workshop, medium, authenticate=authenticate)
    answers = reader.generate(PROMPTS)
    assert hits(answers) == len(PROMPTS) * FULL_TOKENS, said(reader)
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]

    for shard in medium.stored():
        image = bytearray(shard.read())
        for at in range(HEADER_BYTES, len(image), 7):
            image[at] ^= 0x3C
        shard.write(sealed(image))
    assert reader.reset_prefix_cache()
    let_beliefs_lapse()
    answers = reader.generate(PROMPTS)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]
    assert reader.settle()
    reader.stop()
    assert "somebody without the key has changed them" in reader.log.read_text(errors="replace")


def test_a_key_file_that_others_can_read_ends_the_start(workshop: Workshop, key_file: Path) -> None:
    exposed = key_file.with_name("exposed")
    exposed.write_text(key_file.read_text())
    exposed.chmod(0o644)
    with pytest.raises(EngineError) as caught:
        start(workshop, tree(workshop.scratch / "exposed-kv"), authenticate={"key_file": str(exposed)})
    assert "authenticate.key_file" in str(caught.value)
    assert "mode 0644" in str(caught.value)
