"""How long the engine's caller is held up when KV blocks of unfinished jobs are to be reused: decided here alone.

Threading: the caller's thread, which is the only one that waits here. It holds up the step that vLLM is about to begin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from nixl_offload.engine.jobs import JobTable

STORE_GRACE_S = 0.005
"""How long, once their step has ended, stores are given to find a slot: time for the pump to wake up and to begin. A
store that finds none waits for storage, and a step must not."""


def wait_source_free(
    asked: Sequence[tuple[JobTable, Collection[int]]],
    limit_s: float,
    clock: Callable[[], float],
    *,
    least_s: float = 0.0,
) -> None:
    """Block until no store needs its KV blocks any more and all loads are finished. ``asked``: tables and job ids.

    Steps that still run are waited for, ``limit_s`` at most. Stores that have no slot ``STORE_GRACE_S`` later, in
    whatever table, are DROPPED; what is being gathered by then ends soon. What still touches its blocks ``limit_s``
    after that is given up, as far as it can be; each table has ``least_s`` of its own. Unknown ids are done.
    """
    live = [(table, table.expedite(job_ids)) for table, job_ids in asked]
    live = [(table, jobs) for table, jobs in live if jobs]
    until_s = clock() + limit_s
    for table, jobs in live:
        table.await_steps(jobs, until_s)
    until_s = clock() + STORE_GRACE_S
    for table, jobs in live:
        table.await_slots(jobs, until_s)
    until_s = clock() + limit_s
    for table, jobs in live:
        table.await_blocks(jobs, max(least_s, until_s - clock()))
