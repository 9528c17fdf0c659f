"""The search for the end of a chain: exact on monotone chains, bounded in rounds and questions, honest about holes."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_offload.tiers.shared.chain_search import ChainSearch


def _run(search: ChainSearch, is_there: Callable[[int], bool]) -> list[int]:
    """Return how many were asked in each round."""
    rounds = []
    while not search.done:
        positions = search.next_round()
        assert positions, "a search that is not done and waits for nothing has something to ask"
        for position in positions:
            search.answer(position, is_there(position))
        rounds.append(len(positions))
    assert search.next_round() == []
    return rounds


def test_every_boundary_of_every_short_chain_and_bounds_at_any_length() -> None:
    for length in [*range(70), 289, 290, 4096]:
        for present in {*range(min(length, 70) + 1), length // 2, 2999, max(length - 1, 0), length} & {
            *range(length + 1)
        }:
            search = ChainSearch(length)
            rounds = _run(search, lambda position, present=present: position < present)  # type: ignore[misc]
            assert search.boundary == present
            assert len(rounds) <= (1 if length <= 16 else 2 if length <= 270 else 3)
            assert sum(rounds) <= 48


def test_an_absent_front_ends_the_search_before_the_other_answers_are_in() -> None:
    search = ChainSearch(4096)
    positions = search.next_round()
    search.answer(positions[5], True)
    search.answer(0, False)
    assert search.done
    search.answer(positions[7], True)
    assert search.boundary == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=400), st.integers(0, 400), st.randoms(use_true_random=False))
def test_holes_in_any_order_of_answers(there: list[bool], certain: int, random: object) -> None:
    """Never a link at or beyond a known absent one; the last ones before the boundary are asked about one by one."""
    search = ChainSearch(len(there), certain)
    absent: set[int] = set()
    asked: set[int] = set()
    while not search.done:
        positions = search.next_round()
        assert positions
        assert not asked & {*positions}
        asked.update(positions)
        random.shuffle(positions)  # type: ignore[attr-defined]
        for position in positions:
            search.answer(position, there[position])
            if not there[position]:
                absent.add(position)
            assert search.boundary <= min(absent, default=len(there))
    last = range(max(0, search.boundary - max(certain, 1)), search.boundary)
    assert all(there[position] for position in last)
    assert {*last} <= asked
    if all(there):
        assert search.boundary == len(there)


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
