"""Proves what becomes of moves between tiers on a rank, whatever engines tell of them and in whatever order: each
ticket is settled once, a target is told free only when nothing touches it, and a relay slot serves one move at a time.

Engines are played: a test says what they complete. Time stands still.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_offload.engine.moves import RELAY_WAIT_S, MoveIO, Moves
from nixl_offload.engine.records import ChunkIO, Completion
from nixl_offload.engine.states import WorkKind
from nixl_offload.types import Key, Location, Outcome

OK, FAILED, DROPPED = Outcome.OK, Outcome.FAILED, Outcome.DROPPED
CORRUPT, TAINTED = Outcome.CORRUPT, Outcome.TAINTED
FETCH, WRITE_THROUGH, PROMOTION = WorkKind.FETCH, WorkKind.WRITE_THROUGH, WorkKind.PROMOTION
MEMORY, FILE, BUCKET, GONE, EMPTY_GROUP = 0, 1, 2, 3, 7
RELAY = (1_000_000, 2_000_000)


class Engine:
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.jobs: dict[int, tuple[WorkKind, list[ChunkIO]]] = {}

    def submit_background(self, job_id: int, chunks: Sequence[ChunkIO], kind: WorkKind) -> None:
        assert job_id < 0, "it would meet vLLM's jobs"
        self.jobs[job_id] = kind, list(chunks)


class Rank:
    """Memory, a file and a bucket, and a tier that this rank does not have."""

    def __init__(self, relay: Sequence[int] = RELAY) -> None:
        self.now_s = 1000.0
        self.memory, self.file, self.bucket = self.engines = [Engine(), Engine(), Engine()]
        self.moves = Moves(
            [*self.engines, None],
            relay,
            memory=MEMORY,
            clock=lambda: self.now_s,
            empty_groups=(EMPTY_GROUP,),
        )

    def submit(self, ticket: int, *moves: MoveIO) -> None:
        self.moves.submit(ticket, moves)

    def complete(
        self,
        tier: int,
        *outcomes: Outcome,
        slots: Sequence[Outcome] | None = (),
        job_id: int | None = None,
    ) -> None:
        """Have the engine of ``tier`` complete its oldest job, or tell of the slots of one that has ended."""
        jobs = self.engines[tier].jobs
        ended = next(iter(jobs)) if job_id is None else job_id
        jobs.pop(ended, None)
        slots = None if slots is None else tuple(slots)
        self.moves.completed(tier, Completion(ended, FETCH, outcomes, slots))

    def only_job(self, tier: int) -> int:
        (job_id,) = self.engines[tier].jobs
        return job_id

    def told(self) -> dict[int, tuple[Outcome, ...]]:
        return {done.job_id: done.outcomes for done in self.moves.take()}

    def asked(self, tier: int) -> list[tuple[WorkKind, list[tuple[int, Location, int | None]]]]:
        """What is under way in a tier: the chunks' numbers, where they lie there, and their host slots."""
        for _, chunks in self.engines[tier].jobs.values():
            assert all((len(chunk.block_ids), chunk.first_block, chunk.group) == (0, 0, 0) for chunk in chunks)
        return [
            (kind, [(chunk.key[0], chunk.location, chunk.host_offset) for chunk in chunks])
            for kind, chunks in self.engines[tier].jobs.values()
        ]


def at(tier: int, number: int) -> Location:
    return Location(tier, 100 * number + tier, 10 + number)


def move(number: int, source: int, target: int, group: int = 0) -> MoveIO:
    return MoveIO(Key(bytes([number]) * 36), group, at(source, number), at(target, number))


@pytest.fixture
def rank() -> Rank:
    return Rank()


# -- what goes to or from memory -------------------------------------------------------------------------------------


def test_each_farther_tier_gets_a_job_and_the_ticket_is_settled_with_the_last(rank: Rank) -> None:
    rank.submit(
        5,
        move(1, MEMORY, BUCKET),
        move(2, MEMORY, FILE),
        move(3, FILE, MEMORY),
        move(4, MEMORY, BUCKET),
        move(6, BUCKET, MEMORY),
    )
    assert rank.asked(FILE) == [
        (WRITE_THROUGH, [(2, at(FILE, 2), at(MEMORY, 2).offset)]),
        (FETCH, [(3, at(FILE, 3), at(MEMORY, 3).offset)]),
    ]
    assert rank.asked(BUCKET) == [
        (WRITE_THROUGH, [(1, at(BUCKET, 1), at(MEMORY, 1).offset), (4, at(BUCKET, 4), at(MEMORY, 4).offset)]),
        (FETCH, [(6, at(BUCKET, 6), at(MEMORY, 6).offset)]),
    ]
    assert rank.asked(MEMORY) == []
    rank.now_s += 2.5
    rank.complete(BUCKET, OK, TAINTED)
    rank.complete(FILE, FAILED)
    rank.complete(FILE, OK, slots=[OK])
    assert rank.told() == {}
    assert not rank.moves.idle
    rank.complete(BUCKET, CORRUPT, slots=[CORRUPT])
    (done,) = rank.moves.take()
    assert (done.job_id, done.kind, done.outcomes) == (5, WRITE_THROUGH, (OK, FAILED, OK, TAINTED, CORRUPT))
    assert (done.bytes_moved, done.seconds) == (11 + 13, 2.5)
    assert rank.moves.idle
    assert rank.told() == {}


def test_a_ticket_is_of_what_its_first_chunk_is(rank: Rank) -> None:
    """As the catalog makes them, all of one kind."""
    rank.submit(1, move(1, FILE, MEMORY), move(2, BUCKET, MEMORY))
    rank.complete(FILE, OK, slots=[OK])
    rank.complete(BUCKET, OK, slots=[OK])
    assert [done.kind for done in rank.moves.take()] == [FETCH]


def test_a_ticket_of_nothing_is_settled_at_once(rank: Rank) -> None:
    rank.submit(1)
    assert not rank.moves.idle, "there is something to tell"
    assert rank.told() == {1: ()}
    assert rank.moves.idle


def test_chunks_of_no_tier_fail_and_those_of_no_layer_are_there(rank: Rank) -> None:
    rank.submit(
        1,
        move(1, MEMORY, GONE),
        move(2, GONE, MEMORY),
        move(3, FILE, 4),
        move(4, -1, FILE),
        move(5, FILE, FILE),
        move(6, MEMORY, BUCKET, EMPTY_GROUP),
        move(7, FILE, GONE),
    )
    assert rank.told() == {1: (FAILED, FAILED, FAILED, FAILED, FAILED, OK, FAILED)}
    assert not any(engine.jobs for engine in rank.engines)
    assert rank.moves.idle


def test_a_fetch_is_told_by_its_slots_not_by_its_outcome(rank: Rank) -> None:
    """It was given up: the slot may be written to until the read has ended."""
    rank.submit(1, move(1, FILE, MEMORY))
    job_id = rank.only_job(FILE)
    rank.complete(FILE, FAILED, slots=None)
    assert rank.told() == {}
    rank.complete(FILE, slots=[DROPPED], job_id=job_id)
    assert rank.told() == {1: (DROPPED,)}


def test_promotions_are_told_apart_by_tier_and_job(rank: Rank) -> None:
    """A load's job has one id in all tiers."""
    ticket = rank.moves.open(9, PROMOTION, [10, 20, 40])
    rank.moves.expect_promotions(FILE, 4, ticket, [2, 0])
    rank.moves.expect_promotions(BUCKET, 4, ticket, [1])
    rank.complete(FILE, OK, FAILED, slots=[OK, FAILED], job_id=4)
    assert rank.told() == {}
    rank.complete(BUCKET, OK, slots=[OK], job_id=4)
    (done,) = rank.moves.take()
    assert (done.job_id, done.kind, done.outcomes, done.bytes_moved) == (9, PROMOTION, (FAILED, OK, OK), 60)


def test_of_a_chunk_the_first_word_counts(rank: Rank) -> None:
    ticket = rank.moves.open(1, PROMOTION, [10, 10])
    for outcome in (OK, TAINTED):
        rank.moves.settle(ticket, 0, outcome)
    assert rank.told() == {}
    rank.moves.settle(ticket, 1, FAILED)
    assert rank.told() == {1: (OK, FAILED)}


def test_jobs_of_others_are_none_of_its_business(rank: Rank) -> None:
    rank.submit(1, move(1, MEMORY, FILE))
    rank.complete(FILE, OK, FAILED, job_id=1)
    rank.complete(FILE, OK, slots=[OK], job_id=77)
    assert rank.told() == {}
    rank.complete(FILE, OK)
    assert rank.told() == {1: (OK,)}


# -- between farther tiers -------------------------------------------------------------------------------------------


def test_a_relay_is_fetched_and_then_stored(rank: Rank) -> None:
    rank.submit(1, move(1, FILE, BUCKET))
    [(kind, [(number, location, slot)])] = rank.asked(FILE)
    assert (kind, number, location) == (FETCH, 1, at(FILE, 1))
    assert slot in RELAY
    assert rank.moves.relaying
    rank.complete(FILE, OK, slots=[OK])
    assert rank.asked(BUCKET) == [(WRITE_THROUGH, [(1, at(BUCKET, 1), slot)])]
    assert rank.moves.relaying
    assert rank.told() == {}
    rank.complete(BUCKET, OK)
    assert not rank.moves.relaying
    assert rank.told() == {1: (OK,)}
    assert rank.moves.idle


def test_slots_are_handed_on_at_once_in_the_order_of_the_moves(rank: Rank) -> None:
    rank.submit(1, *(move(number, FILE, BUCKET) for number in range(1, 5)))
    first, second = (chunks[0] for _, chunks in rank.asked(FILE))
    assert (first[0], second[0]) == (1, 2)
    assert {first[2], second[2]} == set(RELAY)
    rank.complete(FILE, FAILED, slots=[FAILED])
    assert [chunks[0][0] for _, chunks in rank.asked(FILE)] == [2, 3]
    assert rank.asked(FILE)[1][1][0][2] == first[2]
    rank.complete(FILE, OK, slots=[OK])
    assert [chunks[0][0] for _, chunks in rank.asked(FILE)] == [3], "its slot is still in use"
    rank.complete(BUCKET, FAILED)
    assert [chunks[0][0] for _, chunks in rank.asked(FILE)] == [3, 4]
    for _ in range(2):
        rank.complete(FILE, OK, slots=[OK])
        rank.complete(BUCKET, OK)
    assert rank.told() == {1: (DROPPED, FAILED, OK, OK)}


@pytest.mark.parametrize(
    ("outcome", "slot", "told", "left"),
    [
        (FAILED, FAILED, DROPPED, 2),
        (CORRUPT, CORRUPT, CORRUPT, 2),
        (DROPPED, DROPPED, DROPPED, 2),
        (FAILED, TAINTED, DROPPED, 1),
        (OK, TAINTED, DROPPED, 1),
        (FAILED, OK, DROPPED, 2),
    ],
)
def test_what_was_not_fetched_leaves_its_target_alone(
    rank: Rank, outcome: Outcome, slot: Outcome, told: Outcome, left: int
) -> None:
    """The target is not to blame, and may be used again at once. A slot that may still be written to may not: nor may
    the image in it be trusted that came too late.
    """
    rank.submit(1, move(1, FILE, BUCKET))
    rank.complete(FILE, outcome, slots=[slot])
    assert rank.asked(BUCKET) == []
    assert rank.told() == {1: (told,)}
    assert rank.moves.idle
    rank.submit(2, *(move(number, FILE, BUCKET) for number in range(3)))
    assert len(rank.asked(FILE)) == left


def test_a_relay_that_is_given_up_keeps_its_slot_until_its_read_has_ended(rank: Rank) -> None:
    rank.submit(1, move(1, FILE, BUCKET))
    job_id = rank.only_job(FILE)
    rank.complete(FILE, FAILED, slots=None)
    assert rank.told() == {1: (DROPPED,)}
    assert rank.moves.relaying
    assert not rank.moves.idle
    rank.submit(2, move(2, FILE, BUCKET), move(3, FILE, BUCKET))
    assert len(rank.asked(FILE)) == 1
    rank.complete(FILE, slots=[OK], job_id=job_id)
    assert rank.asked(BUCKET) == [], "nobody waits for it any more"
    assert len(rank.asked(FILE)) == 2


def test_a_slot_that_storing_may_still_read_is_never_used_again(rank: Rank) -> None:
    for ticket, left in ((1, 1), (2, 0)):
        rank.submit(ticket, move(1, FILE, BUCKET))
        rank.complete(FILE, OK, slots=[OK])
        rank.complete(BUCKET, TAINTED)
        assert rank.told() == {ticket: (TAINTED,)}
        rank.submit(10 + ticket, *(move(number, FILE, BUCKET) for number in range(left)))
        for _ in range(left):
            rank.complete(FILE, FAILED, slots=[FAILED])
        rank.moves.take()
    rank.submit(3, move(1, FILE, BUCKET))
    assert rank.told() == {3: (DROPPED,)}, "there is none left"


def test_without_slots_nothing_goes_between_farther_tiers() -> None:
    rank = Rank(relay=())
    rank.submit(1, move(1, FILE, BUCKET), move(2, MEMORY, BUCKET))
    rank.complete(BUCKET, OK)
    assert rank.told() == {1: (DROPPED, OK)}


def test_who_waits_for_a_slot_waits_so_long_and_no_longer(rank: Rank) -> None:
    rank.submit(1, move(1, FILE, BUCKET), move(2, FILE, BUCKET))
    rank.now_s += 1.0
    rank.submit(2, move(3, FILE, BUCKET))
    rank.now_s += 1.0
    rank.submit(3, move(4, FILE, BUCKET))
    rank.now_s += RELAY_WAIT_S - 1.5
    rank.moves.step()
    assert rank.told() == {}
    rank.now_s += 0.5
    rank.moves.step()
    assert rank.told() == {2: (DROPPED,)}
    rank.complete(FILE, FAILED, slots=[FAILED])
    assert [chunks[0][0] for _, chunks in rank.asked(FILE)] == [2, 4], "what has begun is not dropped"


# -- its end ---------------------------------------------------------------------------------------------------------


def test_what_waits_is_dropped_and_what_has_begun_goes_on(rank: Rank) -> None:
    rank.submit(1, *(move(number, FILE, BUCKET) for number in range(4)))
    rank.moves.drop_waiting()
    for _ in range(2):
        rank.complete(FILE, OK, slots=[OK])
        rank.complete(BUCKET, OK)
    assert rank.told() == {1: (OK, OK, DROPPED, DROPPED)}
    assert rank.moves.idle


def test_what_engines_never_tell_of_is_tainted_and_its_slots_are_lost(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes late all the same changes nothing."""
    rank.submit(1, move(1, FILE, BUCKET), move(2, MEMORY, BUCKET), move(3, BUCKET, MEMORY))
    rank.submit(2, move(4, BUCKET, FILE))
    rank.submit(3, move(5, FILE, BUCKET))
    rank.complete(FILE, OK, slots=[OK])
    late = [(tier, job_id) for tier in (FILE, BUCKET) for job_id in rank.engines[tier].jobs]
    assert len(late) == 4
    rank.complete(BUCKET, OK)
    rank.moves.give_up()
    assert rank.told() == {1: (TAINTED, OK, TAINTED), 2: (TAINTED,), 3: (DROPPED,)}
    assert rank.moves.idle
    assert not {**rank.moves._stores, **rank.moves._promotions}, "a rank that sleeps goes on with the same moves"
    assert "was never settled" in caplog.text
    for engine in rank.engines:
        engine.jobs.clear()
    for tier, job_id in late:
        rank.complete(tier, OK, slots=[OK], job_id=job_id)
    assert rank.told() == {}
    assert not any(engine.jobs for engine in rank.engines)
    rank.submit(4, move(6, FILE, BUCKET), move(7, MEMORY, BUCKET))
    rank.complete(BUCKET, OK)
    assert rank.told() == {4: (DROPPED, OK)}, "one slot may be written to, the other is read"
