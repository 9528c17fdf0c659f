"""Tries a family on a kind of tier: cold, found, partly found, damaged, by another engine, after a restart; compared
with a vLLM alone. Of models that vLLM cannot run here, bytes of each KV cache group go out and back.

Threading: one thread. Ownership: engines end with each trial; files belong to the workshop, objects to the server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from examples.demo.engine import Answer, Engine, EngineError
from examples.demo.model import TINY, random_prompts
from nixl_offload.chunk.header import HEADER_BYTES
from tests.families.models import Family
from tests.prove.happenings import DAMAGES, Piece
from tests.s3.servers import RcloneServer
from tests.vllm.damage import Prompt, Reference, hits, loads_refused
from tests.vllm.harness import CHUNK_TOKENS, Workshop, chain_config, file_tier
from tests.vllm.media import MOVERS, Medium, bucket, memory, slab, tree

CHUNKS: Final = 3
"""Whole chunks of a prompt."""
TAIL: Final = 10
"""Tokens behind them: few, so that what is known of the others decides the answer."""
CLOSE: Final = 1e-3
"""Logprobs that differ by less are noise of steps with other shapes; what is wrong differs by more."""
TRIES: Final = 5
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
        words = f"{self.case} {self.verdict}"
        words += f" {self.delta:.0e}" if self.verdict in ("close", "WRONG") else ""
        words += f" of {self.hit_tokens} tokens found" if self.hit_tokens else ""
        return words + (f" ({self.note})" if self.note else "")


class Trial:
    """A family, its answers without a connector, each prompt computed from nothing, and engines with one.

    Raises EngineError when an engine does not start, or dies.
    """

    def __init__(
        self, workshop: Workshop, family: Family, server: RcloneServer | None = None, *, prompts: int = 2
    ) -> None:
        """``server``: for buckets. ``prompts``: how many of each sort."""
        self._workshop, self._server, self._family = workshop, server, family
        self._name = family.name.replace(" ", "-")
        self._model = family.write(workshop.scratch / f"family-{self._name}")
        self._draft = family.draft(workshop.scratch / f"draft-{self._name}") if family.draft is not None else None
        self._block_tokens = 0
        if family.has_block_steps:
            with self._start(None) as engine:
                self._block_tokens = engine.about["block_size"]
        with self._start(None) as engine:
            self.groups: list[str] = [kind for kind, _ in engine.worker("kv_groups")[0]]
            """Kind of each KV cache group."""
            chunk = engine.about["block_size"]
            if "MambaSpec" not in self.groups:
                chunk *= math.ceil(CHUNK_TOKENS / chunk)
            length = CHUNKS * chunk + TAIL - family.image_tokens
            self.prompts = random_prompts(TINY, [length] * prompts, seed=31)
            self._others = random_prompts(TINY, [length] * prompts, seed=32)
            chunk -= family.image_tokens
            pairs = zip(self.prompts, self._others, strict=True)
            self._partial = [prompt[:chunk] + other[chunk:] for prompt, other in pairs]
            # A chunk of ``prompts`` and another tail: of windows and state vLLM keeps what the end of a prompt needs.
            self._begins = [prompt[: chunk + TAIL] for prompt in self._partial]
            self._reference = Reference(engine)
            self._reference.answers(self.prompts + self._begins + self._partial + self._others)

    def run(self, kind: str, *, control: bool = True, together: bool = False) -> Iterator[Cell]:
        """Yield a cell for each case on a kind of tier. ``damaged`` is everything, then each group alone. ``together``:
        ask for all prompts at once when everything is damaged.
        """
        medium = self._medium(kind)
        with self._start(medium) as engine:
            yield self._compare("cold", self._ask(engine, self.prompts), self.prompts)
            hit = self._compare("hit", self._ask(engine, self.prompts), self.prompts)
            yield hit
            if not hit.hit_tokens:
                off = "Nothing is stored or loaded" in engine.log.read_text(errors="replace")
                yield Cell("hit", "off" if off else "MISS")
                return
            begins = self._ask(engine, self._begins)
            yield self._compare("partial", begins + self._ask(engine, self._partial), self._begins + self._partial)
            yield from self._damaged(engine, medium, together=together)
            self._until_found(engine, self.prompts)
            if kind not in ("memory", "slab"):
                yield from self._beside(engine, medium)
            engine.stop()
        if kind != "memory":
            with self._start(medium) as engine:
                yield self._compare("restart", self._ask(engine, self.prompts), self.prompts)
                engine.stop()
        if control and kind == "slab":
            yield from self._control(medium)

    def _medium(self, kind: str) -> Medium:
        if kind == "memory":
            return memory()
        if kind in MOVERS:
            assert self._server is not None
            return bucket(self._server, kind, prefix=f"{self._name}-{kind}")
        return {"slab": slab, "tree": tree}[kind](self._workshop.scratch / f"{self._name}-{kind}")

    def _damaged(self, engine: Engine, medium: Medium, *, together: bool) -> Iterator[Cell]:
        """Damage everything, then each group alone, on each rank alone; what was damaged is stored anew in between."""
        each: list[tuple[list[int] | None, int | None]] = [(None, None)]
        ranks = range(self._family.ranks) if self._family.ranks > 1 else [None]
        if len(self.groups) > 1 or self._family.ranks > 1:
            each += [([group], rank) for group in range(len(self.groups)) for rank in ranks]
        for groups, rank in each:
            case = "damaged" if groups is None else f"damaged-{groups[0]}"
            case += "" if rank is None else f"-rank-{rank}"
            self._until_found(engine, self.prompts)
            refused = loads_refused(engine)
            if medium.name == "memory":
                count = sum(engine.worker("flip_memory", groups, rank))
            else:
                shards = medium.stored(groups, rank)
                count = len(shards)
                for shard in shards:
                    DAMAGES["flipped"](shard, shard, 1.0)
                medium.forget()
            answers = self._ask(engine, self.prompts, together=together and groups is None)
            is_refused = loads_refused(engine) > refused
            note = "nothing to damage" if not count else "" if is_refused else "NOT REFUSED"
            yield self._compare(case, answers, self.prompts, note)

    def _beside(self, engine: Engine, medium: Medium) -> Iterator[Cell]:
        """Start another engine beside this one. It finds all and stores nothing; what it stores this one finds."""
        with self._start(medium) as other:
            found = self._until_found(other, self.prompts)
            yield self._compare("other", found, self.prompts, "STORED AGAIN" if other.stored_bytes() else "")
            self._ask(other, self._others)
            yield self._compare("back", self._until_found(engine, self._others), self._others)
            other.stop()

    def _control(self, medium: Medium) -> Iterator[Cell]:
        """Let an engine that looks for no damage use what is damaged: answers must show it, for each group."""
        for group in range(len(self.groups)):
            with self._start(medium) as engine:  # all is whole again
                self._ask(engine, self.prompts)
                engine.stop()
            shards = medium.stored([group])
            for shard in shards:  # the sign of every number, be they of two bytes or four
                image = bytearray(shard.read())
                image[HEADER_BYTES + 1 :: 2] = bytes(byte ^ 0x80 for byte in image[HEADER_BYTES + 1 :: 2])
                shard.write(bytes(image))
            with self._start(medium, verify="header") as engine:
                cell = self._compare("", self._ask(engine, self.prompts), self.prompts)
                engine.stop()
            verdict = "shows" if cell.verdict == "WRONG" else "VACUOUS" if shards else "nothing stored"
            yield Cell(f"control-{group}", verdict, cell.hit_tokens, cell.delta)

    def _ask(self, engine: Engine, prompts: list[Prompt], *, together: bool = False) -> list[Answer]:
        """Return answers to prompts of which the engine's device has nothing; what is to be stored is stored then."""
        assert engine.reset_prefix_cache()
        answers = engine.generate(prompts, together=together)
        assert engine.settle()
        return answers

    def _until_found(self, engine: Engine, prompts: list[Prompt]) -> list[Answer]:
        """As ``_ask``, until all comes from the tier: in shared tiers what was damaged is stored by the next request,
        and a busy machine may shed a load.
        """
        for _ in range(TRIES):
            answers = self._ask(engine, prompts)
            if hits(answers) >= len(prompts) * (len(prompts[0]) - TAIL):
                break
        return answers

    def _compare(self, case: str, answers: Sequence[Answer], prompts: list[Prompt], note: str = "") -> Cell:
        found = hits(list(answers))
        pairs = list(zip(answers, self._reference.answers(prompts), strict=True))
        if all(answer.same_as(right) for answer, right in pairs):
            return Cell(case, "same", found, note=note)
        delta = max(abs(a - b) for answer, right in pairs for a, b in zip(answer.logprobs, right.logprobs, strict=True))
        is_close = all(answer.tokens == right.tokens for answer, right in pairs) and delta <= CLOSE
        return Cell(case, "close" if is_close else "WRONG", found, delta, note)

    def _start(self, medium: Medium | None, **fields: Any) -> Engine:
        """Start an engine on a tier, None: without a connector. ``fields``: further ones of our config."""
        family = self._family
        options: dict[str, Any] = {"max_num_batched_tokens": CHUNK_TOKENS, **family.options}
        environment = dict(family.environment)
        if self._block_tokens:
            options["max_num_batched_tokens"] = self._block_tokens
        if self._draft is not None:
            options["speculative_config"] = {**options.get("speculative_config", {}), "model": str(self._draft)}
        if family.ranks > 1:
            options |= {**TWO_RANKS, "tensor_parallel_size": family.ranks}
            environment |= SIMULATED_NODES
        if medium is not None:
            if medium.name == "memory":
                fields.setdefault("verify", "always")
            options["connector"] = chain_config(medium.tier, **{**family.fields, **fields})
            environment |= medium.environment
        engine = self._workshop.start_engine(
            model=self._model, environment=environment, worker_extension_cls=family.extension, **options
        )
        if family.image_tokens:
            engine.call("show", colour="red")
        return engine


def try_layout(workshop: Workshop, family: Family) -> Iterator[Cell]:
    """Yield two cells for each KV cache group: its bytes after a round trip, and after damage. Raises EngineError.

    vLLM makes the model, asks its layers for their KV cache specs, groups and allocates them; nothing is ever computed.
    """
    name = family.name.replace(" ", "-")
    path = workshop.scratch / f"layout-{name}"
    with workshop.start_engine(
        model=family.write(workshop.scratch / f"layout-of-{name}"),
        connector=file_tier(path, **family.fields),
        worker_extension_cls="tests.families.extensions.RoundTripExtension",
        **{"max_num_batched_tokens": 2048, **family.options},
    ) as engine:
        for group, (kind, layers) in enumerate(engine.worker("kv_groups")[0]):
            [(offsets, chunk_bytes, wrong)] = engine.worker("round_trip", group)
            about = f"{kind}, {layers} layers, {chunk_bytes} bytes a chunk"
            yield Cell(f"bytes-{group}", "WRONG" if wrong else "same", note="; ".join(wrong) or about)
            [file] = path.glob("*/*.slab")
            for offset in offsets:
                piece = Piece(file, offset, HEADER_BYTES + chunk_bytes)
                DAMAGES["flipped"](piece, piece, 0.5)
            [wrong] = engine.worker("load_damaged", group)
            yield Cell(f"damaged-{group}", "WRONG" if wrong else "same", note="; ".join(wrong))
        engine.stop()


def why(error: EngineError) -> str:
    """Return what an engine died of, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "Error" in line and not line.startswith(("File", "raise"))]
    return ([*lines[:1], *causes] or ["no reason given"])[-1][-200:]
