"""Every metric of this connector: name, labels, unit, what it means, and when to look at it. The one source of what
``/metrics`` shows and of the table in ``docs/metrics.md``.

Threading: constants. vLLM is not imported: documentation and dashboards are checked without it.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, cast

Kind = Literal["counter", "gauge", "histogram"]

PREFIX: Final = "vllm:nixl_offload_"
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets of histograms: from a copy in memory to the longest that a load is waited for."""

_TABLE: Final = """\
lookup_tokens | counter | tier result | tokens |
    Prompt tokens looked up in a tier, in whole chunks, after vLLM's own prefix cache and the nearer tiers: hit (loaded
    from here), skipped (found, but computed: see hit_decisions) or miss (the next tier is asked). | Is it worth it? Hit
    ratio: hit / (hit + skipped + miss)
hit_decisions | counter | tier decision | requests |
    Requests with a hit, by tier and decision: taken, skipped (computing is expected to be faster), trial (loaded to
    measure the tier again) or unknown (computed, because as many loads were out as a tier of unknown speed may have).
    Only with slow_hits: skip. | Mostly skipped: the tier is too slow for this model
transfer_bytes | counter | operation tier | bytes, all ranks |
    KV bytes that a tier has taken or given: store (from KV blocks), load (to KV blocks), write_through (from another
    tier) or fetch (for a farther one, or for memory before a load; not counted for memory). Without headers,
    padding and failures. | rate() is the tier's throughput
transfer_seconds | histogram | operation tier | seconds |
    How long jobs took in a tier, from submission to the last chunk, one observation per job and rank. Jobs overlap, so
    bytes divided by seconds is not the throughput. Jobs that moved nothing are left out. | Which tier is slow, and is
    it all jobs or the slowest?
chunks | counter | operation outcome tier | chunks |
    Chunks stored (from KV blocks), loaded (to KV blocks), kept in memory when loaded (promotion), read into memory
    before a load (prefetch) or written to a farther tier (write_through), by outcome on the worst rank: ok, failed
    (by storage), corrupt (refused by verification), dropped (to shed load) or tainted (failed, and its place is not
    used again). The tier is the target, of loads the source. | outcome="corrupt": damage on the medium, found before
    use
shard_failures | counter | operation outcome cause tier | shards (a chunk's part on one rank) |
    Shards that were not stored, loaded or written through. corrupt: checksum, header_checksum, magic, version,
    namespace, key, length, blocks or authentication did not verify. dropped: queue_full (too many stores for storage),
    needed_back (vLLM wanted the blocks before storage had time), no_answer, no_time (a write-through waited 30 s),
    files (the process may open no more) or closed (shutdown). failed: disabled (see disabled_ranks), full, readonly,
    missing, unreachable, locked, permission, io, timeout (load_timeout), needed_back, closed, or layout and unexpected
    (bugs). | Why chunks_total shows failed, corrupt or dropped
queued_bytes | gauge | operation tier | bytes, sum over ranks |
    KV bytes of loads, stores and write-throughs that wait for their turn in a tier; those in progress are left out.
    Those of the last step, while the engine is idle. | Storage does not keep up
disabled_ranks | gauge | tier | ranks |
    Ranks on which a tier is disabled: full, read-only, gone, not open, or not answering. Their log says which. | Alert
    above 0: stores or loads fail there
tier_info | gauge | tier mover path | ranks |
    Ranks that reach a tier by this mover and transfer path: direct (storage and GPU memory, no copy), device (packed in
    GPU memory) or host (packed in host memory); device+host where KV groups differ. 0: no longer so. | Is GPUDirect
    really used?
used_bytes | gauge | tier | bytes per rank |
    Space that chunks take in memory and in slabs, headers included. | Occupancy, by capacity_bytes. Full and evicting
    is normal
capacity_bytes | gauge | tier | bytes per rank |
    Space in memory and in slabs. Of a bucket or a shared directory it is not reported. | With used_bytes
retired_bytes | gauge | tier | bytes per rank |
    Space in memory and slabs that is not used until the engine restarts, because a transfer that never ended may still
    write there. | Grows: storage hangs repeatedly
evicted_chunks | counter | tier | chunks |
    Chunks evicted to make room. Of a shared directory, by the engine that does it for all. | Rises while the hit ratio
    falls: the working set does not fit
unstored_chunks | counter | cause | chunks |
    Chunks not stored: not_admitted (not yet computed store_after times), no_room (every tier is full of chunks in use,
    disabled, or too slow) or unanswered (a bucket or directory did not say whether it has them). They are offered
    again when computed again. | no_room rises: staging or storage is too slow
pending_chunks | gauge | tier | chunks |
    Chunks that wait for their write-through to a tier. | Grows without end: the tier is too slow
write_through_failures | counter | tier cause | chunks |
    Chunks that write-through did not bring to a tier: failed, corrupt, dropped, tainted, gone (evicted or reset
    before), refused (the tier took nothing for 30 s) or overflow (too many waited). Of memory: the last three, for
    chunks of prefetches. | Why the farther tier lacks chunks
hints | counter | hint result | hints |
    Hints that came with requests: prefetch or store, taken; any, bad (not understood and ignored; the log has the
    first) or refused (too many tokens at a time). Of prefetches that were taken, by KV cache group, those that ended
    early: late (nothing was found for 30 s) or overflow (too many wait). | Does the router send what is meant? bad
    above 0: see the log
probes | counter | tier | questions |
    Lookups of single chunks in a bucket or shared directory. | What a bucket bills as HEAD requests
probe_errors | counter | tier | questions |
    Lookups that were not answered. | More than a few percent of probes: store or network fails
probe_seconds | histogram | tier | seconds |
    How long lookups took, failed ones included; at most the latest 1024 of a step. | Near lookup.timeout: requests are
    computed instead
late_lookups | counter | tier | requests |
    Requests computed because a bucket or shared directory did not answer within lookup.timeout. | Rises: raise
    lookup.timeout, or look at the store
breaker_state | gauge | tier | 0, 1 or 2 |
    Whether a bucket or shared directory answers: 0 yes (in use), 1 half-open (on trial), 2 open (disabled). | 2: the
    tier is disabled for a while; it recovers by itself
"""
"""Name, kind, labels, unit, what is counted (the exporter's help text), and what it says to an operator. In the order
of the page: is it working, speed, health, capacity, the way to farther tiers, shared tiers."""


class Metric(NamedTuple):
    """One metric, as the exporter and the documentation need it."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    meaning: str
    look: str

    @property
    def exposed(self) -> str:
        """Its name in PromQL; of a histogram without ``_bucket``, ``_sum`` and ``_count``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _metric(row: str) -> Metric:
    name, kind, labels, unit, meaning, look = " ".join(row.split()).split(" | ")
    return Metric(PREFIX + name, cast(Kind, kind), tuple(labels.replace("-", "").split()), unit, meaning, look)


METRICS: Final = tuple(_metric(row) for row in re.split(r"\n(?! )", _TABLE.strip()))
