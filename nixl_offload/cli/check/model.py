"""What ``nixl-offload check --model`` says: chunks of a model's KV against capacities, and loading against computing.

Threading: pure functions of the model's shape and of what other sections measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from nixl_offload.chunk.header import slot_bytes
from nixl_offload.cli.check.lines import Line, Section, ok, unknown, warning, wrong
from nixl_offload.cli.model_shape import ModelShape
from nixl_offload.cli.terminal import about_size
from nixl_offload.config import Config, TierConfig
from nixl_offload.tiers.slot_allocator import SLOTS_PER_EXTENT_MIN
from nixl_offload.units import format_size

PROMPT_TOKENS: Final = 10_000
_SMALL_BYTES: Final = 256 << 10
"""Below it a transfer costs more than its bytes, on drives and in buckets alike."""
_GOOD_BYTES: Final = 1 << 20
_TB: Final = 10**12
_LEAST_SLOTS: Final = 8
"""Of staging, for storage to have enough to do."""
_WORDS: Final = {
    "full": "every layer keeps every token",
    "mla": "compressed (MLA), whole on every rank",
    "sliding": "every layer looks back a window",
    "hybrid": "some layers look back a window, so these numbers are the most that it can be",
}


def model_section(
    shape: ModelShape, config: Config, tiers: Sequence[Section], *, with_capacity: bool, prefill_tokens_s: float | None
) -> Section:
    """Return the lines. ``tiers`` are the sections of the config's tiers, in order; ``prefill_tokens_s`` is how fast
    the server computes prompts, None where nobody said; without ``with_capacity`` the capacity is nobody's wish.
    """
    section = Section("model", f"Model {shape.name}")
    chunk = shape.chunk_bytes(config.chunk_tokens)
    section.facts = {
        "bytes_per_token": shape.bytes_per_token,
        "ranks": shape.tp,
        "chunk_tokens": config.chunk_tokens,
        "chunk_bytes": chunk,
        "tokens_per_tb": shape.tokens_in(_TB, config.chunk_tokens),
        "tiers": [],
    }
    per_rank = f" on each of {shape.tp} ranks" if shape.tp > 1 else ""
    words = f"{about_size(shape.bytes_per_token)} per token{per_rank}, {shape.kv_dtype}; {_WORDS[shape.kind]}"
    section.lines.append(ok("kv cache", words))
    section.add([_chunk_line(shape, config, chunk, per_rank), _staging_line(shape, config)])
    for tier, told in zip(config.tiers, tiers, strict=True):
        facts: dict[str, object] = {"kind": tier.kind, "chunks": None, "tokens": None, "load_s": None}
        section.facts["tiers"].append(facts)
        if with_capacity:
            section.add([_capacity_line(shape, config, tier, facts)])
        section.add(_load_lines(shape, tier, told, facts, prefill_tokens_s))
    return section


def _chunk_line(shape: ModelShape, config: Config, chunk_bytes: int, per_rank: str) -> Line:
    tokens = config.chunk_tokens
    per_tb = f"{shape.tokens_in(_TB, tokens) / 1e6:,.1f} million tokens per TB"
    words = f"{tokens} tokens are {about_size(chunk_bytes)}{per_rank}, {per_tb}"
    if chunk_bytes >= _SMALL_BYTES:
        return ok("chunk", words)
    larger = tokens
    while shape.chunk_bytes(larger) < _GOOD_BYTES:
        larger *= 2
    return warning("chunk", f"{words}; so small a piece costs more than its bytes", f"chunk_tokens: {larger}")


def _staging_line(shape: ModelShape, config: Config) -> Line:
    """Each chunk in flight has a staging slot, as large as the largest group's."""
    slot = max(slot_bytes(1, config.chunk_tokens * group.bytes_per_token) for group in shape.groups)
    count = config.staging_bytes // slot
    words = f"staging of {format_size(config.staging_bytes)} has room for {count} chunks on their way, per rank"
    needed = -(-_LEAST_SLOTS * slot // (1 << 20)) << 20
    if count < _LEAST_SLOTS:
        return warning("staging", f"{words}: too few to keep storage busy", f"staging: {format_size(needed)}")
    return ok("staging", words)


def _capacity_line(shape: ModelShape, config: Config, tier: TierConfig, facts: dict[str, object]) -> Line | None:
    name = f"{tier.kind} capacity"
    if tier.capacity_bytes is None:
        return ok(name, "not bounded by the config")
    chunks = shape.chunks_in(tier.capacity_bytes, config.chunk_tokens)
    facts |= {"chunks": chunks, "tokens": chunks * config.chunk_tokens}
    words = f"{format_size(tier.capacity_bytes)} hold {chunks:,} chunks, {chunks * config.chunk_tokens:,} tokens"
    if chunks < SLOTS_PER_EXTENT_MIN:
        enough = -(-2 * SLOTS_PER_EXTENT_MIN * shape.tp * shape.chunk_bytes(config.chunk_tokens) // (1 << 20)) << 20
        return wrong(name, f"{words}: too few for a server to start with", f"capacity: {format_size(enough)}")
    if chunks * config.chunk_tokens < PROMPT_TOKENS:
        enough = -(-10 * PROMPT_TOKENS * shape.tp * shape.bytes_per_token // (1 << 30)) << 30
        return warning(name, f"{words}: less than one long prompt", f"capacity: {format_size(enough)}")
    return ok(name, words)


def _load_lines(
    shape: ModelShape, tier: TierConfig, told: Section, facts: dict[str, object], prefill_tokens_s: float | None
) -> Iterator[Line]:
    name = f"{tier.kind} load"
    if tier.kind == "memory":
        return
    io = told.facts.get("io")
    if not io:
        yield unknown(name, "how long a load takes was not measured", "run it without --no-io, once the tier works")
        return
    total = shape.tp * shape.prompt_bytes(PROMPT_TOKENS)
    load_s = io["read_latency_s"] + total / io["read_bytes_s"]
    facts["load_s"] = load_s
    words = f"{PROMPT_TOKENS:,} tokens ({about_size(total)}) load in {load_s:.2g} s at what was measured above"
    even = PROMPT_TOKENS / load_s
    if prefill_tokens_s is None:
        yield ok(name, f"{words}: worth it where the server computes fewer than {even:,.0f} tokens/s (say --prefill)")
        return
    compute_s = PROMPT_TOKENS / prefill_tokens_s
    against = f"{words}; to compute them takes {compute_s:.2g} s"
    if load_s < compute_s:
        yield ok(name, f"{against}: worth it, {compute_s / load_s:.1f} times faster")
    else:
        mend = "a faster drive or nearer bucket; keep slow_hits: skip, which computes instead"
        yield warning(name, f"{against}: not worth it", mend)
