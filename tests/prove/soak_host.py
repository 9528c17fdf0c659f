"""The far end of the soak: an engine in one process that says what it holds.

Threading: one thread, beside those of the connector. Imported in the engine's process only.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc

from examples.demo.engine_process import EngineHost, Reply, main as serve
from nixl_offload.tiers.slot_tier import SlotTier


class SoakHost(EngineHost):
    """What the engine of the soak is asked, beside what every engine is."""

    def held(self) -> Reply:
        """Return what is held: with nothing under way, all of it is to be 0. And what libraries have from malloc."""
        half = self._llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler
        catalog = half.offload_manager.catalog
        pinned = sum(len(tier._index._held) for tier in catalog.tiers if isinstance(tier, SlotTier))
        gc.collect()
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Heap
        heap = mallinfo2()
        held = {"tickets": catalog.open_tickets, "slots pinned or being written": pinned}
        return {"held": held, "malloc_bytes": heap.uordblks + heap.hblkhd}


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def main() -> int:
    """Serve requests from stdin; see ``engine_process``. What kills the process leaves its stacks in the log."""
    from vllm import _custom_ops

    from nixl_offload.tiers.shared import tier

    faulthandler.enable()
    # vLLM's oneDNN keeps 0.3 MiB for each number of tokens that a step had, for long: that would hide leaks of ours.
    _custom_ops._supports_onednn = False
    # All clocks are this machine's. With the five minutes of a fleet, directory and bucket would be asked in vain until
    # the end of a short soak, and no fault would meet a load from them.
    tier.RESET_MARGIN_S = 2.0
    return serve(SoakHost)
