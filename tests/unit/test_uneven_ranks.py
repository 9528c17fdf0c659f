"""A shared tier whose ranks write shards of different sizes, as uneven pipeline stages do, or none at all: each shard
is believed by its own rank's size, only ranks that hold one are asked, and nobody's chunks are taken for damaged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from nixl_offload.tiers.shared.naming import parse_shard_name, shard_name, shards_of, witness_of, witness_rank
from nixl_offload.types import Outcome
from tests.unit.shared_rig import MemoryStore, Rig, keys_of, namespace_of

FOUR_LAYERS, THREE_LAYERS = 20_480, 16_384
SIZES: Final = [(FOUR_LAYERS, THREE_LAYERS, THREE_LAYERS), (0, THREE_LAYERS, FOUR_LAYERS)]
"""By KV group and rank: three stages, of which the first has no layer of group 1."""
SPACE: Final = namespace_of(3, sizes=SIZES)
MakeRig = Callable[..., Rig]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(store: MemoryStore) -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def build(**arguments: object) -> Rig:
        rigs.append(Rig(store, namespace=SPACE, **arguments))  # type: ignore[arg-type]
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.tier._presence.check()
        rig.tier.close()


@pytest.mark.parametrize("group", [0, 1])
def test_whole_chunks_are_found_whichever_rank_stands_for_them_and_nothing_is_deleted(
    make: MakeRig, store: MemoryStore, group: int
) -> None:
    rig, keys = make(), keys_of(60, group=group)
    rig.put(*keys)
    assert rig.hits("a", keys) == 60
    rig.settle()
    assert {shard.rank for name in store.names("head") if (shard := parse_shard_name(name))} <= set(
        SPACE.holders(group)
    )
    assert store.names("delete") == []


def test_the_witnesses_are_spread_over_the_ranks_that_hold_a_shard_and_as_ever_where_all_do() -> None:
    for group, holders in ((0, (0, 1, 2)), (1, (1, 2))):
        keys = keys_of(3000, group=group)
        shares = Counter(witness_rank(key, holders) for key in keys)
        assert set(shares) == set(holders)
        assert min(shares.values()) > 3000 / len(holders) * 0.9
        for key in keys[:50]:
            witness, rank = witness_of(SPACE, key), witness_rank(key, holders)
            assert witness == (shard_name(SPACE.name, key, rank), SIZES[group][rank])
            assert shards_of(SPACE, key)[0] == witness
            assert sorted(shards_of(SPACE, key)) == [(shard_name(SPACE.name, key, r), SIZES[group][r]) for r in holders]
    for key in keys_of(50):
        assert witness_rank(key, range(8)) == int.from_bytes(key[:4], "big") % 8, "chunks that are stored stay found"


@pytest.mark.parametrize("group", [0, 1])
def test_what_another_server_has_stored_whole_stays_whatever_becomes_of_our_store(
    make: MakeRig, store: MemoryStore, group: int
) -> None:
    """This server had looked in vain, the other one was quicker, and one of our ranks dropped or failed its part."""
    rig, keys = make(), keys_of(3, group=group)
    for key in keys:
        assert rig.tier.reserve(key, SPACE.slot_bytes(group), []) is not None
    rig.put(*keys)
    for key in keys[:2]:
        rig.tier.abort(key)
    rig.tier.stored(keys[:2], {keys[0]: Outcome.DROPPED, keys[1]: Outcome.FAILED}, rig.now())
    rig.tier.retire(keys[2])
    rig.settle()
    assert store.names("delete") == []


def test_a_group_that_the_model_does_not_have_is_a_miss_without_a_question(make: MakeRig, store: MemoryStore) -> None:
    rig, keys = make(), keys_of(5, group=7)
    assert rig.hits("a", keys) == 0
    rig.tier.loaded(keys, dict.fromkeys(keys, Outcome.CORRUPT), rig.now())
    rig.settle()
    assert rig.tier.in_use
    assert (store.names("head"), store.names("delete")) == ([], [])
