"""Proves of what a rank counts for metrics: it is told once, and two reports add up."""

from __future__ import annotations

from collections import Counter

from nixl_offload.engine.records import Share
from nixl_offload.engine.states import Operation
from nixl_offload.engine.transfer_statistics import Act, Failure, TransferStatistics
from nixl_offload.types import Outcome

SIZE = 100


def share(operation: Operation, tier: int, *, moved: int = SIZE, failed: int = 0) -> Share:
    return Share(
        operation, tier, SIZE, moved, 0.5, failures=Counter({(Outcome.FAILED, "io"): failed} if failed else {})
    )


def test_a_tally_names_operations_and_gives_everything_once() -> None:
    statistics = TransferStatistics()
    assert statistics.take() is None
    statistics.add(share("store", 0))
    statistics.add(share("load", 1, failed=2))
    statistics.add(share("write_through", 1))
    statistics.add(share("fetch", 1, moved=0, failed=1))
    work = statistics.take()
    assert work is not None
    assert work.payload_bytes == {Act("store", 0): SIZE, Act("load", 1): SIZE, Act("write_through", 1): SIZE}
    assert work.seconds == {act: [0.5] for act in work.payload_bytes}, "nothing of what brought nothing"
    assert work.failures == {Failure("load", 1, "failed", "io"): 2, Failure("fetch", 1, "failed", "io"): 1}
    assert statistics.take() is None
    both = work.merge(work)
    assert both.payload_bytes[Act("load", 1)] == 2 * SIZE
    assert both.seconds[Act("load", 1)] == [0.5, 0.5]
    assert both.failures[Failure("load", 1, "failed", "io")] == 4
    assert work.seconds[Act("load", 1)] == [0.5], "what was merged is as it was"
