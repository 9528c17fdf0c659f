"""The table of keys against a dict: growth, removal, keys of other lengths, hashes that collide, bulk insertion."""

from __future__ import annotations

import random

import pytest

from nixl_offload.index import key_table
from nixl_offload.index.key_table import KeyTable
from nixl_offload.types import Key


def key(number: int, length: int = 36) -> Key:
    return Key(number.to_bytes(length, "big"))


def filled(count: int) -> KeyTable:
    table = KeyTable()
    table.grow(count)
    assert table.add_many([key(number) for number in range(1, count + 1)], 1)
    return table


def test_random_calls_agree_with_a_dict() -> None:
    """Through several splits; removed keys are gone, nodes are used again, a key of another length is a key."""
    table, model = KeyTable(), dict[Key, int]()
    chance = random.Random(1)
    free = list(range(30_000, 0, -1))
    for step in range(60_000):
        if free and (chance.random() < 0.7 or not model):
            name = key(chance.randrange(1 << 30), 36 if step % 1000 else chance.choice((5, 7, 36, 64)))
            if name in model:
                continue
            node = free.pop()
            table.grow(node)
            table.add(name, node)
            model[name] = node
        else:
            name = chance.choice(list(model)) if step % 50 == 0 else next(iter(model))
            table.remove(model[name])
            free.append(model.pop(name))
            assert table.find(name) == 0
        if step % 5000 == 0:
            table.check()
            assert all(table.find(name) == node and table.key(node) == name for name, node in model.items())
    assert sorted(table) == sorted(model)
    table.check()


@pytest.mark.parametrize("length", [5, 36])
def test_in_any_order_a_key_is_found_and_an_absent_one_is_not(length: int) -> None:
    """Up, down, by leaps, beyond both ends; the row of a removed node answers to nobody."""
    count = 20_000
    table = KeyTable()
    table.grow(count)
    for number in range(1, count + 1):
        table.add(key(number, length), number)
    assert not table._aside, "none is a Python object of its own"
    for order in (range(1, count + 1), range(count, 0, -1), range(1, count, 7), (count, 1, count, 0, 1, 0)):
        assert [table.find(key(number, length)) for number in order] == list(order)
    for number in range(2, count, 2):
        table.remove(number)
    assert [table.find(key(n, length)) for n in range(count + 2)] == [
        n if n % 2 or n == count else 0 for n in range(count + 1)
    ] + [0]
    assert [table.find(Key(b"")), table.find(key(1, 4)), table.find(key(1, 40))] == [0, 0, 0]
    table.check()


@pytest.mark.parametrize("damaged", [0, 5, 64])
def test_a_damaged_first_key_does_not_decide_the_length(damaged: int) -> None:
    """A few keys later that of most counts: no more than those few are set aside, and all are found."""
    table = KeyTable()
    table.grow(1000)
    names = [Key(bytes(damaged))] + [key(number) for number in range(2, 1000)]
    for node, name in enumerate(names, 1):
        table.add(name, node)
        table.check()
    assert len(table._aside) == 1
    assert [table.find(name) for name in names] == list(range(1, 1000))
    table.remove(1)
    assert table.find(names[0]) == 0
    table.check()


def test_bulk_insertion_is_whole_or_not_at_all() -> None:
    """A key that is here, one twice, one of another length: each refuses all, and the same keys fit afterwards."""
    table = filled(10_000)
    more = [key(number) for number in range(20_001, 40_001)]
    table.grow(30_001)
    for spoilt in (key(7), more[3], key(1, 20)):
        assert not table.add_many([*more[:9_999], spoilt, *more[9_999:]], 10_001)
        assert len(table) == 10_000
        assert not any(map(table.find, more))
        table.check()
    assert table.add_many(more, 10_001)
    assert [table.find(name) for name in more] == list(range(10_001, 30_001))
    table.check()


def test_the_length_of_keys_is_not_that_of_a_damaged_row() -> None:
    """Which may come first."""
    table = KeyTable()
    table.grow(9)
    assert not table.add_many([key(1, 64), key(2), key(3)], 1)
    assert table.add_many([key(2), key(3)], 1)
    table.add(key(1, 64), 3)
    assert table.find(key(1, 64)) == 3
    table.check()


def test_hashes_that_collide_cost_time_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows the hash's seed can make them: what does not fit a segment is set aside."""
    monkeypatch.setattr(key_table, "hash", lambda _: 12345, raising=False)
    monkeypatch.setattr(key_table, "_FULL_AT", 50)
    monkeypatch.setattr(key_table, "_SPLIT_AT", 20)
    monkeypatch.setattr(key_table, "_DEPTH_MAX", 6)
    table = KeyTable()
    table.grow(200)
    assert not table.add_many([key(number) for number in range(1, 101)], 1)
    for number in range(1, 101):
        table.add(key(number), number)
    table.check()
    assert [table.find(key(number)) for number in range(102)] == [0, *range(1, 101), 0]
    for number in range(1, 101, 3):
        table.remove(number)
    assert [table.find(key(number)) for number in range(1, 101)] == [n if n % 3 != 1 else 0 for n in range(1, 101)]
    table.check()


def test_a_segment_that_cannot_be_split_keeps_free_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, the search for an absent key would go round for ever."""
    segment, depth_max = key_table._SEGMENT, key_table._DEPTH_MAX
    monkeypatch.setattr(key_table, "hash", lambda name: int.from_bytes(name[:8], "big") << depth_max, raising=False)
    table = KeyTable()
    table.grow(segment + 1)
    names = [Key(number.to_bytes(8, "big") + bytes(28)) for number in range(segment + 1)]
    for node, name in enumerate(names, 1):
        table.add(name, node)
    begin = table._starts[0]
    assert 0 in table._cells[begin : begin + segment]
    assert [table.find(name) for name in names] == list(range(1, segment + 2))
    assert table.find(Key(bytes(35) + b"x")) == 0
    table.check()
