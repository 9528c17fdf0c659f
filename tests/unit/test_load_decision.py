"""Load or recompute: estimates follow what is observed, a stall moves them only so far, and no verdict is final."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_offload.catalog import LoadTicket
from nixl_offload.types import Key, Location
from nixl_offload.vllm.load_decision import (
    LOADS_AT_ONCE,
    SLOW_FAILURE_S,
    WAIT_S,
    Hit,
    LoadDecider,
    LoadNotes,
    Part,
    PrefillSpeed,
    TierSpeed,
)

MIB = 1 << 20
TOKEN_BYTES = 4096
CHUNK_TOKENS = 1024


def tier_speed(latency_s: float, bytes_per_s: float) -> TierSpeed:
    """A tier that was observed at one instant, with loads of 1 to 64 MiB."""
    tier = TierSpeed()
    for number in range(20):
        size = (1 + 63 * number // 19) * MIB
        tier.observe(size, latency_s + size / bytes_per_s, 0.0)
    return tier


def judge(*bytes_per_s: float | None, token_s: float | None = 1e-3) -> LoadDecider:
    """Return a decision maker over tiers of known bandwidths (None: unknown)."""
    judged = LoadDecider(len(bytes_per_s), token_bytes={0: TOKEN_BYTES})
    for tier, speed in enumerate(bytes_per_s):
        if speed is not None:
            for number in range(20):
                size = (1 + 3 * number) * MIB
                judged.tiers[tier].observe(size, size / speed, 0.0)
    if token_s is not None:
        for context in range(0, 8192, 512):
            judged.prefill.observe(512, 512 * token_s, context)
    return judged


def part(tier: int, tokens: int) -> Part:
    return Part(tier, tokens, tokens * TOKEN_BYTES)


def counts(judged: LoadDecider) -> dict[tuple[Any, ...], int]:
    return {labels[1:]: requests for labels, requests in judged.counts.items()}


# Tiers


def test_latency_and_bandwidth_are_told_apart() -> None:
    tier = tier_speed(0.050, 200 * MIB)
    assert tier.seconds(MIB, 0.0) == pytest.approx(0.055)
    assert tier.seconds(1000 * MIB, 0.0) == pytest.approx(5.05)


def test_too_few_observations_say_nothing_and_void_ones_do_not_count() -> None:
    tier = TierSpeed()
    for bytes_moved, seconds in ((0, 1.0), (-1, 1.0), (MIB, 0.0), (MIB, -1.0), (MIB, math.inf), (MIB, math.nan)):
        tier.observe(bytes_moved, seconds, 0.0)
    tier.observe(MIB, 0.01, 0.0)
    tier.observe(2 * MIB, 0.02, 0.0)
    assert not tier.is_known
    assert tier.seconds(MIB, 0.0) == 0.0
    tier.observe(3 * MIB, 0.03, 0.0)
    assert tier.seconds(MIB, 0.0) == pytest.approx(0.01)


def test_a_stall_raises_the_estimate_but_not_for_ever() -> None:
    """One stalled load has a bounded effect, several count fully, and good ones repair the estimate within a minute."""
    tier = tier_speed(0.0, 100 * MIB)
    tier.observe(32 * MIB, 600.0, 0.0)
    assert 0.5 < tier.seconds(32 * MIB, 0.0) < 1.5, "raised, and nowhere near ten minutes"
    for _ in range(5):
        tier.observe(32 * MIB, 600.0, 0.0)
    assert tier.seconds(32 * MIB, 0.0) > 30.0
    for second in range(60):
        size = 16 + second % 3 * 16
        tier.observe(size * MIB, size / 100, float(second))
    assert tier.seconds(32 * MIB, 0.0) == pytest.approx(0.32, rel=0.1)


def test_a_trial_speaks_for_all_sizes_and_its_first_load_alone() -> None:
    tier = TierSpeed()
    for _ in range(10):
        tier.observe(MIB, 1.0, 0.0)
    tier.begin(1, MIB, 100.0, on_trial=True)
    tier.end(1)
    for _ in range(10):
        tier.observe(MIB, 0.01, 100.0)
    assert tier.seconds(100 * MIB, 0.0) == pytest.approx(1.0), "no longer as slow as it was"
    tier.observe(MIB, 600.0, 100.0)
    assert tier.seconds(MIB, 0.0) < 0.08, "a stall later on counts as any other"


def test_a_tier_is_not_judged_by_its_queue() -> None:
    """Eight loads at once from a tier of 100 MiB/s: the last took 0.8 s, and a lone one is expected in 0.1 s."""
    tier = TierSpeed()
    for burst in range(3):
        for number in range(8):
            tier.begin(8 * burst + number, 10 * MIB, 10.0 * burst)
        for number in range(8):
            tier.observe(10 * MIB, 0.1 * (number + 1), 10.0 * burst + 0.1 * (number + 1), 8 * burst + number)
            tier.end(8 * burst + number)
    assert tier.seconds(10 * MIB, 0.0) == pytest.approx(0.1)
    tier.begin(99, 30 * MIB, 30.0)
    assert tier.seconds(10 * MIB, 30.0) == pytest.approx(0.4)


@pytest.mark.parametrize("tier", [tier_speed(0.0, 100 * MIB), TierSpeed()], ids=["known", "unknown"])
def test_a_load_that_is_late_makes_those_behind_it_late(tier: TierSpeed) -> None:
    """Nothing has been reported yet, but a load of 0.1 s is out for 5 s. One that waits for another tier makes none
    late here: it ends with its last part, and memory has done its own long before the bucket has.
    """
    tier.begin(1, 10 * MIB, 0.0, is_slowest=False)
    assert tier.seconds(10 * MIB, 5.0) == pytest.approx(0.2 if tier.is_known else 0.0)
    tier.begin(2, 10 * MIB, 5.0)
    assert tier.seconds(10 * MIB, 10.1) == pytest.approx(5.1)


def test_a_failed_load_says_that_it_would_have_taken_longer() -> None:
    """It changes the estimate only if the load was expected to end sooner, after those before it."""
    tier = tier_speed(0.0, MIB)
    for ticket in range(1, 9):
        tier.begin(ticket, MIB, 0.0)
    before_s = tier.seconds(MIB, 0.0)
    tier.observe(MIB, 1.9, 1.9, 2, failed=True)
    assert tier.seconds(MIB, 0.0) == before_s, "two seconds were expected of the second one"
    tier.observe(MIB, 5.0, 5.0, 1, failed=True)
    assert tier.seconds(MIB, 0.0) > 1.05 * before_s, "one second of the first, however many came behind it"
    unknown = TierSpeed()
    for _ in range(3):
        unknown.observe(MIB, SLOW_FAILURE_S, 0.0, failed=True)
    assert not unknown.is_known, "refused"


# Computing


def test_prefill_grows_with_the_context_when_the_samples_say_so() -> None:
    """Short steps, mostly overhead, count little."""
    level, growing, short = PrefillSpeed(), PrefillSpeed(), PrefillSpeed()
    for speed, token_context_s in ((level, 0.0), (growing, 1e-6)):
        for _ in range(4):
            for context in range(0, 8192, 512):
                speed.observe(512, 512 * (1e-3 + token_context_s * (context + 256)), context)
    for context in (0, 7000):
        assert level.seconds(1000, context) == pytest.approx(1.0)
        assert growing.seconds(1000, context) == pytest.approx(1000 * (1e-3 + 1e-6 * (context + 500)))
    assert growing.seconds(0, 7000) == 0.0
    for _ in range(20):
        short.observe(512, 0.5)
        short.observe(10, 0.1)
    assert short.seconds(512, 0) == pytest.approx(0.5, rel=0.2)


class Steps(PrefillSpeed):
    """Observes steps on a clock that is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.observed: list[tuple[int, int, float]] = []

    def observe(self, tokens: int, seconds: float, context_tokens: int = 0) -> None:
        self.observed.append((tokens, context_tokens, seconds))

    def step(self, **requests: tuple[int, int]) -> None:
        """Schedule a step: request -> tokens before it, tokens in it. A request without any before it is new."""
        new = {name for name, (before, _) in requests.items() if not before}
        cached = {name: before for name, (before, _) in requests.items() if before}
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=sum(tokens for _, tokens in requests.values()),
            num_scheduled_tokens={name: tokens for name, (_, tokens) in requests.items()},
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in new],
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
        )
        self.scheduled(output, self.now_s)

    def end(self, after_s: float) -> None:
        self.now_s += after_s
        self.ended(self.now_s)


def test_a_step_scheduled_ahead_lasts_from_the_end_of_the_one_before() -> None:
    """Asynchronous scheduling: the second is scheduled while the first runs."""
    steps = Steps()
    steps.step(a=(0, 512))
    steps.now_s += 0.5
    steps.step(a=(512, 512))
    steps.end(1.5)
    steps.step(a=(1024, 100))
    steps.end(3.0)
    steps.end(1.0)
    assert steps.observed == [(512, 0, 2.0), (512, 512, 3.0), (100, 1024, 1.0)]


def test_steps_whose_ends_are_not_reported_do_not_pile_up() -> None:
    """After a while measuring restarts, and later steps are measured correctly."""
    steps = Steps()
    for _ in range(1000):
        steps.step(a=(0, 512))
        steps.now_s += 1.0
    for _ in range(20):
        steps.end(0.0)
    steps.observed.clear()
    steps.step(b=(0, 128))
    steps.end(3.0)
    assert steps.observed == [(128, 0, 3.0)]


@pytest.mark.parametrize(
    ("prompt", "step_s", "observed"),
    [((0, 300), 0.040, (301, 1, 0.030)), ((512, 100), 0.010, (101, 511, 0.001))],
    ids=["what they add", "a tenth at least"],
)
def test_prompt_tokens_cost_what_they_add_to_a_step(
    prompt: tuple[int, int], step_s: float, observed: tuple[int, int, float]
) -> None:
    """A step of 10 ms takes 40 ms with a prompt. On a GPU a few tokens more may cost nothing."""
    steps = Steps()
    for _ in range(3):
        steps.step(a=(512, 1))
        steps.end(0.010)
    steps.step(a=(512, 1), b=prompt)
    steps.end(step_s)
    [(tokens, context_tokens, seconds)] = steps.observed
    assert (tokens, context_tokens, seconds) == (
        observed[0],
        pytest.approx(observed[1], abs=1),
        pytest.approx(observed[2]),
    )


# Decisions


ONE, BOTH, TWICE = [(0, 1024)], [(0, 1024), (1, 1024)], [(0, 1024), (0, 1024)]


@pytest.mark.parametrize(
    ("times", "runs", "others", "tokens"),
    [
        # A load may cost a little more than computing,
        ([0.5], ONE, {}, 1024),
        ([1.02], ONE, {}, 1024),
        ([1.1], ONE, {}, 0),
        # which costs once more for each request that waits for the GPU,
        ([3], ONE, {"waiting": 1}, 0),
        ([3], ONE, {"waiting": 2}, 1024),
        # and less for those that run, as two at most: no busy server accepts any time to the first token.
        ([1.9], ONE, {"running": 1}, 0),
        ([1.9], ONE, {"running": 3}, 1024),
        ([2.9], ONE, {"running": 5}, 1024),
        ([3.5], ONE, {"running": 5}, 0),
        ([3.5], ONE, {"running": 500}, 0),
        # A hit is taken from its beginning: slow tokens in front, where the fast ones behind pay for them.
        ([0.01, 40], BOTH, {}, 1024),
        ([10], [(0, 256)], {}, 0),
        ([10, 0.01], [(0, 256), (1, 8192)], {}, 256 + 8192),
        # Two tiers take as long as the slower, not as long as both.
        ([1.1, 1.1], BOTH, {}, 2048),
        ([1.43], TWICE, {}, 0),
    ],
)
def test_how_much_of_a_hit_is_taken(
    times: list[float], runs: list[tuple[int, int]], others: dict[str, int], tokens: int
) -> None:
    """Tiers whose loads take this many times as long as computing."""
    judged = judge(*(TOKEN_BYTES * 1000 / each for each in times))
    assert judged.choose([part(*run) for run in runs], 0, 1.0, **others).tokens == tokens


@pytest.mark.parametrize("knows_tiers", [False, True])
def test_all_of_it_is_taken_while_nothing_is_known(knows_tiers: bool) -> None:
    """Both times must be known for a comparison."""
    judged = judge(1e3, 1e3, token_s=None) if knows_tiers else judge(None, None, token_s=1e-6)
    assert judged.choose([part(0, 512), part(1, 4096)], 1000, 0.0).tokens == 512 + 4096


def test_a_load_waits_for_those_that_are_out() -> None:
    """Of loads that take 0.4 of computing each, two are worth it; the third would wait for two others."""
    judged = judge(TOKEN_BYTES * 1000 / 0.4)
    taken = []
    for ticket in range(1, 5):
        tokens = judged.choose([part(0, 1024)], 0, 1.0).tokens
        taken.append(tokens)
        if tokens:
            judged.tiers[0].begin(ticket, 1024 * TOKEN_BYTES, 1.0)
    assert taken == [1024, 1024, 0, 0]
    judged.tiers[0].end(1)
    assert judged.choose([part(0, 1024)], 0, 1.0).tokens == 1024


@pytest.mark.parametrize("knows_prefill", [False, True])
def test_a_tier_of_unknown_speed_gets_a_few_loads_at_a_time(knows_prefill: bool) -> None:
    """Otherwise the whole first burst of requests would wait for a tier of unknown speed."""
    judged = judge(None if knows_prefill else 1e9, token_s=1e-3 if knows_prefill else None)
    for ticket in range(1, 10):
        tokens = judged.choose([part(0, 1024)], 0, 1.0).tokens
        assert bool(tokens) == (ticket <= LOADS_AT_ONCE)
        if tokens:
            judged.tiers[0].begin(ticket, 1024 * TOKEN_BYTES, 1.0)
    assert counts(judged) == {(0, "taken"): LOADS_AT_ONCE, (0, "unknown"): 9 - LOADS_AT_ONCE}


@pytest.mark.parametrize(("knows_prefill", "limit_s"), [(False, WAIT_S), (True, 1.024)])
def test_a_hit_waits_for_the_first_loads_to_end(knows_prefill: bool, limit_s: float) -> None:
    """While none of them has taken longer than computing the hit would, or half a second where that is not known.

    Of a burst at the start of an engine most would be computed otherwise, however fast the tier is.
    """
    judged, burst = judge(None, token_s=1e-3 if knows_prefill else None), [part(0, 1024)]
    for ticket in range(LOADS_AT_ONCE):
        assert not judged.must_wait(burst, 0, 1.0, 1.0)
        judged.tiers[0].begin(ticket, 1024 * TOKEN_BYTES, 1.0, is_slowest=bool(ticket % 2))
    early_s, late_s = 1.0 + 0.99 * limit_s, 1.0 + 1.01 * limit_s
    assert judged.must_wait(burst, 0, early_s, early_s)
    assert not judged.must_wait(burst, 0, late_s, late_s)
    assert not judged.choose(burst, 0, late_s).tokens
    for ticket in range(LOADS_AT_ONCE):
        judged.tiers[0].end(ticket)
        assert not judged.must_wait(burst, 0, early_s, early_s), "there is room for one more"
        judged.tiers[0].begin(LOADS_AT_ONCE + ticket, 1024 * TOKEN_BYTES, early_s)
    assert judged.must_wait(burst, 0, late_s, early_s)
    assert not judged.must_wait(burst, 0, late_s, 1.0), "it has waited for the first four"


@pytest.mark.parametrize("seed", range(3))
def test_recovers_after_a_slow_spell(seed: int) -> None:
    """A request a second for half an hour; for five minutes the tier is 200 times as slow.

    It is refused within its first dozen loads, costs one request in thirty seconds at most meanwhile, and is used again
    within five minutes after the spell.
    """
    source = random.Random(seed)
    judged = judge(None)
    taken: list[bool] = []
    slow = range(600, 900)
    for second in range(1800):
        tokens = source.choice((512, 1024, 4096))
        choice = judged.choose([part(0, tokens)], 0, float(second))
        taken.append(choice.tokens > 0)
        if choice.tokens:
            load_s = (0.005 + tokens * TOKEN_BYTES / 400e6) * source.lognormvariate(0, 0.3)
            judged.tiers[0].begin(second, tokens * TOKEN_BYTES, float(second), on_trial=choice.trial == 0)
            judged.tiers[0].observe(
                tokens * TOKEN_BYTES, load_s * (200 if second in slow else 1), float(second), second
            )
            judged.tiers[0].end(second)
    assert all(taken[:600])
    assert sum(taken[600:900]) <= 12 + 300 / 30
    assert not any(taken[620:629]), "refused"
    assert all(taken[1250:]), "used as before, once the next trial has come"


# Requests


def ask(judged: LoadDecider, notes: LoadNotes, now_s: float, tiers: tuple[int, ...] = (0,), **hit: Any) -> int | None:
    """Ask about a hit of whole chunks; the tier of each."""
    found = Hit(tiers, hit.get("first_token", 0), len(tiers) * CHUNK_TOKENS, CHUNK_TOKENS, hit.get("windows", {}))
    return judged.tokens_to_load(found, notes, now_s)


def begin(judged: LoadDecider, number: int, notes: LoadNotes, now_s: float, *tiers: int) -> None:
    locations = tuple(Location(tier, 0, CHUNK_TOKENS * TOKEN_BYTES) for tier in tiers or (0,))
    judged.begin_load(LoadTicket(number, (Key(bytes(36)),) * len(locations), locations), notes, now_s)


def test_a_request_is_decided_once_for_each_hit() -> None:
    """A request that waits for room is asked about in every step."""
    judged, notes = judge(1e9, 1e5), LoadNotes()
    assert [ask(judged, notes, 1.0, (0, 1)) for _ in range(3)] == [CHUNK_TOKENS] * 3
    assert counts(judged) == {(0, "taken"): 1, (1, "skipped"): 1}
    assert ask(judged, notes, 1.0, (1,)) == 0, "another hit"
    assert counts(judged) == {(0, "taken"): 1, (1, "skipped"): 2}


def test_a_hit_waits_once_however_many_loads_end_meanwhile() -> None:
    """Where nothing is ever computed, as on a server that only decodes, four at a time would be all for ever."""
    judged, notes, answers = judge(None, token_s=None), LoadNotes(), []
    for number in range(LOADS_AT_ONCE):
        begin(judged, number, LoadNotes(), 0.0)
    for number, now_s in enumerate((0.0, 0.4 * WAIT_S, 0.8 * WAIT_S, 1.2 * WAIT_S)):
        answers.append(ask(judged, notes, now_s))
        judged.end_load(number)
        begin(judged, 10 + number, LoadNotes(), now_s)
    assert answers == [None, None, None, 0]


def test_the_first_trial_comes_after_thirty_seconds_the_next_ones_later() -> None:
    """A request in ten seconds, whose load would take an hour: trials after 30 s, 2 min, 8 min, then 10 min each."""
    judged, trials = judge(1e3), []
    for second in range(0, 2500, 10):
        notes = LoadNotes()
        if ask(judged, notes, float(second)):
            trials.append(second)
            begin(judged, second, notes, float(second))
            judged.end_load(second)
    assert trials == [30, 150, 630, 1230, 1830, 2430]
    assert counts(judged) == {(0, "skipped"): 244, (0, "trial"): 6}


def test_a_trial_is_used_up_by_its_load_alone() -> None:
    """Not by a request that ends before it loads, nor twice by one that is preempted and loads again."""
    judged, loads = judge(1e3), LoadNotes()
    assert ask(judged, LoadNotes(), 1.0) == 0
    assert ask(judged, LoadNotes(), 700.0) == CHUNK_TOKENS, "given up"
    assert ask(judged, loads, 701.0) == CHUNK_TOKENS
    for number, now_s in ((1, 701.0), (2, 760.0)):
        begin(judged, number, loads, now_s)
        judged.end_load(number)
        assert ask(judged, LoadNotes(), now_s + 49.0) == 0
    assert ask(judged, LoadNotes(), 830.0) == CHUNK_TOKENS


def test_of_a_window_only_what_is_loaded_counts() -> None:
    """Otherwise a model with mostly small windows would never load: its hits would seem many times their size."""
    judged = judge(TOKEN_BYTES * 500)  # a load takes twice as long as computing
    assert ask(judged, LoadNotes(), 1.0, (0,) * 4) == 0
    assert ask(judged, LoadNotes(), 1.0, (0,) * 4, windows={0: CHUNK_TOKENS}) == 4 * CHUNK_TOKENS


def test_slow_hits_are_taken_where_the_config_says_so() -> None:
    judged = LoadDecider(1, token_bytes={0: TOKEN_BYTES}, skips_slow=False)
    for _ in range(5):
        judged.tiers[0].observe(MIB, 10.0, 0.0)
        judged.prefill.observe(CHUNK_TOKENS, 0.01)
    assert ask(judged, LoadNotes(), 1.0) == CHUNK_TOKENS
    assert counts(judged) == {}
