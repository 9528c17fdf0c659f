"""Load or recompute: estimates follow what is observed, a stall moves them only so far, and no verdict is final."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_offload.types import Location
from nixl_offload.vllm.load_decision import (
    LOADS_AT_ONCE,
    SLOW_FAILURE_S,
    WAIT_S,
    Hit,
    LoadDecider,
    LoadNotes,
    PrefillSpeed,
    weight_of,
)
from nixl_offload.vllm.messages import LoadSample

TOKEN_BYTES = 4096
CHUNK_TOKENS = 1024
CHUNK_S = 1.024
"""How long computing a chunk takes at the usual millisecond a token."""


class Asked(LoadDecider):
    """A decision maker whose loads are begun and ended by their numbers; sizes are in chunks."""

    def __init__(
        self, *speeds: float | None, token_s: float | None = 1e-3, latency_s: float = 0.0, skips_slow: bool = True
    ) -> None:
        """``speeds``: how many times as long as computing a load takes, by tier; None: unknown."""
        super().__init__(len(speeds), token_bytes={0: TOKEN_BYTES}, skips_slow=skips_slow)
        for tier, speed in enumerate(speeds):
            for chunks in range(1, 21) if speed is not None else ():
                self.observe(latency_s + chunks * CHUNK_S * (speed or 0.0), chunks, tier=tier)
        for context in range(0, 8192, 512) if token_s is not None else ():
            self.prefill.observe(512, 512 * (token_s or 0.0), context)

    def begin(
        self, number: int, *tiers: int, now_s: float = 0.0, notes: LoadNotes | None = None, size: int = 1
    ) -> None:
        where = tuple(Location(tier, 0, size * CHUNK_TOKENS * TOKEN_BYTES) for tier in tiers or (0,))
        self.begin_load(number, where, notes or LoadNotes(), now_s)

    def end(self, number: int, *seconds: float, now_s: float = 0.0, tier: int = 0, failed: bool = False) -> None:
        """End a load that took this long on each rank."""
        self.observe_loads([LoadSample(tier, each, failed, number) for each in seconds])
        self.end_load(number, now_s)

    def observe(
        self, seconds: float, size: int = 1, *, now_s: float = 0.0, tier: int = 0, failed: bool = False
    ) -> None:
        """Begin and end a load that no other load is beside."""
        self.begin(-1, tier, size=size)
        self.end(-1, seconds, now_s=now_s, tier=tier, failed=failed)

    def ask(
        self,
        *runs: tuple[int, int],
        now_s: float = 1.0,
        notes: LoadNotes | None = None,
        first_token: int = 0,
        windows: Mapping[int, int] | None = None,
        **others: int,
    ) -> int | None:
        """Return how many of a hit's chunks are loaded. ``runs``: tier and number of chunks."""
        tiers = [tier for tier, count in runs or [(0, 1)] for _ in range(count)]
        hit = Hit(tiers, first_token, len(tiers) * CHUNK_TOKENS, CHUNK_TOKENS, windows or {})
        tokens = self.tokens_to_load(hit, notes or LoadNotes(), now_s, weight=weight_of(**others))
        return None if tokens is None else tokens // CHUNK_TOKENS

    def estimate(self, size: int = 1, now_s: float = 0.0) -> float:
        """Return how long a load of the first tier is expected to take."""
        return self._tiers[0].seconds(size * CHUNK_TOKENS * TOKEN_BYTES, now_s)

    def decisions(self) -> dict[tuple[Any, ...], int]:
        return {labels[1:]: requests for labels, requests in self.counts.items()}


# Tiers


@pytest.mark.parametrize(("speed", "taken"), [(10.0, 0), (0.1, 1)])
def test_reads_timed_at_the_opening_decide_the_first_hit(speed: float, taken: int) -> None:
    """A verdict by them is tried later like any other. Loads that were before count instead."""
    asked, known = Asked(None), Asked(0.01)
    for each in asked, known:
        reads = [(chunks * CHUNK_TOKENS * TOKEN_BYTES, chunks * speed * CHUNK_S) for chunks in (1, 8, 1)]
        each.observe_reads(0, reads, 0.0)
    assert (asked.ask(now_s=1.0), known.ask(now_s=1.0)) == (taken, 1)
    assert asked.ask(now_s=31.0) == 1


def test_latency_and_bandwidth_are_told_apart() -> None:
    asked = Asked(0.01, latency_s=0.050)
    assert asked.estimate() == pytest.approx(0.050 + 0.01 * CHUNK_S)
    assert asked.estimate(1000) == pytest.approx(0.050 + 10 * CHUNK_S)


def test_a_load_takes_as_long_as_on_its_slowest_rank() -> None:
    asked = Asked(None)
    for number in range(3):
        assert asked.estimate() == 0.0, "too few loads say nothing"
        asked.begin(number)
        asked.end(number, 0.1, 0.3, 0.2)
    assert asked.estimate() == pytest.approx(0.3)
    asked.begin(9)
    asked.end(9)
    assert asked.estimate() == pytest.approx(0.3), "a load that no rank has timed does not count"


def test_a_stall_raises_the_estimate_but_not_for_ever() -> None:
    """One stalled load has a bounded effect, several count fully, and good ones repair the estimate within a minute."""
    asked = Asked(0.01)
    before_s = asked.estimate(16)
    asked.observe(600.0, 16)
    assert 1.5 * before_s < asked.estimate(16) < 5 * before_s, "raised, and nowhere near ten minutes"
    for _ in range(5):
        asked.observe(600.0, 16)
    assert asked.estimate(16) > 30.0
    for second in range(100):
        chunks = 8 * (1 + second % 3)
        asked.observe(0.01 * chunks * CHUNK_S, chunks, now_s=float(second))
    assert asked.estimate(16) == pytest.approx(before_s, rel=0.1)


def test_where_loads_are_rare_the_last_one_counts_most() -> None:
    """One in a minute. The tier has become ten times as slow."""
    asked = Asked(0.01)
    asked.observe(0.1 * CHUNK_S, now_s=60.0)
    assert asked.estimate() == pytest.approx(0.1 * CHUNK_S, rel=0.1)


def test_a_trial_speaks_for_all_sizes_and_its_first_load_alone() -> None:
    asked, tries = Asked(100.0), LoadNotes()
    assert asked.ask(now_s=100.0, notes=tries) == 1
    asked.begin(1, now_s=100.0, notes=tries)
    asked.end(1, 0.01, now_s=100.0)
    assert asked.estimate(100) == pytest.approx(1.0), "no longer as slow as it was"
    for _ in range(9):
        asked.observe(0.01)
    asked.observe(600.0)
    assert asked.estimate() < 0.08, "a stall later on counts as any other"


def test_a_tier_is_not_judged_by_its_queue() -> None:
    """Eight loads at once, each of 0.1 s: the last took 0.8 s, and a lone one is expected in 0.1 s."""
    asked = Asked(None)
    for burst in range(3):
        for number in range(8):
            asked.begin(number, now_s=10.0 * burst)
        for number in range(8):
            asked.end(number, 0.1 * (number + 1), now_s=10.0 * burst + 0.1 * (number + 1))
    assert asked.estimate() == pytest.approx(0.1)
    asked.begin(99, now_s=30.0, size=3)
    assert asked.estimate(now_s=30.0) == pytest.approx(0.4)


@pytest.mark.parametrize("speed", [0.01, None], ids=["known", "unknown"])
def test_a_load_that_is_late_makes_those_behind_it_late(speed: float | None) -> None:
    """Nothing has been reported yet, but a load of 0.01 s is out for 5 s. One that waits for another tier makes none
    late here: it ends with its last part, and memory has done its own long before the bucket has.
    """
    asked = Asked(speed, None)
    asked.begin(1, 0, 1)
    assert asked.estimate(now_s=5.0) == pytest.approx(2 * CHUNK_S * (speed or 0.0))
    asked.begin(2, 0, now_s=5.0)
    assert asked.estimate(now_s=10.1) == pytest.approx(5.1)


def test_a_failed_load_says_that_it_would_have_taken_longer() -> None:
    """It changes the estimate only if the load was expected to end sooner, after those before it."""
    asked = Asked(1.0)
    asked.begin(1)
    asked.begin(2)
    before_s = asked.estimate()
    asked.end(2, 1.9 * CHUNK_S, failed=True)
    assert asked.estimate(2) == pytest.approx(before_s), "twice the time was expected of the second one"
    asked.end(1, 5.0 * CHUNK_S, failed=True)
    assert asked.estimate(3) > 1.05 * before_s
    unknown = Asked(None)
    for _ in range(3):
        unknown.observe(SLOW_FAILURE_S, failed=True)
    assert unknown.estimate() == 0.0, "refused"


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
    ("prompt", "step_s", "tokens", "context_tokens", "seconds"),
    [((0, 300), 0.040, 301, 1, 0.030), ((512, 100), 0.010, 101, 511, 0.001)],
    ids=["what they add", "a tenth at least"],
)
def test_prompt_tokens_cost_what_they_add_to_a_step(
    prompt: tuple[int, int], step_s: float, tokens: int, context_tokens: int, seconds: float
) -> None:
    """A step of 10 ms takes 40 ms with a prompt. On a GPU a few tokens more may cost nothing."""
    steps = Steps()
    for _ in range(3):
        steps.step(a=(512, 1))
        steps.end(0.010)
    steps.step(a=(512, 1), b=prompt)
    steps.end(step_s)
    assert steps.observed == [(tokens, pytest.approx(context_tokens, abs=1), pytest.approx(seconds))]


# Decisions


@pytest.mark.parametrize(
    ("speeds", "runs", "others", "chunks"),
    [
        # A load may cost a little more than computing,
        ([0.5], [(0, 1)], {}, 1),
        ([1.02], [(0, 1)], {}, 1),
        ([1.1], [(0, 1)], {}, 0),
        # which costs once more for each request that waits for the GPU,
        ([3], [(0, 1)], {"waiting": 1}, 0),
        ([3], [(0, 1)], {"waiting": 2}, 1),
        # and less for those that run, as two at most: no busy server accepts any time to the first token.
        ([1.9], [(0, 1)], {"running": 1}, 0),
        ([1.9], [(0, 1)], {"running": 3}, 1),
        ([2.9], [(0, 1)], {"running": 5}, 1),
        ([3.5], [(0, 1)], {"running": 5}, 0),
        ([3.5], [(0, 1)], {"running": 500}, 0),
        # A hit is taken from its beginning: slow chunks in front, where the fast ones behind pay for them.
        ([0.01, 40], [(0, 1), (1, 1)], {}, 1),
        ([10], [(0, 1)], {}, 0),
        ([10, 0.01], [(0, 1), (1, 32)], {}, 33),
        # Two tiers take as long as the slower, not as long as both.
        ([1.1, 1.1], [(0, 1), (1, 1)], {}, 2),
        ([1.43], [(0, 2)], {}, 0),
        # Of a window only what is loaded counts. A model with small windows would never load otherwise.
        ([2], [(0, 4)], {}, 0),
        ([2], [(0, 4)], {"windows": {0: CHUNK_TOKENS}}, 4),
    ],
)
def test_how_much_of_a_hit_is_taken(
    speeds: Sequence[float], runs: Sequence[tuple[int, int]], others: Mapping[str, Any], chunks: int
) -> None:
    """Tiers whose loads take this many times as long as computing."""
    assert Asked(*speeds).ask(*runs, **others) == chunks


@pytest.mark.parametrize(
    ("speed", "found", "search_s", "waited_s", "now_s", "others", "waits"),
    [
        # A hit saves half of the time of computing, if there is one,
        (0.5, 1.0, 0.4, 0.0, 1.0, {}, True),
        (0.5, 0.7, 0.4, 0.0, 1.0, {}, False),
        (0.5, 1.0, 0.4, 0.6, 1.0, {}, False),
        (0.5, 1.0, 0.6, 0.0, 1.0, {}, False),
        # more while others wait, and nothing if the tier is slow, until that is tried anew.
        (0.5, 0.7, 0.4, 0.0, 1.0, {"waiting": 1}, True),
        (2.0, 1.0, 0.0, 0.0, 1.0, {}, False),
        (2.0, 1.0, 0.9, 0.0, 31.0, {}, True),
    ],
)
def test_a_lookup_is_waited_for_while_it_may_save_time(
    speed: float, found: float, search_s: float, waited_s: float, now_s: float, others: Mapping[str, int], waits: bool
) -> None:
    """Speeds and times are multiples of the time of computing."""
    tiers: Any = [SimpleNamespace(found=found, search_s=search_s * CHUNK_S)]
    notes, most = LoadNotes(waits_since_s=now_s - waited_s * CHUNK_S), Hit((), 0, CHUNK_TOKENS, CHUNK_TOKENS, {})
    assert Asked(speed).may_wait(most, tiers, notes, now_s, weight=weight_of(**others)) == notes.waits == waits


@pytest.mark.parametrize(
    "asked", [Asked(1e3, 1e3, token_s=None), Asked(None, None, token_s=1e-6), Asked(1e3, 1e3, skips_slow=False)]
)
def test_all_of_it_is_taken_while_a_speed_is_unknown_or_where_the_config_says_so(asked: Asked) -> None:
    assert asked.ask((0, 1), (1, 4), first_token=1024) == 5


def test_a_load_waits_for_those_that_are_out() -> None:
    """Of loads that take 0.4 of computing each, two are worth it; the third would wait for two others."""
    asked, taken = Asked(0.4), []
    for number in range(4):
        taken.append(asked.ask())
        if taken[-1]:
            asked.begin(number, now_s=1.0)
    assert taken == [1, 1, 0, 0]
    asked.end(0)
    assert asked.ask() == 1


@pytest.mark.parametrize(("knows_prefill", "limit_s"), [(False, WAIT_S), (True, CHUNK_S)])
def test_a_tier_of_unknown_speed_gets_a_few_loads_at_a_time(knows_prefill: bool, limit_s: float) -> None:
    """Otherwise the whole first burst of requests would wait for a tier of unknown speed. A hit waits for room while no
    load has taken longer than computing the hit would, or half a second where that is not known.

    Of a burst at the start of an engine most would be computed otherwise, however fast the tier is.
    """
    asked = Asked(None if knows_prefill else 1e-3, token_s=1e-3 if knows_prefill else None)
    for number in range(LOADS_AT_ONCE):
        assert asked.ask() == 1
        asked.begin(number, *((0,) if number % 2 else (0, 0)), now_s=1.0)
    assert asked.ask(now_s=1.0 + 0.99 * limit_s) is None
    assert asked.ask(now_s=1.0 + 1.01 * limit_s) == 0
    assert asked.decisions() == {(0, "taken"): LOADS_AT_ONCE, (0, "unknown"): 1}
    asked.end(0)
    assert asked.ask() == 1, "there is room for one more"


def test_a_hit_waits_once_however_many_loads_end_meanwhile() -> None:
    """Where nothing is ever computed, as on a server that only decodes, four at a time would be all for ever."""
    asked, notes, answers = Asked(None, token_s=None), LoadNotes(), []
    for number in range(LOADS_AT_ONCE):
        asked.begin(number)
    for number, now_s in enumerate((0.0, 0.4 * WAIT_S, 0.8 * WAIT_S, 1.2 * WAIT_S)):
        answers.append(asked.ask(now_s=now_s, notes=notes))
        asked.end(number)
        asked.begin(10 + number, now_s=now_s)
    assert answers == [None, None, None, 0]


def test_a_request_is_decided_once_for_each_hit() -> None:
    """A request that waits for room is asked about in every step."""
    asked, notes = Asked(0.01, 40), LoadNotes()
    assert [asked.ask((0, 1), (1, 1), notes=notes) for _ in range(3)] == [1, 1, 1]
    assert asked.decisions() == {(0, "taken"): 1, (1, "skipped"): 1}
    assert asked.ask((1, 1), notes=notes) == 0, "another hit"
    assert asked.decisions() == {(0, "taken"): 1, (1, "skipped"): 2}


# Trials


@pytest.mark.parametrize("seed", range(3))
def test_recovers_after_a_slow_spell(seed: int) -> None:
    """A request a second for half an hour; for five minutes the tier is 200 times as slow.

    It is refused within its first dozen loads, costs one request in thirty seconds at most meanwhile, and is used again
    within five minutes after the spell.
    """
    source, asked, taken = random.Random(seed), Asked(None), []
    for second in range(1800):
        chunks, notes = source.choice((1, 2, 4)), LoadNotes()
        taken.append(bool(asked.ask((0, chunks), now_s=float(second), notes=notes)))
        if taken[-1]:
            load_s = (0.005 + chunks * CHUNK_TOKENS * TOKEN_BYTES / 400e6) * source.lognormvariate(0, 0.3)
            asked.begin(second, now_s=float(second), notes=notes, size=chunks)
            asked.end(second, load_s * (200 if 600 <= second < 900 else 1), now_s=float(second))
    assert all(taken[:600])
    assert sum(taken[600:900]) <= 12 + 300 / 30
    assert not any(taken[620:629]), "refused"
    assert all(taken[1250:]), "used as before, once the next trial has come"


def test_the_first_trial_comes_after_thirty_seconds_the_next_ones_later() -> None:
    """A request in ten seconds, whose load would take an hour: trials after 30 s, 2 min, 8 min, then 10 min each."""
    asked, trials = Asked(1e3), []
    for second in range(0, 2500, 10):
        notes = LoadNotes()
        if asked.ask(now_s=float(second), notes=notes):
            trials.append(second)
            asked.begin(second, now_s=float(second), notes=notes)
            asked.end(second)
    assert trials == [30, 150, 630, 1230, 1830, 2430]
    assert asked.decisions() == {(0, "skipped"): 244, (0, "trial"): 6}


def test_a_trial_is_used_up_by_its_load_alone() -> None:
    """Not by a request that ends before it loads, nor twice by one that is preempted and loads again."""
    asked, loads = Asked(1e3), LoadNotes()
    assert asked.ask() == 0
    assert asked.ask(now_s=700.0) == 1, "given up"
    assert asked.ask(now_s=701.0, notes=loads) == 1
    for number, now_s in ((1, 701.0), (2, 760.0)):
        asked.begin(number, now_s=now_s, notes=loads)
        asked.end(number, now_s=now_s)
        assert asked.ask(now_s=now_s + 49.0) == 0
    assert asked.ask(now_s=830.0) == 1
