"""Eviction policies: LRU is exactly LRU, S3-FIFO is exactly a plain model of it, and only S3-FIFO survives a scan."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_offload.index import Index, State
from nixl_offload.index.links import Links, Queue
from nixl_offload.index.policy import Ghosts, LruPolicy, Policy, S3FifoPolicy, make_policy
from nixl_offload.types import Key, Location

OPS = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "park", "unpark", "remove", "victim"]), st.integers(0, 11)), max_size=120
)


class LruModel:
    """LRU as anybody would write it."""

    def __init__(self) -> None:
        self.queue: OrderedDict[str, None] = OrderedDict()

    def add(self, name: str) -> None:
        self.queue[name] = None

    def touch(self, name: str) -> None:
        if name in self.queue:
            self.queue.move_to_end(name)

    def remove(self, name: str) -> None:
        self.queue.pop(name, None)

    park = remove
    unpark = add

    def victim(self) -> str | None:
        return self.queue.popitem(last=False)[0] if self.queue else None


class S3FifoModel:
    """S3-FIFO with plain lists, ghosts included."""

    def __init__(self) -> None:
        self.small: list[str] = []
        self.main: list[str] = []
        self.home: dict[str, list[str]] = {}
        self.uses: dict[str, int] = {}
        self.ghosts: list[str] | None = None
        self.ghost_capacity = 0

    def add(self, name: str) -> None:
        if self.ghosts is not None and name in self.ghosts[-self.ghost_capacity :]:
            # Its place stays, empty: ghosts age by victims, not by those that are left.
            self.ghosts[len(self.ghosts) - 1 - self.ghosts[::-1].index(name)] = ""
            self.home[name] = self.main
        else:
            self.home[name] = self.small
        self.uses[name] = 0
        self.home[name].append(name)

    def touch(self, name: str) -> None:
        self.uses[name] = min(3, self.uses[name] + 1)

    def park(self, name: str) -> None:
        self.home[name].remove(name)

    def unpark(self, name: str) -> None:
        self.home[name].append(name)

    def remove(self, name: str) -> None:
        if name in self.home[name]:
            self.home[name].remove(name)

    def victim(self) -> str | None:
        while self.small or self.main:
            if not self.main or len(self.small) >= (len(self.small) + len(self.main)) / 10:
                name = self.small.pop(0)
                if self.uses[name] < 2:
                    candidates = max(len(self.small) + len(self.main), 1)
                    if self.ghosts is None or candidates > 2 * self.ghost_capacity:
                        self.ghosts, self.ghost_capacity = [], candidates
                    self.ghosts.append(name)
                    return name
                self.uses[name] = 0
                self.home[name] = self.main
            else:
                name = self.main.pop(0)
                if not self.uses[name]:
                    return name
                self.uses[name] -= 1
            self.main.append(name)
        return None


def run_both(
    real: Policy, model: LruModel | S3FifoModel, links: Links, names: dict[int, str], ops: list[tuple[str, int]]
) -> None:
    """Do ``ops`` to both, leaving out what a caller must not do, and compare each victim and the candidates."""
    nodes: dict[str, int] = {}
    parked: set[str] = set()
    for op, number in ops:
        name = str(number)
        known = name in nodes
        if op == "victim":
            node = real.victim()
            expected = model.victim()
            assert (None if node is None else names[node]) == expected
            if node is not None:
                links.free(nodes.pop(names[node]))
        elif op == "add" and not known:
            node = nodes[name] = links.node()
            names[node] = name
            real.add(node)
            model.add(name)
        elif (known and op in ("touch", "remove")) or (known and op == ("unpark" if name in parked else "park")):
            getattr(real, op)(nodes[name])
            getattr(model, op)(name)
            if op == "remove":
                links.free(nodes.pop(name))
                parked.discard(name)
            elif op == "park":
                parked.add(name)
            elif op == "unpark":
                parked.remove(name)
        candidates = {names[node] for node in real}
        assert candidates == set(nodes) - parked
        assert len(real) == len(candidates)


@given(OPS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_lru_is_lru(ops: list[tuple[str, int]]) -> None:
    """Any sequence of calls: the victims are those of an OrderedDict."""
    links = Links()
    run_both(LruPolicy(links), LruModel(), links, {}, ops)


@given(OPS)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_s3fifo_is_its_model(ops: list[tuple[str, int]]) -> None:
    """Any sequence of calls, node numbers reused: victims, promotions and ghosts are those of the plain model."""
    links = Links()
    names: dict[int, str] = {}
    # Small numbers as fingerprints do not collide in the ghosts' table, and the model does not collide at all.
    real = S3FifoPolicy(links, lambda node: int(names[node]))
    run_both(real, S3FifoModel(), links, names, ops)


@pytest.mark.parametrize("seed", range(3))
def test_s3fifo_is_its_model_for_long(seed: int) -> None:
    """While the number of candidates rises and falls, so that victims return, and the ghosts' table is made anew."""
    chance = random.Random(seed)
    ops = []
    for count in (20, 5, 40, 10, 80):
        for weights in ((12, 6, 3), (3, 6, 6), (6, 6, 3)):
            words = chance.choices(["add", "touch", "victim", "park", "unpark", "remove"], (*weights, 1, 1, 1), k=400)
            ops += [(word, chance.randrange(count)) for word in words]
    links = Links()
    names: dict[int, str] = {}
    run_both(S3FifoPolicy(links, lambda node: int(names[node])), S3FifoModel(), links, names, ops)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(["push", "push_many", "pop", "renew", "remove"]),
            st.integers(0, 7),
        )
    )
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_queues_share_their_links_without_touching_each_other(ops: list[tuple[str, str, int]]) -> None:
    """Three queues threaded through the same columns behave as three lists."""
    links = Links()
    queues = {name: Queue(links) for name in "abc"}
    lists: dict[str, list[int]] = {name: [] for name in "abc"}
    nodes = [links.node() for _ in range(8)]
    assert links.in_use == len(queues) + len(nodes)
    for name, op, number in ops:
        node = nodes[number]
        if op == "pop":
            expected = lists[name].pop(0) if lists[name] else None
            assert queues[name].pop() == expected
        elif op == "push" and not links.linked(node):
            queues[name].push(node)
            lists[name].append(node)
        elif op == "push_many":
            many = [each for each in nodes[number:] if not links.linked(each)]
            queues[name].push_many(np.array(many, dtype=np.uint32))
            lists[name] += many
        elif op in ("renew", "remove") and node in lists[name]:
            getattr(queues[name], op)(node)
            lists[name].remove(node)
            if op == "renew":
                lists[name].append(node)
        for each in "abc":
            assert list(queues[each]) == lists[each]
            assert len(queues[each]) == len(lists[each])


def test_ghosts_forget_after_their_capacity_and_after_a_recall() -> None:
    """A ghost lives for ``capacity`` victims, and saves its chunk once."""
    ghosts = Ghosts(4)
    assert not ghosts.recall(0)
    for fingerprint in range(6):
        ghosts.remember(fingerprint)
    assert [ghosts.recall(n) for n in range(6)] == [False, False, True, True, True, True]
    assert not any(ghosts.recall(n) for n in range(6))


def test_ghosts_that_meet_are_not_taken_for_each_other() -> None:
    """Of two fingerprints with one place in the table the older is forgotten."""
    ghosts = Ghosts(4)
    ghosts.remember(5)
    assert not ghosts.recall(5 + (1 << 20))
    ghosts.remember(5 + (1 << 20))
    assert not ghosts.recall(5)
    assert ghosts.recall(5 + (1 << 20))


def test_ghosts_survive_the_wrap_of_their_clock() -> None:
    """After 2**32 victims the count starts over; ages stay right across it."""
    ghosts = Ghosts(4)
    ghosts._clock = (1 << 32) - 2
    for fingerprint in range(4):
        ghosts.remember(fingerprint)
    assert all(ghosts.recall(n) for n in range(4))


def test_an_unknown_policy_is_refused_by_name() -> None:
    """The message says what is allowed."""
    with pytest.raises(ValueError, match="lru, s3fifo"):
        make_policy("arc", Links(), lambda node: node)
    with pytest.raises(ValueError, match="lru, s3fifo"):
        Index("arc")


def hot_set_hits_after_scan(policy: str) -> float:
    """Fill 1000 slots, with 200 hot keys in half of all uses, then scan 5000 keys once; return the hot share left."""
    slots, hot, scan = 1000, 200, 5000
    index = Index(policy)
    choose = random.Random(7)

    def key_of(number: int) -> Key:
        return Key(number.to_bytes(36, "big"))

    def use(number: int) -> None:
        key = key_of(number)
        if index.state(key) is State.READY:
            index.touch(key)
            return
        location = Location(0, len(index) * 4096, 4096)
        if len(index) == slots:
            victim = index.evict(4096)
            assert victim is not None
            location = victim[1]
        index.insert_ready(key, location)

    for _ in range(6 * slots):
        use(choose.randrange(hot) if choose.random() < 0.5 else choose.randrange(hot, 4 * slots))
    for number in range(scan):
        use(1_000_000 + number)
    index.check()
    return sum(index.state(key_of(n)) is State.READY for n in range(hot)) / hot


def test_s3fifo_keeps_the_hot_set_through_a_scan() -> None:
    """Five times the cache is read once: S3-FIFO keeps nine tenths of the hot keys."""
    assert hot_set_hits_after_scan("s3fifo") > 0.9


def test_lru_loses_the_hot_set_to_a_scan() -> None:
    """The same load under LRU leaves nothing: the test above can fail."""
    assert hot_set_hits_after_scan("lru") == 0.0


def test_an_index_lists_its_keys_and_how_often_each_is_pinned() -> None:
    """For checks, of whatever state they are in."""
    index, mine, others = Index(), Key(b"1" * 36), Key(b"2" * 36)
    index.insert_ready(mine, Location(0, 0, 4096))
    index.insert_writing(others, Location(0, 4096, 4096))
    for _ in range(3):
        index.pin(mine)
    assert {key: index.pins(key) for key in index} == {mine: 3, others: 0}
