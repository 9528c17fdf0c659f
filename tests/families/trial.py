"""Tries a family on a kind of tier: cold, found, partly found, damaged, by another engine, after a restart; compared
with a vLLM alone.

Threading: one thread. Ownership: engines end with each trial; files belong to the workshop, objects to the server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from examples.demo.engine import Answer, Engine, EngineError
from examples.demo.model import TINY, random_prompts
from nixl_offload.chunk.header import HEADER_BYTES
from tests.families.models import Family
from tests.prove.happenings import DAMAGES
from tests.s3.servers import RcloneServer
from tests.vllm.damage import Prompt, hits, loads_refused
from tests.vllm.harness import CHUNK_TOKENS, Workshop, chain_config
from tests.vllm.media import MOVERS, Medium, bucket, memory, slab, tree

CHUNKS: Final = 3
"""Whole chunks of a prompt."""
TAIL: Final = 10
"""Tokens behind them: few, so that what is known of the others decides the answer."""
CLOSE: Final = 1e-3
"""Logprobs that differ by less are noise of steps with other shapes; what is wrong differs by more."""
TIERS: Final = ("memory", "slab", "tree", *MOVERS)
TWO_RANKS: Final[Mapping[str, Any]] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "in_process": False,
}
SIMULATED_NODES: Final = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
"""Environment of several ranks on a machine with one NUMA node."""


@dataclass(frozen=True)
class Cell:
    """What came out of one case: ``cold``, ``hit``, ``partial``, ``damaged``, ``damaged-N`` (KV cache group N alone),
    ``damaged-N-rank-M`` (there alone), ``other`` (engine), ``back`` (what that stored), ``restart``, ``control-N``.
    """

    case: str
    verdict: str
    """``same``: tokens and logprobs to the last bit. ``close``: tokens, and logprobs within ``CLOSE``. ``WRONG``. For
    ``control``, where damage is not looked for: ``shows``, or ``VACUOUS``. Words in capitals are findings.
    """
    hit_tokens: int = 0
    delta: float = 0.0
    """Of logprobs, the largest."""
    note: str = ""

    def __str__(self) -> str:
        told = f"{self.case} {self.verdict}"
        told += f" {self.delta:.0e}" if self.verdict in ("close", "WRONG") else ""
        told += f" of {self.hit_tokens} tokens found" if self.hit_tokens else ""
        return told + (f" ({self.note})" if self.note else "")


@dataclass
class Reference:
    """A family's answers without a connector, each prompt computed from nothing."""

    model: Path
    draft: Path | None
    block_tokens: int = 0
    groups: list[str] = field(default_factory=list)
    """Kind of each KV cache group."""
    prompts: list[Prompt] = field(default_factory=list)
    begins: list[Prompt] = field(default_factory=list)
    """A chunk of ``prompts`` and another tail. Of windows and state vLLM keeps only what the end of a prompt needs."""
    partial: list[Prompt] = field(default_factory=list)
    """Begin with ``begins``."""
    others: list[Prompt] = field(default_factory=list)
    answers: dict[tuple[int, ...], Answer] = field(default_factory=dict)

    def compare(self, case: str, answers: Sequence[Answer], prompts: list[Prompt], note: str = "") -> Cell:
        """Return the verdict on ``answers``."""
        right, found = [self.answers[tuple(prompt)] for prompt in prompts], hits(list(answers))
        pairs = list(zip(answers, right, strict=True))
        if all(answer.same_as(other) for answer, other in pairs):
            return Cell(case, "same", found, note=note)
        delta = max(abs(a - b) for answer, other in pairs for a, b in zip(answer.logprobs, other.logprobs, strict=True))
        is_close = all(answer.tokens == other.tokens for answer, other in pairs) and delta <= CLOSE
        return Cell(case, "close" if is_close else "WRONG", found, delta, note)


class Trial:
    """A family, its answers without a connector, and engines with one."""

    def __init__(
        self, workshop: Workshop, family: Family, server: RcloneServer | None = None, *, prompts: int = 2
    ) -> None:
        """``server``: for buckets. ``prompts``: how many of each sort."""
        self._workshop = workshop
        self._count = prompts
        self._server = server
        self.family = family
        self._name = family.name.replace(" ", "-")
        self._reference: Reference | None = None

    def reference(self) -> Reference:
        """Return the answers of a vLLM alone; they are computed at the first call. Raises EngineError."""
        if self._reference is None:
            scratch, family = self._workshop.scratch, self.family
            model = family.write(scratch / f"family-{self._name}")
            draft = family.draft(scratch / f"draft-{self._name}") if family.draft is not None else None
            reference = Reference(model, draft)
            if family.has_block_steps:
                with self.start(None, reference) as engine:
                    reference.block_tokens = engine.about["block_size"]
            with self.start(None, reference) as engine:
                self._compute(reference, engine)
            self._reference = reference
        return self._reference

    def _compute(self, reference: Reference, engine: Engine) -> None:
        reference.block_tokens = chunk = engine.about["block_size"]
        reference.groups = [kind for kind, _ in engine.worker("kv_groups")[0]]
        if "MambaSpec" not in reference.groups:
            chunk *= math.ceil(CHUNK_TOKENS / chunk)
        length = CHUNKS * chunk + TAIL - self.family.image_tokens
        reference.prompts = random_prompts(TINY, [length] * self._count, seed=31)
        reference.others = others = random_prompts(TINY, [length] * self._count, seed=32)
        chunk -= self.family.image_tokens
        reference.partial = [
            prompt[:chunk] + other[chunk:] for prompt, other in zip(reference.prompts, others, strict=True)
        ]
        reference.begins = [prompt[: chunk + TAIL] for prompt in reference.partial]
        for prompt in reference.prompts + reference.begins + reference.partial + others:
            assert engine.reset_prefix_cache()
            [reference.answers[tuple(prompt)]] = engine.generate([prompt])

    def run(self, kind: str, *, control: bool = True) -> Iterator[Cell]:
        """Yield a cell for each case on a kind of tier. ``damaged`` is everything, then each group alone.

        Raises EngineError when an engine does not start, or dies.
        """
        reference, medium = self.reference(), self._medium(kind)
        with self.start(medium, reference) as engine:
            yield reference.compare("cold", self._ask(engine, reference.prompts), reference.prompts)
            hit = reference.compare("hit", self._ask(engine, reference.prompts), reference.prompts)
            yield hit
            if not hit.hit_tokens:
                off = "Nothing is stored or loaded" in engine.log.read_text(errors="replace")
                yield Cell("hit", "off" if off else "MISS")
                return
            begins = self._ask(engine, reference.begins)
            asked = reference.begins + reference.partial
            yield reference.compare("partial", begins + self._ask(engine, reference.partial), asked)
            yield from self._damaged(engine, medium, reference)
            self._until_found(engine, reference.prompts)
            if kind not in ("memory", "slab"):
                yield from self._beside(engine, medium, reference)
            engine.stop()
        if kind != "memory":
            with self.start(medium, reference) as engine:
                yield reference.compare("restart", self._ask(engine, reference.prompts), reference.prompts)
                engine.stop()
        if control and kind == "slab":
            yield from self._control(medium, reference)

    def _medium(self, kind: str) -> Medium:
        if kind == "memory":
            return memory()
        if kind in MOVERS:
            assert self._server is not None
            return bucket(self._server, kind, prefix=f"{self._name}-{kind}")
        return {"slab": slab, "tree": tree}[kind](self._workshop.scratch / f"{self._name}-{kind}")

    def _damaged(self, engine: Engine, medium: Medium, reference: Reference) -> Iterator[Cell]:
        """Damage everything, then each group alone, on each rank alone; what was damaged is stored anew in between."""
        each: list[tuple[list[int] | None, int | None]] = [(None, None)]
        ranks = range(self.family.ranks) if self.family.ranks > 1 else [None]
        if len(reference.groups) > 1 or self.family.ranks > 1:
            each += [([group], rank) for group in range(len(reference.groups)) for rank in ranks]
        for groups, rank in each:
            case = "damaged" if groups is None else f"damaged-{groups[0]}"
            case += "" if rank is None else f"-rank-{rank}"
            self._until_found(engine, reference.prompts)
            refused = loads_refused(engine)
            if medium.name == "memory":
                count = sum(engine.worker("flip_memory", groups, rank))
            else:
                shards = medium.stored(groups, rank)
                count = len(shards)
                for shard in shards:
                    DAMAGES["flipped"](shard, shard, 1.0)
                medium.forget()
            answers = self._ask(engine, reference.prompts)
            is_refused = loads_refused(engine) > refused
            note = "nothing to damage" if not count else "" if is_refused else "NOT REFUSED"
            yield reference.compare(case, answers, reference.prompts, note)

    def _beside(self, engine: Engine, medium: Medium, reference: Reference) -> Iterator[Cell]:
        """Start another engine beside this one. It finds all and stores nothing; what it stores this one finds."""
        with self.start(medium, reference) as other:
            found = self._until_found(other, reference.prompts)
            note = "STORED AGAIN" if other.stored_bytes() else ""
            yield reference.compare("other", found, reference.prompts, note)
            self._ask(other, reference.others)
            yield reference.compare("back", self._until_found(engine, reference.others), reference.others)
            other.stop()

    def _until_found(self, engine: Engine, prompts: list[Prompt]) -> list[Answer]:
        """As ``_ask``, until all comes from the tier: in shared tiers what was damaged is stored by the next request,
        and a busy machine may shed a load.
        """
        for _ in range(5):
            answers = self._ask(engine, prompts)
            if hits(answers) >= len(prompts) * (len(prompts[0]) - TAIL):
                break
        return answers

    def _control(self, medium: Medium, reference: Reference) -> Iterator[Cell]:
        """Let an engine that looks for no damage use what is damaged: answers must show it, for each group."""
        for group in range(len(reference.groups)):
            with self.start(medium, reference) as engine:  # all is whole again
                self._ask(engine, reference.prompts)
                engine.stop()
            shards = medium.stored([group])
            for shard in shards:  # the sign of every number, be they of two bytes or four
                image = bytearray(shard.read())
                image[HEADER_BYTES + 1 :: 2] = bytes(byte ^ 0x80 for byte in image[HEADER_BYTES + 1 :: 2])
                shard.write(bytes(image))
            with self.start(medium, reference, verify="header") as engine:
                cell = reference.compare("", self._ask(engine, reference.prompts), reference.prompts)
                engine.stop()
            verdict = "shows" if cell.verdict == "WRONG" else "VACUOUS" if shards else "nothing stored"
            yield Cell(f"control-{group}", verdict, cell.hit_tokens, cell.delta)

    def _ask(self, engine: Engine, prompts: list[Prompt]) -> list[Answer]:
        """Return answers to prompts of which the engine's device has nothing; what is to be stored is stored then."""
        assert engine.reset_prefix_cache()
        answers = engine.generate(prompts)
        assert engine.settle()
        return answers

    def start(self, medium: Medium | None, reference: Reference, **fields: Any) -> Engine:
        """Start an engine on a tier, None: without a connector. ``fields``: further ones of our config."""
        family = self.family
        options: dict[str, Any] = {"max_num_batched_tokens": CHUNK_TOKENS, **family.options}
        environment = dict(family.environment)
        if family.has_block_steps and reference.block_tokens:
            options["max_num_batched_tokens"] = reference.block_tokens
        if reference.draft is not None:
            options["speculative_config"] = {**options.get("speculative_config", {}), "model": str(reference.draft)}
        if family.ranks > 1:
            options |= {**TWO_RANKS, "tensor_parallel_size": family.ranks}
            environment |= SIMULATED_NODES
        if medium is not None:
            if medium.name == "memory":
                fields.setdefault("verify", "always")
            options["connector"] = chain_config(medium.tier, **{**family.fields, **fields})
            environment |= medium.environment
        engine = self._workshop.start_engine(
            model=reference.model, environment=environment, worker_extension_cls=family.extension, **options
        )
        if family.image_tokens:
            engine.call("show", colour="red")
        return engine


def why(error: EngineError) -> str:
    """Return what an engine died of, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line and not line.startswith(("File", "raise"))]
    return ([*lines[:1], *causes] or ["no reason given"])[-1][-200:]
