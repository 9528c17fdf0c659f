"""The index against a dictionary: any sequence of calls, two slot sizes, refusals included."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from nixl_offload.errors import IndexStateError
from nixl_offload.index import Index, State
from nixl_offload.types import Key, Location
from tests.invariants import check_index

KEYS = [Key(bytes([n]) * 32 + bytes(4)) for n in range(9)]
SIZES = (4096, 12288)
INSERTS, ENDS = {"insert_writing": State.WRITING, "insert_ready": State.READY}, ("commit", "abort")
LISTS = ("pin", "unpin", "touch")
CALLS = [*INSERTS, *ENDS, *["pin", "unpin"] * 2, "touch", "insert_ready", "evict", "drop"] * 8 + ["clear"]


@dataclass
class Held:
    """What the model knows of a key. It has readers if ``pins``, a writer if it is not READY and has none."""

    location: Location
    state: State
    pins: int = 0


class Model:
    """The keys, and those that may be evicted, least recently used first."""

    def __init__(self) -> None:
        self.held: dict[Key, Held] = {}
        self.order: list[Key] = []

    def gone(self, key: Key) -> Location:
        if key in self.order:
            self.order.remove(key)
        return self.held.pop(key).location

    def used(self, key: Key) -> None:
        """The key is READY and unpinned, and the most recently used."""
        self.order = [each for each in self.order if each != key] + [key]

    def drop(self, key: Key) -> Location | None:
        held = self.held.get(key)
        if held is None or key in self.order:
            return held and self.gone(key)
        held.state = State.EVICTING
        return None

    def call(self, what: str, key: Key, held: Held | None, location: Location) -> object:
        """Do to the model what the index does, and return what it returns. Raises IndexStateError."""
        has_writer = held is not None and not held.pins and key not in self.order
        if what in INSERTS and held is None:
            self.held[key] = Held(location, INSERTS[what])
            if what == "insert_ready":
                self.used(key)
        elif what in ENDS and held is not None and has_writer:
            if what == "abort" or held.state is State.EVICTING:
                return self.gone(key) if what == "abort" else (self.gone(key), False)
            held.state = State.READY
            self.used(key)
            return held.location, True
        elif what == "pin" and held is not None and held.state is State.READY:
            held.pins += 1
            self.order = [each for each in self.order if each != key]
            return [held.location]
        elif what == "unpin" and held is not None and held.pins:
            held.pins -= 1
            if not held.pins and held.state is State.EVICTING:
                return [self.gone(key)]
            if not held.pins:
                self.used(key)
            return []
        elif what == "touch":
            if key in self.order:
                self.used(key)
        elif what == "drop":
            return self.drop(key)
        else:
            raise IndexStateError
        return None


@pytest.mark.parametrize("seed", range(20))
def test_the_index_agrees_with_a_dictionary(seed: int) -> None:
    chance, index, model = random.Random(seed), Index(tier=2), Model()
    for _ in range(1000):
        what, key = chance.choice(CALLS), chance.choice(KEYS)
        held, location = model.held.get(key), Location(2, 4096 * chance.randrange(9), chance.choice(SIZES))
        if what == "insert_ready" and held is not None and held.state is State.READY:
            held.location = location._replace(slot_bytes=held.location.slot_bytes)
            index.insert_ready(key, held.location)
            model.call("touch", key, held, location)
        elif what == "evict":
            size = chance.choice((*SIZES, 777))
            victim = next((each for each in model.order if model.held[each].location.slot_bytes == size), None)
            assert index.evict(size) == (victim and (victim, model.gone(victim)))
        elif what == "clear":
            for each in list(model.held):
                model.drop(each)
            index.clear()
        else:
            arguments = (key, location) if what in INSERTS else ([key] if what in LISTS else key,)
            try:
                expected = model.call(what, key, held, location)
            except IndexStateError:
                with pytest.raises(IndexStateError):
                    getattr(index, what)(*arguments)
            else:
                assert getattr(index, what)(*arguments) == expected
        agree(index, model)


def agree(index: Index, model: Model) -> None:
    assert {key: (index.state(key), index.location(key), index.pins(key)) for key in index} == {
        key: (held.state, held.location, held.pins) for key, held in model.held.items()
    }
    assert len(index) == len(model.held)
    assert len(index._held) == len(model.held) - len(model.order)
    for key in KEYS:
        found = index.find(key)
        assert (found is None) == (key not in model.held) == (index.state(key) is None)
    check_index(index)
