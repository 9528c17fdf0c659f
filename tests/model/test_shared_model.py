"""SharedTier against a plain model: lookups, stores, loads, failures, resets, expiry, others' work, in any order.

Proves: a hit only for a chunk that this server stored, saw, or may infer from a later one of its chain, and never one
from before a reset; a request that asks in each step is never told to beyond its deadline; pins and reservations all
come back.
"""

from __future__ import annotations

import time

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nixl_offload.catalog.catalog import Catalog, LoadTicket, StoreTicket
from nixl_offload.errors import StoreError
from nixl_offload.tiers.shared.tier import RESET_MARGIN_S
from nixl_offload.types import Key, Lookup, LookupContext, Outcome
from tests.invariants import check_presence
from tests.unit.shared_rig import SLOT, MemoryStore, Rig, answer, is_at_work, keys_of, namespace_of

KEYS = keys_of(24)
TIMEOUT_S = 30.0
TTL_S = 5000.0
OUTCOMES = [Outcome.FAILED, Outcome.CORRUPT, Outcome.DROPPED]
chains = st.tuples(st.integers(0, 12), st.integers(1, 24)).map(lambda ends: KEYS[ends[0] : ends[0] + ends[1]])
requests = st.sampled_from(["a", "b", "c"])
failures = st.dictionaries(st.integers(0, 23), st.sampled_from(OUTCOMES), max_size=8)
"""By position; those beyond the end of a ticket do not count."""


class SharedMachine(RuleBasedStateMachine):
    """Rules do what vLLM and other servers may do; time passes only by rule.

    What threads do in the background is not deterministic, so nothing that is drawn may depend on it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.rig = Rig(
            self.store,
            namespace=namespace_of(2, sizes=[(SLOT, 3 * SLOT // 4)] * 2),
            ttl_s=TTL_S,
            threads=3,
            timeout=f"{TIMEOUT_S:g}s",
            present_for="600s",
            absent_for="10s",
            max_keys=1000,
        )
        self.catalog = Catalog(
            [self.rig.tier],
            world_size=2,
            slot_bytes=lambda key: SLOT,
            store_backlog_bytes=1 << 30,
            pending_limit_s=60.0,
        )
        self.plausible: set[Key] = set()
        """Ever there as a good shard since the last reset, or before one that was."""
        self.asking: dict[str, tuple[float, int]] = {}
        """Request -> when it was first told to ask again, and in which step last."""
        self.stores: list[StoreTicket] = []
        self.loads: list[LoadTicket] = []
        self.reset_s: float | None = None

    def teardown(self) -> None:
        try:
            self.come_to_rest()
        finally:
            self.rig.tier.close()

    def come_to_rest(self) -> None:
        self.store.before = answer
        for grant in self.stores + self.loads:
            self.catalog.report(grant.ticket, 2, {}, self.rig.now())
        self.rig.settle()
        check_presence(self.rig.tier._presence)
        assert len(self.rig.tier._presence._held) == 0, "a pin or a reservation was not taken back"
        for request in ("a", "b", "c"):
            self.rig.tier.forget_request(request)
        assert len(self.rig.tier._lookups) == 0
        assert not self.rig.tier._lookups._covered
        # Nothing stays broken: what is whole is found once time has passed.
        self.rig.ahead_s += 100_000.0
        for _ in range(50):
            self.rig.flush()
        self.rig.wait_for(lambda: 1 if self.rig.tier._reach.closed else None)
        self.rig.put(*KEYS, age_s=-self.rig.ahead_s)
        assert self.rig.hits("last", KEYS) == len(KEYS)

    # Other servers

    @rule(keys=chains, old=st.booleans())
    def others_store(self, keys: list[Key], old: bool) -> None:
        self.rig.put(*keys, age_s=-self.rig.ahead_s + (TTL_S + 1000.0 if old else 0.0))
        if not old:
            # By monotony: one that is there says that all before it are, as far as this server may infer.
            if self.reset_s is None:
                self.plausible.update(KEYS[: KEYS.index(keys[-1]) + 1])
            elif self.rig.now() >= self.reset_s + RESET_MARGIN_S:
                self.plausible.update(keys)

    @rule(keys=chains, rank=st.integers(0, 1))
    def others_delete(self, keys: list[Key], rank: int) -> None:
        for key in keys:
            self.store.objects.pop(self.rig.names(key)[rank], None)

    @rule(key=st.sampled_from(KEYS), rank=st.integers(0, 1))
    def an_object_is_cut(self, key: Key, rank: int) -> None:
        name = self.rig.names(key)[rank]
        if name in self.store.objects:
            self.store.put(name, SLOT // 2, -self.rig.ahead_s)

    @rule(works=st.sampled_from(["yes", "yes", "yes", "no", "sometimes"]))
    def the_store(self, works: str) -> None:
        calls = iter(range(10**9))

        def before(operation: str, name: str) -> None:
            if works == "no" or (works == "sometimes" and next(calls) % 4 == 0):
                raise StoreError("no", cause="server")

        self.store.before = before

    # Time

    @rule(seconds=st.sampled_from([0.5, 5.0, 11.0, 40.0, 700.0, 2000.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.ahead_s += seconds

    @rule()
    def step_ends(self) -> None:
        self.catalog.on_step(self.rig.now())

    @rule()
    def background_work_is_done(self) -> None:
        deadline_s = time.monotonic() + 20.0
        while is_at_work(self.rig.tier._prober) and time.monotonic() < deadline_s:
            self.catalog.on_step(self.rig.now())

    # vLLM

    @rule(request=requests, keys=chains, backwards=st.booleans())
    def look_up(self, request: str, keys: list[Key], backwards: bool) -> None:
        now_s = self.rig.now()
        for position in range(len(keys) - 1, -1, -1) if backwards else range(len(keys)):
            answer = self.catalog.lookup(keys[position], now_s, LookupContext(request, 16 * (position + 1)))
            if answer is Lookup.HIT:
                assert keys[position] in self.plausible, "a hit from nowhere"
            elif answer is Lookup.RETRY:
                step = self.rig.tier._lookups._step
                first_s, last_step = self.asking.get(request, (now_s, step))
                if step > last_step + 1:
                    first_s = now_s  # it has not asked for a step, so it may have been answered: that is another wait
                self.asking[request] = first_s, step
                assert now_s - first_s <= TIMEOUT_S, "held back beyond the deadline"
            elif answer is Lookup.MISS and not backwards:
                break

    @rule(request=requests, keys=chains, backwards=st.booleans())
    def look_up_until_answered(self, request: str, keys: list[Key], backwards: bool) -> None:
        for _ in range(8):
            self.look_up(request, keys, backwards)
            self.step_ends()
            self.background_work_is_done()
        self.look_up(request, keys, backwards)

    @rule(request=requests)
    def request_ends(self, request: str) -> None:
        self.catalog.forget_request(request)
        self.asking.pop(request, None)

    @rule(keys=chains)
    def begin_store(self, keys: list[Key]) -> None:
        grant = self.catalog.reserve(keys, self.rig.now())
        if grant is not None:
            self.stores.append(grant)

    @rule(first=st.booleans(), failed=failures)
    def end_store(self, first: bool, failed: dict[int, Outcome]) -> None:
        if not self.stores:
            return
        grant = self.stores.pop(0 if first else -1)
        failed = {position: outcome for position, outcome in failed.items() if position < len(grant.keys)}
        for position, key in enumerate(grant.keys):
            self.rig.put(key, ranks=[0] if position in failed else None, age_s=-self.rig.ahead_s)
            # A store from before a reset is forgotten by this server; that its object is younger is another matter.
            self.plausible.add(key)
        if self.reset_s is None:
            self.plausible.update(KEYS[: max(KEYS.index(key) for key in grant.keys) + 1])
        self.catalog.report(grant.ticket, 2, failed, self.rig.now())

    @rule(keys=chains)
    def begin_load(self, keys: list[Key]) -> None:
        self.loads.append(self.catalog.prepare_load(keys, self.rig.now()))

    @rule(first=st.booleans(), failed=failures)
    def end_load(self, first: bool, failed: dict[int, Outcome]) -> None:
        if not self.loads:
            return
        grant = self.loads.pop(0 if first else -1)
        failed = {position: outcome for position, outcome in failed.items() if position < len(grant.keys)}
        self.catalog.report(grant.ticket, 2, failed, self.rig.now())
        bad = [grant.keys[position] for position, outcome in failed.items() if outcome is not Outcome.DROPPED]
        for position, key in enumerate(grant.keys):
            if key in bad and grant.locations[position].tier == 0:
                answer = self.catalog.lookup(key, self.rig.now(), LookupContext("other", 16))
                assert answer is not Lookup.HIT, "served again what had just failed"
        self.catalog.forget_request("other")

    @rule()
    def reset_cache(self) -> None:
        self.catalog.clear()
        self.reset_s = self.rig.now()
        # Nothing that is there now counts, nor anything that is not younger than the margin; stores under way do not.
        self.plausible.clear()

    @rule(keys=chains)
    def others_store_long_after_a_reset(self, keys: list[Key]) -> None:
        self.rig.ahead_s += RESET_MARGIN_S
        self.others_store(keys, False)

    @rule(keys=chains)
    def touch(self, keys: list[Key]) -> None:
        self.rig.tier.touch(keys)

    @invariant()
    def books_are_right(self) -> None:
        check_presence(self.rig.tier._presence)


TestShared = SharedMachine.TestCase
TestShared.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
