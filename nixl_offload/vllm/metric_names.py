"""Every metric of this connector: name, labels, unit, what it means, and when to look at it. The one source of what
``/metrics`` shows and of the table in ``docs/metrics.md``.

Threading: constants. vLLM is not imported: documentation and dashboards are checked without it.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]

PREFIX: Final = "vllm:nixl_offload_"
TIER: Final = ("tier",)
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets: from a copy in memory to the longest that a load is waited for."""


class Metric(NamedTuple):
    """One metric, as the exporter and the documentation need it."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    meaning: str
    """What is counted; the exporter's help text."""
    look: str
    """When an operator looks at it, and what it says then."""
    buckets: tuple[float, ...] | None = None

    @property
    def exposed(self) -> str:
        """Its name in PromQL; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _of(
    name: str,
    kind: Kind,
    labels: tuple[str, ...],
    unit: str,
    meaning: str,
    look: str,
    buckets: tuple[float, ...] | None = None,
) -> Metric:
    return Metric(PREFIX + name, kind, labels, unit, meaning, look, buckets)


LOOKUPS: Final = _of(
    "lookup_tokens",
    "counter",
    ("tier", "result"),
    "tokens",
    "Prompt tokens that scheduled requests looked up in a tier, after vLLM's own prefix cache and the nearer tiers: "
    "hit (loaded from here), skipped (here, but computing was expected to be faster) or miss (not here; the next "
    "tier is asked). Whole chunks.",
    "Is the cache worth it? hit / (hit + skipped + miss) of a tier is its hit ratio",
)
DECISIONS: Final = _of(
    "hit_decisions",
    "counter",
    ("tier", "decision"),
    "requests",
    "Requests with a hit, by the tier that has a part of it and what was decided: taken, skipped (computing is "
    "expected to be faster) or trial (taken to see whether that is still so). Only with slow_hits: skip.",
    "Hits are there and time to first token does not fall: a tier that is mostly skipped is too slow for this model",
)
PAYLOAD: Final = _of(
    "transfer_bytes",
    "counter",
    ("operation", "tier"),
    "bytes, all ranks",
    "KV bytes that a tier has taken or given: store (from KV blocks), load (to KV blocks), move_in (from another tier) "
    "or move_out (to one farther away; not counted for memory). Headers, padding and what failed are left out.",
    "How fast is it? rate() is the throughput of a tier",
)
DURATION: Final = _of(
    "transfer_seconds",
    "histogram",
    ("operation", "tier"),
    "seconds",
    "How long jobs took in a tier, from submission to the last chunk, waiting included; one observation per job and "
    "rank. Jobs overlap: bytes by seconds is no throughput. A job of which nothing arrived is not observed.",
    "Loads are slow: which tier, and is it all jobs or the slowest",
    SECONDS,
)
CHUNKS: Final = _of(
    "chunks",
    "counter",
    ("operation", "outcome", "tier"),
    "chunks",
    "Chunks that were stored (from KV blocks), loaded (to KV blocks), landed (kept in memory as they were loaded) or "
    "moved (to a farther tier), by how it ended on the worst rank: ok, failed (storage said no), corrupt (refused by "
    "verification), dropped (to shed load) or tainted (failed, and its place is given up). The tier is the one "
    "stored to, loaded from, landed in or moved to.",
    'Anything wrong at all? outcome="corrupt" is damage on the medium, found before use',
)
FAILURES: Final = _of(
    "shard_failures",
    "counter",
    ("operation", "outcome", "cause", "tier"),
    "shards (a chunk's part on one rank)",
    "Shards that were not stored, loaded or moved, by why. corrupt: checksum, header_checksum, magic, version, "
    "namespace, key, length or blocks did not verify. dropped: queue_full (more stores than storage takes), "
    "needed_back (vLLM wanted the blocks back before storage had time), no_answer, no_time (a move waited 30 s) or "
    "closed (shutdown). failed: out_of_use (the tier is left alone), full, readonly, missing, locked, permission, io, "
    "timeout (load_timeout), needed_back, closed, or layout and unexpected (bugs).",
    "chunks shows failed, corrupt or dropped: this says why",
)
QUEUED: Final = _of(
    "queued_bytes",
    "gauge",
    ("operation", "tier"),
    "bytes, sum over ranks",
    "KV bytes of loads, stores and moves that have been submitted to a tier and wait for their turn. What is under way "
    "is left out. Told at each step, so that it stands still while the engine is idle.",
    "Storage does not keep up: stores that wait are dropped when vLLM needs their blocks, loads hold their requests",
)
TROUBLE: Final = _of(
    "ranks_out_of_use",
    "gauge",
    TIER,
    "ranks",
    "Ranks that leave a tier alone now: it is full, read-only, gone, or does not answer. Their log says which.",
    "Alert on it: above 0 nothing is stored there, and mostly nothing loaded",
)
INFO: Final = _of(
    "tier_info",
    "gauge",
    ("tier", "mover", "way"),
    "ranks",
    "Ranks that reach a tier by this mover and way: direct (storage and GPU memory, no copy), device (packed in GPU "
    "memory) or host (packed in host memory); device+host where KV groups differ. 0: no longer so.",
    "GPUDirect was expected: mover and way say what is really used",
)
USED: Final = _of(
    "used_bytes",
    "gauge",
    TIER,
    "bytes per rank",
    "Room that chunks take, headers included, in memory and in slabs.",
    "Full? With capacity_bytes: occupancy. A cache that is full and evicts is a cache at work",
)
CAPACITY: Final = _of(
    "capacity_bytes",
    "gauge",
    TIER,
    "bytes per rank",
    "Room that memory and slabs have. Buckets and shared directories have none of their own: see nixl-offload gc.",
    "With used_bytes",
)
RETIRED: Final = _of(
    "retired_bytes",
    "gauge",
    TIER,
    "bytes per rank",
    "Room of memory and slabs that was given up until the engine restarts: a transfer that never ended may still "
    "write there.",
    "Capacity shrinks: storage hangs again and again",
)
EVICTED: Final = _of(
    "evicted_chunks",
    "counter",
    TIER,
    "chunks",
    "Chunks that made room for others, in memory and in slabs.",
    "Hit ratio falls while this rises: the working set does not fit",
)
KNOWN: Final = _of(
    "known_chunks",
    "gauge",
    TIER,
    "chunks",
    "Chunks of a shared tier (a bucket, a shared directory) that this engine believes present.",
    "Near lookup.max_keys: raise that, or chunks are asked about anew",
)
NOT_STORED: Final = _of(
    "unstored_chunks",
    "counter",
    ("cause",),
    "chunks",
    "Chunks that were offered and not stored: not_admitted (not computed store_after times yet) or no_room (every tier "
    "is full of chunks in use, out of use, or too slow). Offered again with the next request that computes them.",
    "no_room rises: staging or storage is too slow for what is computed",
)
DUE: Final = _of(
    "due_chunks",
    "gauge",
    TIER,
    "chunks",
    "Chunks that wait to be moved to a farther tier.",
    "Grows without end: the farther tier is slower than what is computed",
)
UNSAVED: Final = _of(
    "unsaved_bytes",
    "gauge",
    (),
    "bytes per rank",
    "Bytes that memory keeps, whoever needs room, until they have reached the next tiers.",
    "At unsaved_limit: what is computed now may be lost to the farther tiers",
)
MOVED: Final = _of(
    "moved_chunks",
    "counter",
    TIER,
    "chunks",
    "Chunks that have arrived in a farther tier.",
    "Does write-through work? It follows the stores",
)
NOT_MOVED: Final = _of(
    "unmoved_chunks",
    "counter",
    ("tier", "cause"),
    "chunks",
    "Chunks that were to be moved to a farther tier and were not: failed, corrupt, dropped, tainted, gone (evicted or "
    "reset before), refused (the tier took nothing for 30 s) or overflow (too many waited).",
    "The farther tier misses chunks that the nearer one had",
)
PROBES: Final = _of(
    "probes",
    "counter",
    TIER,
    "questions",
    "Questions put to a shared tier: does this chunk exist?",
    "What a bucket bills as HEAD requests",
)
PROBE_ERRORS: Final = _of(
    "probe_errors",
    "counter",
    TIER,
    "questions",
    "Questions to a shared tier that were not answered.",
    "With probes: above a few percent the store or the way to it is sick",
)
PROBE_SECONDS: Final = _of(
    "probe_seconds",
    "histogram",
    TIER,
    "seconds",
    "How long questions to a shared tier took, failed ones included; of more than 1024 in a step the latest.",
    "First requests wait for lookups: near lookup.timeout they are computed instead",
    SECONDS,
)
LATE: Final = _of(
    "late_lookups",
    "counter",
    TIER,
    "requests",
    "Requests that were computed because a shared tier did not say within lookup.timeout what it has.",
    "Rises: the store is too slow to be asked; lookup.timeout or the store's latency",
)
BREAKER: Final = _of(
    "breaker_state",
    "gauge",
    ("purpose", "tier"),
    "0, 1 or 2",
    "Whether a shared tier is in use: 0 closed (it is), 1 half-open (on trial), 2 open (left alone). purpose: reach "
    "(it answers), load or store (that works).",
    "Hits of a shared tier end at once: 2 says that it was given up for a while; it comes back by itself",
)
OPENINGS: Final = _of(
    "breaker_openings",
    "counter",
    TIER,
    "times",
    "How often a shared tier was given up for a while.",
    "Rises slowly all day: a store that fails now and then",
)

METRICS: Final[tuple[Metric, ...]] = (
    LOOKUPS,
    DECISIONS,
    PAYLOAD,
    DURATION,
    CHUNKS,
    FAILURES,
    QUEUED,
    TROUBLE,
    INFO,
    USED,
    CAPACITY,
    RETIRED,
    EVICTED,
    KNOWN,
    NOT_STORED,
    DUE,
    UNSAVED,
    MOVED,
    NOT_MOVED,
    PROBES,
    PROBE_ERRORS,
    PROBE_SECONDS,
    LATE,
    BREAKER,
    OPENINGS,
)
"""In the order of the table: is it working, speed, health, capacity, the way to farther tiers, shared tiers."""
