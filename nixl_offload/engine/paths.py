"""Which way a chunk goes, whether there is room for it, and what becomes of it when its way raises.

Threading: the pump's thread; ``has_room`` and ``why_not`` also under the job table's lock. Ownership: links and their
movers belong to the paths, which close them; slots belong to the flight (``ways.context``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from nixl_offload.engine import image
from nixl_offload.engine.image import GroupPlan, Way
from nixl_offload.engine.ports import Port
from nixl_offload.engine.pump import Flight
from nixl_offload.engine.records import ChunkIO, Task
from nixl_offload.engine.ways import device, direct, host, landing
from nixl_offload.engine.ways.context import Context
from nixl_offload.errors import FormatError, LayoutError, MoverError, TierError
from nixl_offload.types import Outcome

LOAD_RESERVE = 0.25
"""Share of the staging slots that stores leave to loads."""

Steps = Callable[[Context, Flight, Port, GroupPlan], Iterator[None]]
_STORES: Mapping[Way, Steps] = {"direct": direct.store, "device": device.store, "host": host.store}
_LOADS: Mapping[Way, Steps] = {"direct": direct.load, "device": device.load, "host": host.load}


class ChunkPaths:
    """Implements ``pump.Paths``. A chunk's failure is its own outcome; nothing here raises for reasons of storage."""

    def __init__(self, context: Context, ports: Sequence[Port | None], *, keep_alive: Sequence[object] = ()) -> None:
        """``ports`` is indexed by tier; ``keep_alive``: whatever must live as long as I/O may touch its memory."""
        self._context = context
        self._ports = ports
        self._keep_alive = keep_alive

    def has_room(self, task: Task, stores_in_flight: int) -> bool:
        """See pump.Paths. What can only fail has room: it needs none."""
        found = self._find(task.io)
        if found is None or _by_host(found[0], task):
            return True
        pools = self._context.memory.pools_of(found[1].way)
        full = [pool for pool in pools if not pool.free]
        if full:
            return any(pool.usable == 0 for pool in full)
        usable = min((pool.usable for pool in pools), default=0)
        reserve = max(1, int(usable * LOAD_RESERVE))
        return not task.job.is_store or stores_in_flight < max(1, usable - reserve)

    def why_not(self, task: Task) -> str | None:
        """See pump.Paths. What takes up the room is not answered by a tier that is in doubt: then nobody knows when."""
        found = self._find(task.io)
        if found is None or not found[0].link.in_doubt:
            return None
        return f"storage is out of use: {found[0].link.trouble}"

    def begin(self, task: Task) -> Flight:
        """See pump.Paths."""
        flight = Flight(task)
        flight.steps = self._guarded(flight)
        return flight

    def close(self) -> None:
        """See pump.Paths."""
        links = [port.link for port in self._ports if port is not None]
        for link in links:
            link.close()
        for mover in {id(link.mover): link.mover for link in links}.values():
            mover.close()

    def _guarded(self, flight: Flight) -> Iterator[None]:
        """Turn what a way may raise into the chunk's outcome, told only when nothing of it is under way any more."""
        context, fault = self._context, None
        try:
            yield from self._steps(flight)
            return
        except FormatError as error:
            outcome, words, cause = Outcome.CORRUPT, f"corrupt: {error.reason}", error.reason
            context.complaints.warning(words, "A stored chunk was refused and will be recomputed: %s", error)
        except TierError as error:
            outcome, words, cause = Outcome.FAILED, f"storage: {error.cause}", error.cause
        except (MoverError, LayoutError) as error:
            outcome, words = Outcome.FAILED, str(error)
            fault = words if isinstance(error, MoverError) else None
            cause = "layout" if fault is None else "io"
            context.complaints.error(type(error).__name__, "A chunk could not be moved: %s", error)
        yield from context.settle(flight)
        flight.abandon(fault)
        if flight.direct or flight.task.job.is_store:
            yield from context.outlast(flight)
        context.table.finish(flight.task, outcome, words, cause)

    def _steps(self, flight: Flight) -> Iterator[None]:
        """Choose the way. Raises LayoutError for numbers that do not fit: memory is touched unchecked later."""
        io, is_store = flight.task.io, flight.task.job.is_store
        found = self._find(io)
        if found is None:
            raise LayoutError(f"there is no group {io.group}, or no tier for {io.location}, in this engine")
        port, plan = found
        image.check(plan, io)
        flight.mover = port.link.mover
        if _by_host(port, flight.task):
            return (landing.store if is_store else landing.load)(self._context, flight, port, plan)
        flight.direct = plan.way == "direct"
        return (_STORES if is_store else _LOADS)[plan.way](self._context, flight, port, plan)

    def _find(self, io: ChunkIO) -> tuple[Port, GroupPlan] | None:
        """Return the port and plan of a chunk; None when this engine has no such tier or group."""
        port = self._ports[io.location.tier] if 0 <= io.location.tier < len(self._ports) else None
        if port is None or not 0 <= io.group < len(port.plans):
            return None
        return port, port.plans[io.group]


def _by_host(port: Port, task: Task) -> bool:
    """Whether a chunk goes by its host slot. A load whose tier cannot touch that serves its KV blocks all the same."""
    if task.io.host_offset is None:
        return False
    return port.host is not None or task.job.is_store or not len(task.io.block_ids)
