"""The search for the end of a chain: exact on monotone chains, bounded in rounds and probes, honest about holes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_offload.tiers.shared.chain_search import ChainSearch


def _run(search: ChainSearch, is_there: Callable[[int], bool]) -> None:
    while not search.done:
        positions = search.next_round()
        assert positions, "a search that is not done and waits for nothing has something to ask"
        assert len(set(positions)) == len(positions)
        for position in positions:
            search.answer(position, is_there(position))
    assert search.next_round() == []


@pytest.mark.parametrize("present", [0, 1, 15, 16, 17, 2999, 3000, 3001, 4095, 4096])
def test_a_chain_of_4096_takes_at_most_three_rounds_and_48_probes(present: int) -> None:
    search = ChainSearch(4096)
    _run(search, lambda position: position < present)
    assert search.boundary == present
    assert search.rounds <= 3
    assert search.probes <= 48


def test_every_boundary_of_every_short_chain_and_bounds_at_any_length() -> None:
    for length in [*range(70), 289, 290, 4096]:
        for present in {*range(min(length, 70) + 1), length // 2, max(length - 1, 0), length}:
            search = ChainSearch(length)
            _run(search, lambda position, present=present: position < present)  # type: ignore[misc]
            assert search.boundary == present
            assert search.rounds <= (1 if length <= 16 else 2 if length <= 270 else 3)


def test_an_absent_front_ends_the_search_before_the_other_answers_are_in() -> None:
    search = ChainSearch(4096)
    positions = search.next_round()
    search.answer(positions[5], True)
    search.answer(0, False)
    assert search.done
    assert search.boundary == 0
    search.answer(positions[7], True)
    assert search.boundary == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=400), st.integers(2, 20), st.booleans(), st.randoms(use_true_random=False))
def test_holes_in_any_order_of_answers(there: list[bool], fan_out: int, infer: bool, random: object) -> None:
    """Never a link at or beyond a known absent one; without inference never one that was not asked about."""
    search = ChainSearch(len(there), fan_out, infer=infer)
    absent: set[int] = set()
    asked: set[int] = set()
    while not search.done:
        positions = search.next_round()
        assert positions
        asked.update(positions)
        random.shuffle(positions)  # type: ignore[attr-defined]
        for position in positions:
            search.answer(position, there[position])
            if not there[position]:
                absent.add(position)
            assert search.boundary <= min(absent, default=len(there))
    assert search.boundary == 0 or there[search.boundary - 1]
    if not infer:
        assert all(there[: search.boundary])
        assert set(range(search.boundary)) <= asked
    if all(there):
        assert search.boundary == len(there)


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="fan_out"):
        ChainSearch(4, 1)


def test_what_is_known_ends_at_the_first_question_that_is_out() -> None:
    search = ChainSearch(4096)
    first, second, third, *_ = search.next_round()
    assert search.known == 0
    search.answer(third, True)
    assert search.known == first == 0
    search.answer(first, True)
    assert search.known == second
    search.answer(second, True)
    assert search.known == third + 1
