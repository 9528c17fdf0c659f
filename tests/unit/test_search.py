"""The search for the end of a chain: exact on monotone chains, bounded in rounds and questions, honest about holes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_offload.tiers.shared.search import Search, SearchKind
from tests.unit.shared_rig import keys_of


def chain(length: int, certain: int = 0) -> Search:
    return Search(SearchKind.CHAIN, keys_of(length), certain)


def test_an_absent_front_ends_the_search_before_the_other_answers_are_in() -> None:
    search = chain(4096)
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
    search = chain(len(there), certain)
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
    search = chain(4096)
    first, second, third, *_ = search.next_round()
    assert search.known == 0
    search.answer(third, True)
    assert search.known == first == 0
    search.answer(first, True)
    assert search.known == second
    search.answer(second, True)
    assert search.known == third + 1
