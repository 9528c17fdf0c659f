"""The index against a dictionary: any sequence of calls, two size classes, refusals included."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nixl_offload.errors import IndexStateError
from nixl_offload.index import Index, State
from nixl_offload.types import Key, Location

KEYS = [Key(bytes([n]) * 32 + bytes(4)) for n in range(9)]
SIZES = (4096, 12288)
LOCATIONS = [Location(2, 4096 * n, size) for n in range(9) for size in SIZES]


@dataclass
class Held:
    """What the model knows of a key."""

    location: Location
    state: State
    pins: int = 0
    writer: bool = False


class IndexMachine(RuleBasedStateMachine):
    """Rules do to the index and to ``self.model`` what a caller may do, rightly or wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(tier=2)
        self.model: dict[Key, Held] = {}
        self.order: list[Key] = []
        """Evictable keys, least recently used first."""

    def gone(self, key: Key) -> Location:
        if key in self.order:
            self.order.remove(key)
        return self.model.pop(key).location

    @rule(key=st.sampled_from(KEYS), location=st.sampled_from(LOCATIONS), ready=st.booleans())
    def insert(self, key: Key, location: Location, ready: bool) -> None:
        insert = self.index.insert_ready if ready else self.index.insert_writing
        if key in self.model:
            with pytest.raises(IndexStateError):
                insert(key, location)
            return
        insert(key, location)
        state = State.READY if ready else State.WRITING
        self.model[key] = Held(location, state, writer=not ready)
        if ready:
            self.order.append(key)

    @rule(key=st.sampled_from(KEYS), ok=st.booleans())
    def finish_writing(self, key: Key, ok: bool) -> None:
        finish = self.index.commit if ok else self.index.abort
        held = self.model.get(key)
        if held is None or not held.writer:
            with pytest.raises(IndexStateError):
                finish(key)
        elif ok and held.state is State.WRITING:
            assert finish(key) is None
            held.state, held.writer = State.READY, False
            self.order.append(key)
        else:
            assert finish(key) == self.gone(key)

    @rule(key=st.sampled_from(KEYS))
    def pin(self, key: Key) -> None:
        held = self.model.get(key)
        if held is None or held.state is not State.READY:
            with pytest.raises(IndexStateError):
                self.index.pin(key)
            return
        assert self.index.pin(key) == held.location
        held.pins += 1
        if key in self.order:
            self.order.remove(key)

    @rule(key=st.sampled_from(KEYS))
    def unpin(self, key: Key) -> None:
        held = self.model.get(key)
        if held is None or not held.pins:
            with pytest.raises(IndexStateError):
                self.index.unpin(key)
            return
        held.pins -= 1
        freed = self.index.unpin(key)
        if held.pins:
            assert freed is None
        elif held.state is State.EVICTING:
            assert freed == self.gone(key)
        else:
            assert freed is None
            self.order.append(key)

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: Key) -> None:
        self.index.touch(key)
        if key in self.order:
            self.order.remove(key)
            self.order.append(key)

    @rule(key=st.sampled_from(KEYS), number=st.integers(0, 8))
    def renew(self, key: Key, number: int) -> None:
        held = self.model.get(key)
        if held is not None and held.state is State.READY:
            held.location = Location(2, 4096 * number, held.location.slot_bytes)
            self.index.renew(key, held.location)
            self.touch(key)

    @rule(slot_bytes=st.sampled_from((*SIZES, 777)))
    def evict(self, slot_bytes: int) -> None:
        victims = [k for k in self.order if self.model[k].location.slot_bytes == slot_bytes]
        found = self.index.evict(slot_bytes)
        if found is None:
            assert not victims
            return
        key, location = found
        assert key == victims[0]
        assert location == self.gone(key)

    def expect_drop(self, key: Key) -> Location | None:
        held = self.model.get(key)
        if held is None:
            return None
        if held.pins or held.writer:
            held.state = State.EVICTING
            return None
        return self.gone(key)

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: Key) -> None:
        assert self.index.drop(key) == self.expect_drop(key)

    @rule(rarely=st.integers(0, 9))
    def clear(self, rarely: int) -> None:
        if rarely:
            return
        for key in list(self.model):
            self.expect_drop(key)
        assert sorted(self.index.clear()) == sorted(held.location for held in self.model.values())

    @invariant()
    def agrees(self) -> None:
        assert len(self.index) == len(self.model)
        for key in KEYS:
            held = self.model.get(key)
            assert self.index.state(key) is (held.state if held else None)
            if held:
                assert self.index.location(key) == held.location
                continue
            with pytest.raises(KeyError):
                self.index.location(key)
        assert self.index.held == sum(held.writer or held.pins > 0 for held in self.model.values())
        self.index.check()


SETTINGS = settings(max_examples=80, stateful_step_count=60, deadline=None, derandomize=True)
TestIndexModel = IndexMachine.TestCase
TestIndexModel.settings = SETTINGS
