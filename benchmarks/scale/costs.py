"""What the scheduler's half costs in processor time: per key looked up, per chunk stored, per request, per rank.

Real catalogs over real tiers, without an engine; ``WorkerReport`` (vLLM's message, aggregated over ranks) where vLLM is
installed. Processor time of this thread, medians over rounds: other processes disturb it by their caches only.
Threading: one thread, beside the prober's of the shared tier, which are idle.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.scale.bucket import Bucket
from benchmarks.scale.shapes import SMALL
from nixl_offload.catalog import Catalog, LoadTicket, StoreTicket
from nixl_offload.config.schema import LookupOptions
from nixl_offload.index import Index
from nixl_offload.tiers.memory.tier import MemoryPlace, MemoryTier
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slot_allocator import SlabAllocator
from nixl_offload.types import Key, Lookup, LookupContext, Outcome

SLOT: Final = 4096
ROUNDS: Final = 7
CHAIN: Final = 48
NEW: Final = 16
"""A request finds ``CHAIN`` chunks and stores ``NEW``: 12,288 tokens known and 4,096 new in chunks of 256."""
CHAINS: Final = 100
SPARE: Final = 4000
"""Slots beside the known chunks, so that what is stored evicts what was stored here before."""
KEY_BYTES: Final = 32


class Keys:
    """Keys by number, made anew at each call, as vLLM's are in each request: no hash is cached."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._material = np.random.default_rng(count).bytes(KEY_BYTES * count)
        self._new = 0

    def known(self, first: int, count: int) -> list[Key]:
        return [
            Key(self._material[n * KEY_BYTES : (n + 1) * KEY_BYTES] + bytes(4)) for n in range(first, first + count)
        ]

    def new(self, count: int) -> list[Key]:
        first, self._new = self._new, self._new + count
        return [Key(b"new" + number.to_bytes(29, "big") + bytes(4)) for number in range(first, first + count)]


def memory_catalog(keys: Keys, ranks: int = 1) -> Catalog:
    """A memory tier that holds ``keys``, thousands of them, and is full: each new chunk evicts one."""
    capacity = (keys.count + SPARE) * SLOT
    allocator = SlabAllocator(capacity, [SLOT], extent_bytes=1000 * SLOT)
    tier = MemoryTier(0, MemoryPlace((b"n" * 32,) * ranks, allocator.rank_bytes), Index(), allocator)
    catalog = Catalog([tier], world_size=ranks, slot_bytes=lambda key: SLOT, store_backlog_bytes=1 << 60)
    for first in range(-SPARE, keys.count, 1000):
        fill = keys.new(1000) if first < 0 else keys.known(first, min(1000, keys.count - first))
        ticket = catalog.reserve(fill, 0.0)
        assert ticket is not None
        catalog.report(ticket.ticket, ranks, {}, 0.0)
        catalog.take_changes()
    return catalog


def bucket_catalog(keys: Keys) -> Catalog:
    """A shared tier that believes in all of ``keys``."""
    tier = SharedTier(
        0,
        Bucket(lambda: 0.0),
        SMALL.namespace(),
        lookup=LookupOptions(),
        ttl_s=None,
        name="measured",
        threads=0,
        max_keys=max(1000, keys.count),
        clock=lambda: 0.0,
    )
    for first in range(0, keys.count, 1000):
        for key in keys.known(first, min(1000, keys.count - first)):
            tier._presence.seen(key, 0.0)
    return Catalog([tier], world_size=1, slot_bytes=lambda key: SLOT, store_backlog_bytes=1 << 60)


def microseconds(prepare: Callable[[], Any], work: Callable[[Any], object], per: int, rounds: int = ROUNDS) -> float:
    """Median processor time of ``work`` on what ``prepare`` returns, divided by ``per``."""
    times = []
    for _ in range(rounds):
        made = prepare()
        gc.collect(0)
        began_s = time.thread_time()
        work(made)
        times.append(time.thread_time() - began_s)
    return statistics.median(times) * 1e6 / per


def some_chains(keys: Keys, chains: int, length: int = CHAIN) -> list[list[Key]]:
    """Chains from all over, each in the order in which it was stored."""
    places = np.random.default_rng(chains).integers(0, max(1, keys.count - length), chains)
    return [keys.known(int(place), min(length, keys.count)) for place in places]


def look_up(catalog: Catalog, chains: list[list[Key]]) -> None:
    for number, chain in enumerate(chains):
        name = f"r{number}"
        for position, key in enumerate(chain):
            assert catalog.lookup(key, 1.0, LookupContext(name, position)) is Lookup.HIT


def by_keys(count: int) -> dict[str, float]:
    """Costs at ``count`` known keys: one request at a time, one rank. Microseconds."""
    keys = Keys(count)
    figures: dict[str, float] = {}
    for name, make in (("memory", memory_catalog), ("bucket", bucket_catalog)):
        catalog = make(keys)
        figures[f"lookup_{name}_per_key"] = microseconds(
            partial(some_chains, keys, CHAINS), partial(look_up, catalog), CHAINS * CHAIN
        )
        if name == "memory":
            figures |= stores_and_requests(catalog, keys)
        for tier in catalog._tiers:
            tier.close()
        del catalog
        gc.collect()
    return figures


def stores_and_requests(catalog: Catalog, keys: Keys, at_once: int = 1, ranks: int = 1) -> dict[str, float]:
    """Costs of stores and of whole requests, ``at_once`` of them between the first lookup and the last report."""
    repeat = max(1, 32 // at_once)

    def store(batches: list[list[Key]]) -> None:
        for batch in batches:
            ticket = catalog.reserve(batch, 1.0)
            assert ticket is not None
            for _ in range(ranks):
                catalog.report(ticket.ticket, 1, {}, 1.0)
            catalog.take_changes()

    def prepare() -> list[list[tuple[list[Key], list[Key]]]]:
        if keys.count <= 100_000:
            catalog.touch(keys.known(0, keys.count))
        chains = iter(some_chains(keys, at_once * repeat))
        return [[(next(chains), keys.new(NEW)) for _ in range(at_once)] for _ in range(repeat)]

    def serve(rounds: list[list[tuple[list[Key], list[Key]]]]) -> None:
        for requests in rounds:
            tickets: list[LoadTicket | StoreTicket] = []
            for number, (chain, _) in enumerate(requests):
                name = f"r{number}"
                found = [
                    key for n, key in enumerate(chain) if catalog.lookup(key, 1.0, LookupContext(name, n)) is Lookup.HIT
                ]
                tickets.append(catalog.prepare_load(found, 1.0))
            for _, new in requests:
                stored = catalog.reserve(new, 1.0)
                assert stored is not None
                tickets.append(stored)
            catalog.flush(1.0)
            for ticket in tickets:
                for _ in range(ranks):
                    catalog.report(ticket.ticket, 1, {}, 1.0)
            for number in range(len(requests)):
                catalog.forget_request(f"r{number}")
            catalog.take_changes()

    figures = {"per_request": microseconds(prepare, serve, at_once * repeat)}
    batches = 20
    figures["store_per_chunk"] = microseconds(lambda: [keys.new(NEW) for _ in range(batches)], store, batches * NEW)
    return figures


def by_requests(at_once: int, count: int) -> dict[str, float]:
    """Costs with so many requests at a time."""
    keys = Keys(count)
    return stores_and_requests(memory_catalog(keys), keys, at_once)


def by_ranks(ranks: int, count: int) -> dict[str, float]:
    """Costs with so many ranks, whose reports of a step are merged into one by vLLM's call (``aggregate``)."""
    from nixl_offload.vllm.messages import TicketReport, WorkerReport

    keys = Keys(count)
    catalog = memory_catalog(keys, ranks)
    jobs = 8
    figures: dict[str, float] = {}
    for name, failures in (("", {}), ("_one_failed", {0: Outcome.FAILED})):

        def prepare(failures: dict[int, Outcome] = failures) -> list[WorkerReport]:
            tickets = [catalog.reserve(keys.new(NEW), 1.0) for _ in range(jobs)]
            numbers = [ticket.ticket for ticket in tickets if ticket is not None]
            return [
                WorkerReport(tickets={number: TicketReport(1, dict(failures)) for number in numbers})
                for _ in range(ranks)
            ]

        def merge(reports: list[WorkerReport]) -> WorkerReport:
            merged = reports[0]
            for report in reports[1:]:
                merged = merged.aggregate(report)  # type: ignore[assignment]
            return merged

        def settle(reports: list[WorkerReport]) -> None:
            for number, report in merge(reports).tickets.items():
                catalog.report(number, report.ranks, report.failures, 1.0)

        figures[f"settle_per_chunk{name}"] = microseconds(prepare, settle, jobs * NEW, 5 * ROUNDS)
    catalog.take_changes()
    return figures
