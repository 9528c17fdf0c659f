"""What ``nixl-offload check --model`` finds: the model's chunks against capacities, and loading against computing.

Threading: pure functions of the model's shape and of what other sections measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nixl_offload.cli.check.report import Finding, Section, ok, unknown, warning, wrong
from nixl_offload.cli.model_shape import ModelShape
from nixl_offload.cli.terminal import about_size
from nixl_offload.config import Config
from nixl_offload.tiers.slot_allocator import SLOTS_PER_EXTENT_MIN
from nixl_offload.units import format_size

_PROMPT_TOKENS: Final = 10_000
_SMALL_BYTES: Final = 256 << 10
"""Below it a transfer costs more than its bytes, on drives and in buckets alike."""
_GOOD_BYTES: Final = 1 << 20
_MIN_STAGING_CHUNKS: Final = 8
"""In flight, to keep storage busy."""
_TB: Final = 10**12
_KINDS: Final = {
    "full": "every layer keeps every token",
    "mla": "compressed (MLA), whole on every rank",
    "sliding": "every layer looks back a window",
    "hybrid": "some layers look back a window, so these numbers are the most that it can be",
    "state": "of the layers that keep tokens; the others keep a state, of which each chunk has one",
}


def model_section(
    shape: ModelShape, config: Config, tiers: Sequence[Section], *, has_capacity: bool, prefill_tokens_s: float | None
) -> Section:
    """Look at a model. ``tiers`` are the sections of the config's tiers, in order; ``has_capacity``: their capacities
    come from a config; ``prefill_tokens_s``: how fast the server computes prompts.
    """
    section = Section("model", f"Model {shape.name}")
    chunk = shape.chunk_bytes(config.chunk_tokens)
    facts: list[dict[str, object]] = [{"kind": tier.kind} for tier in config.tiers]
    section.facts = {
        "bytes_per_token": shape.bytes_per_token,
        "ranks": shape.tp,
        "chunk_tokens": shape.chunk_holds(config.chunk_tokens),
        "chunk_bytes": chunk,
        "tokens_per_tb": shape.tokens_in(_TB, config.chunk_tokens, copies=_copies(shape, config)),
        "tiers": facts,
    }
    per_rank = f" on each of {shape.tp} ranks" if shape.tp > 1 else ""
    once = f"; {shape.replicas} ranks have the same, which is stored once" if _copies(shape, config) < shape.tp else ""
    words = f"{about_size(shape.bytes_per_token)} per token{per_rank}, {shape.kv_dtype}; {_KINDS[shape.kind]}{once}"
    section.add("kv cache", ok(words))
    section.add("chunk", _chunk(shape, config, f"{about_size(chunk)}{per_rank}"))
    section.add("staging", _staging(shape, config))
    for tier, found, fact in zip(config.tiers, tiers, facts, strict=True):
        if has_capacity:
            copies = shape.tp if tier.kind == "memory" else _copies(shape, config)
            section.add(f"{tier.kind} capacity", _capacity(shape, config, tier.capacity_bytes, copies, fact))
        if tier.outlives_process:
            section.add(f"{tier.kind} load", _load(shape, found, fact, prefill_tokens_s))
    return section


def _copies(shape: ModelShape, config: Config) -> int:
    """Return how many ranks store what they have, where ranks of one machine, or all, have one copy of what is alike.

    Whether they understand what lies in their KV caches is not known here.
    """
    cut = config.shards
    is_once = cut is not None and (shape.kind == "mla" or (shape.kind != "state" and cut.heads == "distinct"))
    return shape.tp // shape.replicas if is_once else shape.tp


def _chunk(shape: ModelShape, config: Config, size: str) -> Finding:
    tokens = larger = shape.chunk_holds(config.chunk_tokens)
    per_tb = shape.tokens_in(_TB, tokens, copies=_copies(shape, config))
    words = f"{tokens} tokens are {size}, {per_tb / 1e6:,.1f} million tokens per TB"
    if shape.chunk_bytes(tokens) >= _SMALL_BYTES:
        return ok(words)
    while larger * shape.bytes_per_token < _GOOD_BYTES:
        larger *= 2
    fix = f"chunk_tokens: {larger}" if shape.block_tokens is None else f"start the server with --block-size {larger}"
    return warning(f"{words}; a transfer this small costs more than its bytes", fix)


def _staging(shape: ModelShape, config: Config) -> Finding:
    """Each chunk in flight has a staging slot, as large as the largest group's."""
    slot = max(shape.group_chunk_bytes(group, config.chunk_tokens) for group in shape.groups)
    count = config.staging_bytes // slot
    words = f"staging of {format_size(config.staging_bytes)} has room for {count} chunks in flight, per rank"
    if count >= _MIN_STAGING_CHUNKS:
        return ok(words)
    return warning(f"{words}: too few to keep storage busy", f"staging: {_rounded_up(_MIN_STAGING_CHUNKS * slot)}")


def _capacity(
    shape: ModelShape, config: Config, capacity_bytes: int | None, copies: int, fact: dict[str, object]
) -> Finding:
    if capacity_bytes is None:
        return ok("not bounded by the config")
    chunks = shape.chunks_in(capacity_bytes, config.chunk_tokens, copies=copies)
    tokens = chunks * shape.chunk_holds(config.chunk_tokens)
    fact |= {"chunks": chunks, "tokens": tokens}
    words = f"{format_size(capacity_bytes)} hold {chunks:,} chunks, {tokens:,} tokens"
    if shape.chunks_in(capacity_bytes, config.chunk_tokens) < SLOTS_PER_EXTENT_MIN:
        enough = _rounded_up(2 * SLOTS_PER_EXTENT_MIN * shape.tp * shape.chunk_bytes(config.chunk_tokens))
        return wrong(f"{words}: too few for a server to start with", f"capacity: {enough}")
    if tokens < _PROMPT_TOKENS:
        enough = _rounded_up(10 * _PROMPT_TOKENS * copies * shape.bytes_per_token, 1 << 30)
        return warning(f"{words}: less than one long prompt", f"capacity: {enough}")
    return ok(words)


def _load(shape: ModelShape, tier: Section, fact: dict[str, object], prefill_tokens_s: float | None) -> Finding:
    io = tier.facts.get("io")
    if not io:
        return unknown("how long a load takes was not measured", "run it without --no-io, once the tier works")
    total = shape.tp * shape.prompt_bytes(_PROMPT_TOKENS)
    load_s = total / io["read_bytes_s"]
    fact["load_s"] = load_s
    words = f"{_PROMPT_TOKENS:,} tokens ({about_size(total)}) load in {load_s:.2g} s at the speed measured above"
    if prefill_tokens_s is None:
        even = _PROMPT_TOKENS / load_s
        return ok(f"{words}: worth it where the server computes fewer than {even:,.0f} tokens/s (say --prefill)")
    compute_s = _PROMPT_TOKENS / prefill_tokens_s
    words += f"; to compute them takes {compute_s:.2g} s"
    if load_s < compute_s:
        return ok(f"{words}: worth it, {compute_s / load_s:.1f} times faster")
    fix = "a faster drive or nearer bucket; keep slow_hits: skip, which computes instead"
    return warning(f"{words}: not worth it", fix)


def _rounded_up(size_bytes: int, unit_bytes: int = 1 << 20) -> str:
    return format_size(-(-size_bytes // unit_bytes) * unit_bytes)
