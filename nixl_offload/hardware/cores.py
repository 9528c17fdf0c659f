"""Keeps a rank's own threads off the single core to which OpenMP binds the thread that starts them.

Threading: for the thread that starts others, around that; affinity belongs to a thread and is inherited by its threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")
"""What vLLM's CPU backend sets for its workers, so that their main thread is bound to the first core of the model."""


@contextmanager
def unbound() -> Iterator[None]:
    """Threads started inside may run where the parent process may, if OpenMP has bound the caller to one core.

    Else they would share it with the model's first thread, for which all its others wait. Never raises of itself; an
    affinity that an operator gave (``taskset``, a control group) holds, for the parent has it too.
    """
    own, wide = _wider()
    if not wide:
        yield
        return
    with suppress(OSError):
        os.sched_setaffinity(0, wide)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)


def _wider() -> tuple[set[int], set[int]]:
    """Return the caller's cores and the parent's; of the latter none where there is nothing to widen."""
    if not hasattr(os, "sched_getaffinity") or not any(name in os.environ for name in BINDING):
        return set(), set()
    with suppress(OSError):
        own, parent = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
        if len(own) == 1 and own < parent:
            return own, parent
    return set(), set()
