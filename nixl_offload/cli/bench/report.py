"""What ``nixl-offload bench`` measured: as tables for people and as JSON, and what it means for prompts.

Threading: pure but for printing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TextIO

from nixl_offload.cli.model_shape import ModelShape
from nixl_offload.cli.terminal import about_size, print_table

if TYPE_CHECKING:
    from nixl_offload.cli.bench.drive import Measured

PROMPT_TOKENS: Final = 10_000
"""A prompt that everybody can picture."""
_NUMBERS: Final = ("MB/s", "chunks/s", "p50 ms", "p99 ms", "CPU s/GB", "in flight")


@dataclass(slots=True)
class TierFigures:
    """One tier: figures, or why there are none."""

    kind: str
    where: str
    mover: str = ""
    path: str = ""
    size_bytes: int = 0
    measured: list[Measured] = field(default_factory=list)
    trouble: str = ""

    def of(self, operation: str) -> Measured | None:
        """Return the figures of an operation that worked."""
        return next((each for each in self.measured if each.operation == operation and each.chunks), None)

    @property
    def works(self) -> bool:
        """Whether all that was asked was done."""
        return not self.trouble and not any(each.failed for each in self.measured)


@dataclass(slots=True)
class BenchReport:
    """All that there is to tell."""

    shape: ModelShape
    chunk_tokens: int
    kv_memory: str
    verify: str
    prefill_tokens_s: float | None
    tiers: list[TierFigures] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether every tier did."""
        return all(tier.works for tier in self.tiers)

    def load_tokens_s(self, tier: TierFigures) -> float | None:
        """Return how many tokens a second loads bring back."""
        load = tier.of("load")
        return None if load is None else load.bytes_s / self.shape.bytes_per_token

    def prompt_load_s(self, tier: TierFigures) -> float | None:
        """Return how long the KV of ``PROMPT_TOKENS`` takes to load; of a window, only what is in it."""
        load = tier.of("load")
        return None if load is None else self.shape.prompt_bytes(PROMPT_TOKENS) / load.bytes_s

    @property
    def prompt_compute_s(self) -> float | None:
        """How long they take to compute, at the rate given."""
        return None if self.prefill_tokens_s is None else PROMPT_TOKENS / self.prefill_tokens_s

    def print_to(self, out: TextIO) -> None:
        """Print it."""
        shape = self.shape
        print(
            f"{shape.name}, {shape.kv_dtype}, one rank of TP {shape.tp}: {shape.bytes_per_token:,} bytes of KV per "
            f"token; a chunk of {self.chunk_tokens} tokens is {about_size(shape.chunk_bytes(self.chunk_tokens))}.",
            file=out,
        )
        print(f"KV cache in {self.kv_memory}; loads verified by {self.verify}.\n", file=out)
        rows = [_row(tier, each) for tier in self.tiers for each in tier.measured if each.chunks]
        if rows:
            print_table([("tier", "mover", "by", "operation", *_NUMBERS), *rows], out, right=_NUMBERS)
        self._print_meaning(out)
        for tier in self.tiers:
            if tier.trouble:
                print(f"{tier.kind}: not measured: {tier.trouble}", file=out)
            for each in tier.measured:
                if each.failed:
                    why = "; ".join(each.errors[:3]) or "dropped under pressure"
                    print(f"{tier.kind}: {each.failed} chunks failed to {each.operation}: {why}", file=out)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data. Units are in the names."""
        shape = self.shape
        return {
            "model": {
                "name": shape.name,
                "kind": shape.kind,
                "layers": shape.layers,
                "kv_dtype": shape.kv_dtype,
                "tp": shape.tp,
                "bytes_per_token": shape.bytes_per_token,
                "chunk_tokens": self.chunk_tokens,
                "chunk_bytes": shape.chunk_bytes(self.chunk_tokens),
            },
            "kv_memory": self.kv_memory,
            "verify": self.verify,
            "prefill_tokens_s": self.prefill_tokens_s,
            "tiers": [
                {
                    "kind": tier.kind,
                    "where": tier.where,
                    "mover": tier.mover,
                    "path": tier.path,
                    "size_bytes": tier.size_bytes,
                    "trouble": tier.trouble or None,
                    **{each.operation: _plain(each) for each in tier.measured},
                    "load_tokens_s": self.load_tokens_s(tier),
                    f"load_{PROMPT_TOKENS}_tokens_s": self.prompt_load_s(tier),
                }
                for tier in self.tiers
            ],
        }

    def _print_meaning(self, out: TextIO) -> None:
        rows = []
        compute_s = self.prompt_compute_s
        for tier in self.tiers:
            rate, load_s = self.load_tokens_s(tier), self.prompt_load_s(tier)
            if rate is not None and load_s is not None:
                against = [] if compute_s is None else [f"{compute_s / load_s:,.1f} x"]
                rows.append((tier.kind, f"{rate:,.0f}", _seconds(load_s), *against))
        if not rows:
            return
        print(file=out)
        numbers = ["tokens/s loaded", f"{PROMPT_TOKENS:,} tokens in", "faster than computing"]
        if compute_s is None:
            numbers.pop()
        print_table([("tier", *numbers), *rows], out, right=numbers)
        if compute_s is None:
            print("--prefill TOKENS/s compares that with computing them.", file=out)
            return
        print(
            f"Computing {PROMPT_TOKENS:,} tokens takes {_seconds(compute_s)} at {self.prefill_tokens_s:,.0f} tokens/s.",
            file=out,
        )


def _row(tier: TierFigures, each: Measured) -> tuple[str, ...]:
    return (
        tier.kind,
        tier.mover,
        {"host": "host copy", "device": "device copy"}.get(tier.path, tier.path),
        each.operation,
        f"{each.bytes_s / 1e6:,.0f}",
        f"{each.chunks_s:,.1f}",
        f"{each.latency_s(0.5) * 1e3:,.1f}",
        f"{each.latency_s(0.99) * 1e3:,.1f}",
        f"{each.cpu_s_per_gb:.2f}",
        str(each.in_flight),
    )


def _plain(each: Measured) -> dict[str, Any]:
    return {
        "seconds": each.seconds,
        "bytes": each.payload_bytes,
        "bytes_s": each.bytes_s,
        "chunks": each.chunks,
        "chunks_s": each.chunks_s,
        "p50_s": each.latency_s(0.5),
        "p99_s": each.latency_s(0.99),
        "cpu_s_per_gb": each.cpu_s_per_gb,
        "in_flight": each.in_flight,
        "failed_chunks": each.failed,
        "errors": each.errors,
    }


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:,.0f} ms"
    return f"{seconds:,.1f} s"
