"""The scheduler's half with hints, without an engine: token ids become the keys that a request with these tokens has, a
piece at a step; hints come by ``kv_transfer_params``; too many at a time are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import (
    OffloadKey,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.request import Request

from nixl_offload.index import State
from nixl_offload.types import Key
from nixl_offload.vllm import hints
from nixl_offload.vllm.adapters import AdapterUse, adapter_of
from nixl_offload.vllm.connector_scheduler import NixlOffloadScheduler
from nixl_offload.vllm.messages import TicketReport
from tests.vllm import manager_rig
from tests.vllm.manager_rig import BLOCK_TOKENS, BLOCKS_PER_CHUNK, CHUNK_TOKENS

CHUNKS = 3
TOKENS = [7 * number % 1000 for number in range(CHUNKS * CHUNK_TOKENS + 10)]


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[NixlOffloadScheduler]:
    init_none_hash(sha256)
    config = manager_rig.config_of(manager_rig.memory_tier(64), manager_rig.slab_tier(tmp_path))
    made = manager_rig.scheduler_half(config)
    made.open(manager_rig.ranks())
    manager_rig.ranks_open(made.offload_manager)
    yield made
    made.offload_manager.shutdown()


def request_of(
    name: str,
    tokens: list[int],
    *,
    salt: str | None = None,
    adapter: LoRARequest | None = None,
    params: Any = None,
) -> Request:
    """A request as the engine makes it from one that has come."""
    sampling = SamplingParams(max_tokens=1, extra_args=None if params is None else {"kv_transfer_params": params})
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    return Request(name, tokens, sampling, None, lora_request=adapter, cache_salt=salt, block_hasher=hasher)


def keys_of(request: Request) -> list[OffloadKey]:
    hashes = request.block_hashes[BLOCKS_PER_CHUNK - 1 :: BLOCKS_PER_CHUNK]
    return [OffloadKey(bytes(each) + bytes(4)) for each in hashes]


def settle(scheduler: NixlOffloadScheduler, ticket: int) -> None:
    scheduler.offload_manager.settle({ticket: TicketReport(1, {})})


def moves(scheduler: NixlOffloadScheduler) -> list[Any]:
    scheduler.offload_manager.on_schedule_end(ScheduleEndContext([], []))
    return scheduler.offload_manager.take_moves()


def put_on_the_slab(scheduler: NixlOffloadScheduler, keys: Sequence[OffloadKey]) -> None:
    """Store chunks, have them written through, and gone from memory."""
    output = scheduler.offload_manager.prepare_store(keys, manager_rig.request("stores"))
    assert output is not None
    settle(scheduler, output.store_spec.ticket.ticket)  # type: ignore[attr-defined]
    for move in moves(scheduler):
        settle(scheduler, move.ticket)
    catalog = scheduler.offload_manager.catalog
    for key in keys:
        catalog.tiers[0].drop(Key(key))
        assert [tier.state(Key(key)) for tier in catalog.tiers] == [None, State.READY]


def pending_steps(scheduler: NixlOffloadScheduler) -> int:
    """Step until all hints were carried out; return how many steps that took."""
    steps = 0
    while scheduler._hints.has_pending:
        scheduler._hints.step()
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("salt", "adapter"), [(None, None), ("tenant", None), ("tenant", LoRARequest("adapter", 1, "/adapter"))]
)
def test_token_ids_give_the_keys_of_a_request_with_that_salt_and_adapter(
    scheduler: NixlOffloadScheduler, salt: str | None, adapter: LoRARequest | None
) -> None:
    right = keys_of(request_of("right", TOKENS, salt=salt, adapter=adapter))
    assert len(right) == CHUNKS
    if adapter is not None:
        use = AdapterUse(adapter_of(adapter), ("what it holds",))
        scheduler._take_adapters({0: {use.adapter: use.digests}})
        right = [make_offload_key(use.tag(get_offload_block_hash(key)), get_offload_group_idx(key)) for key in right]
    put_on_the_slab(scheduler, right)
    params = {"do_remote_decode": False, "nixl_offload": {"prefetch": True, "token_ids": TOKENS}}
    carrier = request_of("carrier", TOKENS[:1], salt=salt, adapter=adapter, params=params)
    scheduler.on_new_request(carrier)
    assert scheduler.has_pending_push_work(), "an idle engine steps on"
    assert pending_steps(scheduler) == 1
    [move] = moves(scheduler)
    assert list(move.keys) == right
    assert {target.tier for target in move.targets} == {0}
    settle(scheduler, move.ticket)


def test_another_salt_finds_nothing(scheduler: NixlOffloadScheduler) -> None:
    put_on_the_slab(scheduler, keys_of(request_of("right", TOKENS, salt="one")))
    params = {"nixl_offload": {"prefetch": True, "token_ids": TOKENS}}
    scheduler.on_new_request(request_of("carrier", TOKENS[:1], salt="another", params=params))
    pending_steps(scheduler)
    assert moves(scheduler) == []


def test_a_hint_about_many_chunks_takes_many_steps(
    scheduler: NixlOffloadScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is held up by more than its part; a prefix is dropped from its end."""
    monkeypatch.setattr(hints, "CHUNKS_PER_STEP", 2)
    keys = keys_of(request_of("right", TOKENS))
    put_on_the_slab(scheduler, keys)
    catalog = scheduler.offload_manager.catalog

    def send(**hint: Any) -> None:
        params = {"nixl_offload": {**hint, "token_ids": TOKENS}}
        scheduler.on_new_request(request_of(f"carrier of {hint}", TOKENS[:1], params=params))

    retained, left = [], []
    send(retain_s=60)
    while scheduler._hints.has_pending:
        scheduler._hints.step()
        retained.append([at for at, key in enumerate(keys) if Key(key) in catalog._retention._until_s])
    assert retained == [[0, 1], [0, 1, 2]]
    send(drop_from=0)
    while scheduler._hints.has_pending:
        scheduler._hints.step()
        left.append([at for at, key in enumerate(keys) if catalog.tiers[1].state(Key(key)) is State.READY])
    assert left == [[0], []]


def test_an_adapter_that_is_known_only_later_counts_from_the_first_token(
    scheduler: NixlOffloadScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks tell of it once the carrier has run; some of the prompt was hashed by then."""
    monkeypatch.setattr(hints, "HASHES_PER_STEP", 5)
    adapter = LoRARequest("adapter", 1, "/adapter")
    use = AdapterUse(adapter_of(adapter), ("what it holds",))
    plain = keys_of(request_of("right", TOKENS, adapter=adapter))
    right = [make_offload_key(use.tag(get_offload_block_hash(key)), get_offload_group_idx(key)) for key in plain]
    put_on_the_slab(scheduler, right)
    params = {"nixl_offload": {"prefetch": True, "token_ids": TOKENS}}
    scheduler.on_new_request(request_of("carrier", TOKENS[:1], adapter=adapter, params=params))
    scheduler._hints.step()
    scheduler._take_adapters({0: {use.adapter: use.digests}})
    pending_steps(scheduler)
    [move] = moves(scheduler)
    assert list(move.keys) == right
    settle(scheduler, move.ticket)


def counted(scheduler: NixlOffloadScheduler) -> dict[tuple[str, ...], float]:
    stats = scheduler.offload_manager.get_stats()
    assert stats is not None
    return dict(stats.data["data"]["vllm:nixl_offload_hints"])


@pytest.mark.parametrize(("limit", "most"), [("MAX_PROMPTS", 2), ("MAX_WAITING_TOKENS", 2 * len(TOKENS) + 1)])
def test_too_many_prompts_at_a_time_are_refused(
    scheduler: NixlOffloadScheduler, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """What has been hashed, or was no token, makes room for others."""
    monkeypatch.setattr(hints, limit, most)

    def send(name: str, tokens: list[Any]) -> None:
        params = {"nixl_offload": {"prefetch": True, "token_ids": tokens}}
        scheduler.on_new_request(request_of(name, [1], params=params))

    for number in range(4):
        send(f"carrier {number}", TOKENS if number else ["no token"])
    pending_steps(scheduler)
    send("later", TOKENS)
    found = counted(scheduler)
    refused = 2 if limit == "MAX_PROMPTS" else 1
    assert (found["prefetch", "taken"], found["any", "refused"]) == (5 - refused, refused)
    assert found["any", "bad"] == 1


def test_too_many_chunks_at_a_time_are_refused(
    scheduler: NixlOffloadScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that end faster than their chunks are retained leave no queue that grows for ever."""
    monkeypatch.setattr(hints, "MAX_WAITING_CHUNKS", 2 * CHUNKS + 1)

    def end(name: str) -> None:
        own = request_of(name, TOKENS, params={"nixl_offload": {"retain_s": 60}})
        scheduler.on_new_request(own)
        scheduler.request_finished(own)

    for number in range(4):
        end(f"own {number}")
    pending_steps(scheduler)
    end("later")
    pending_steps(scheduler)
    found = counted(scheduler)
    assert (found["retain", "taken"], found["any", "refused"]) == (5, 2)


def test_a_reset_ends_what_hints_have_asked_for(scheduler: NixlOffloadScheduler) -> None:
    """What waits for its turn would be retained again afterwards."""
    own = request_of("own", TOKENS, params={"nixl_offload": {"retain_s": 60}})
    scheduler.on_new_request(own)
    params = {"nixl_offload": {"retain_s": 60, "token_ids": TOKENS}}
    scheduler.on_new_request(request_of("carrier", TOKENS[:1], params=params))
    assert scheduler._hints.has_pending
    scheduler.reset_cache()
    scheduler.request_finished(own)
    assert not scheduler._hints.has_pending


def test_a_request_that_waits_for_room_hears_that_its_chunks_were_dropped(scheduler: NixlOffloadScheduler) -> None:
    """It is told the same in every step as long as nothing changes, and would load what is gone."""
    waits = request_of("waits", TOKENS)
    put_on_the_slab(scheduler, keys_of(waits))
    scheduler.on_new_request(waits)
    assert scheduler.get_num_new_matched_tokens(waits, 0) == (CHUNKS * CHUNK_TOKENS, True)
    params = {"nixl_offload": {"drop_from": CHUNK_TOKENS, "token_ids": TOKENS}}
    scheduler.on_new_request(request_of("carrier", TOKENS[:1], params=params))
    pending_steps(scheduler)
    assert scheduler.get_num_new_matched_tokens(waits, 0) == (CHUNK_TOKENS, True)


def test_what_is_to_be_done_at_the_end_waits_for_it(scheduler: NixlOffloadScheduler) -> None:
    own = request_of("own", TOKENS, params={"nixl_offload": {"retain_s": 60}})
    scheduler.on_new_request(own)
    assert scheduler._hints.waits_for_ends
    scheduler.request_finished(own)
    assert not scheduler._hints.waits_for_ends
    assert scheduler.has_pending_push_work(), "an idle engine steps on"
    assert pending_steps(scheduler) == 1
    catalog = scheduler.offload_manager.catalog
    assert catalog._retention._until_s.keys() == {Key(key) for key in keys_of(own)}
