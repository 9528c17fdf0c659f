"""Hints without an engine: their format. Token ids become the keys that a request with these tokens has, some in each
step. Too many at a time are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, make_offload_key

from nixl_offload.index import State
from nixl_offload.types import Key
from nixl_offload.vllm import hints
from nixl_offload.vllm.adapters import AdapterUse, adapter_of
from nixl_offload.vllm.hints import MAX_TOKENS, BadHintError, Hint, hint_of
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCK_TOKENS, BLOCKS_PER_CHUNK, CHUNK_TOKENS, Rig, request_of

CHUNKS = 3
TOKENS = [7 * number % 1000 for number in range(CHUNKS * CHUNK_TOKENS + 10)]
ADAPTER = LoRARequest("adapter", 1, "/adapter")
USE = AdapterUse(adapter_of(ADAPTER), ("what it holds",))


class Hinted(Rig):
    """Over memory and a slab."""

    def __init__(self, path: Path) -> None:
        super().__init__(manager_rig.config_of(manager_rig.memory_tier(64), manager_rig.slab_tier(path)))

    def send(self, hint: dict[str, Any], **request: Any) -> None:
        """Send a hint with a request of its own, about ``TOKENS`` if it says nothing else."""
        hint = {"token_ids": TOKENS, **hint}
        self.arrive(f"carrier {len(self.scheduler.states())}", TOKENS[:1], params={"nixl_offload": hint}, **request)

    def put_on_the_slab(self, keys: Sequence[OffloadKey]) -> None:
        """Store chunks, have them written through, and gone from memory."""
        self.store_keys(keys)
        self.write_through()
        tiers = self.manager.catalog.tiers
        for key in keys:
            tiers[0].drop(Key(key))
            assert [tier.state(Key(key)) for tier in tiers] == [None, State.READY]

    def carry_out(self) -> int:
        """Step until all hints were carried out; return how many steps that took."""
        steps = 0
        while self.scheduler._hints.has_pending:
            self.scheduler._hints.step()
            steps += 1
        return steps

    def counted(self) -> dict[tuple[str, ...], float]:
        stats = self.manager.get_stats()
        assert stats is not None
        return dict(stats.data["data"]["vllm:nixl_offload_hints"])


@pytest.fixture
def half(tmp_path: Path, keep: Callable[[Hinted], Hinted]) -> Hinted:
    return keep(Hinted(tmp_path))


def keys_of(*, use: AdapterUse | None = None, **request: Any) -> list[OffloadKey]:
    """Return the keys that a request with ``TOKENS`` has."""
    hashes = request_of("right", TOKENS, **request).block_hashes[BLOCKS_PER_CHUNK - 1 :: BLOCKS_PER_CHUNK]
    keys = [make_offload_key(each, 0) for each in hashes]
    return keys if use is None else [make_offload_key(use.tag(get_offload_block_hash(key)), 0) for key in keys]


@pytest.mark.parametrize(("salt", "adapter"), [(None, None), ("tenant", None), ("tenant", ADAPTER)])
def test_token_ids_give_the_keys_of_a_request_with_that_salt_and_adapter(
    half: Hinted, monkeypatch: pytest.MonkeyPatch, salt: str | None, adapter: LoRARequest | None
) -> None:
    right = keys_of(salt=salt, adapter=adapter, use=USE if adapter else None)
    if adapter is not None:
        half.scheduler._take_adapters({0: {USE.adapter: USE.digests}})
    half.put_on_the_slab(right)
    monkeypatch.setattr(hints, "HASHES_PER_STEP", 5)
    half.send({"prefetch": True}, salt=salt, adapter=adapter)
    assert half.scheduler.has_pending_push_work(), "an idle engine steps on"
    assert half.carry_out() == -(-len(TOKENS) // (5 * BLOCK_TOKENS)) > 1, "no step is held up by a long prompt"
    [move] = half.moves()
    assert list(move.keys) == right
    assert {target.tier for target in move.targets} == {0}
    half.report(move.ticket)


def test_another_salt_finds_nothing(half: Hinted) -> None:
    half.put_on_the_slab(keys_of(salt="one"))
    half.send({"prefetch": True}, salt="another")
    half.carry_out()
    assert half.moves() == []


@pytest.mark.parametrize(
    ("limit", "most", "bad"), [("MAX_PROMPTS", 2, ["no token"]), ("MAX_WAITING_TOKENS", 2 * len(TOKENS) + 1, [-5])]
)
def test_too_many_prompts_at_a_time_are_refused(
    half: Hinted, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, bad: list[Any]
) -> None:
    """Prompts that were hashed, or refused as bad, make room for new ones."""
    monkeypatch.setattr(hints, limit, most)
    half.send({"prefetch": True, "token_ids": bad})
    for _ in range(3):
        half.send({"prefetch": True})
    half.carry_out()
    half.send({"prefetch": True})
    found, refused = half.counted(), 2 if limit == "MAX_PROMPTS" else 1
    assert (found["prefetch", "taken"], found["any", "refused"], found["any", "bad"]) == (5 - refused, refused, 1)


def test_a_reset_ends_what_hints_have_asked_for(half: Hinted) -> None:
    half.send({"prefetch": True})
    half.scheduler.reset_cache()
    assert not half.scheduler._hints.has_pending


def test_every_field() -> None:
    raw = {"token_ids": [1, 2], "prefetch": True, "store": False}
    hint = hint_of({"do_remote_decode": True, "nixl_offload": raw})
    assert hint == Hint(token_ids=[1, 2], prefetch=True, store=False)
    assert hint_of({"nixl_offload": {}}) == Hint()


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (None, ""),
        (True, ""),
        ([{"prefetch": True}], ""),
        ({"prefech": True}, ""),
        ({7: True}, ""),
        ({"token_ids": []}, ".token_ids"),
        ({"token_ids": "12"}, ".token_ids"),
        ({"token_ids": [0] * (MAX_TOKENS + 1)}, ".token_ids"),
        ({"prefetch": 1}, ".prefetch"),
        ({"prefetch": None}, ".prefetch"),
        ({"store": "no"}, ".store"),
    ],
)
def test_bad_hints_are_named_with_what_would_be_right(raw: Any, where: str) -> None:
    """The value is not in the text: it may be a part of a user's prompt."""
    with pytest.raises(BadHintError) as bad:
        hint_of({"nixl_offload": raw})
    assert bad.value.path == "kv_transfer_params.nixl_offload" + where
    assert str(bad.value).startswith(f"{bad.value.path}: ")
    assert len(str(bad.value)) < 200
