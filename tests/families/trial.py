"""Tries a family on a kind of tier: cold, found, partly found, damaged, after a restart; compared with a vLLM alone.

Threading: one thread. Ownership: engines end with each trial; files belong to the workshop, objects to the server.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from examples.demo.engine import Answer, Engine, EngineError
from examples.demo.model import TINY, random_prompts
from tests.families.media import Medium, make_medium
from tests.families.models import Family
from tests.s3.servers import RcloneServer
from tests.vllm.harness import CHUNK_TOKENS, Workshop, chain_config

CHUNKS: Final = 3
"""Whole chunks of a prompt."""
TAIL: Final = 10
"""Tokens behind them: few, so that what is known of the others decides the answer."""
CLOSE: Final = 1e-3
"""Logprobs that differ by less are noise of steps with other shapes; what is wrong differs by more."""

Prompts = list[list[int]]


@dataclass(frozen=True)
class Cell:
    """What came out of one case."""

    case: str
    """``cold``, ``hit``, ``partial``, ``damaged``, ``damaged-N`` (KV cache group N alone), ``damaged-N-rank-M`` (there
    alone), ``restart``, ``control``; or what befell the tier.
    """
    verdict: str
    """``same``: tokens and logprobs to the last bit. ``close``: tokens, and logprobs within ``CLOSE``. ``WRONG``. For
    ``control``, where damage is not looked for: ``shows``, or ``VACUOUS``."""
    hit_tokens: int = 0
    delta: float = 0.0
    """Of logprobs, the largest."""
    note: str = ""

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {name: value for name, value in asdict(self).items() if value not in ("", 0, 0.0) or name == "verdict"}


@dataclass
class Reference:
    """A family's answers without a connector, each prompt computed from nothing."""

    model: Path
    draft: Path | None
    block_tokens: int
    groups: list[str]
    """Kind of each KV cache group."""
    prompts: Prompts
    begins: Prompts
    """A chunk of ``prompts`` and another tail. Of windows and state vLLM keeps only what the end of a prompt needs."""
    partial: Prompts
    """Begin with ``begins``."""
    fresh: Prompts
    """Prompts that begin like no other."""
    answers: dict[tuple[int, ...], Answer] = field(default_factory=dict)

    def compare(self, case: str, answers: Sequence[Answer], prompts: Prompts, note: str = "") -> Cell:
        """Return the verdict on ``answers``."""
        return judge(case, answers, [self.answers[tuple(prompt)] for prompt in prompts], note)


def judge(
    case: str, answers: Sequence[Answer], right: Sequence[Answer], note: str = "", hits: int | None = None
) -> Cell:
    """Return the verdict on ``answers``. ``hits``: tokens that came from a tier, None: as the answers say."""
    pairs = list(zip(answers, right, strict=True))
    hits = sum(answer.external_hit_tokens for answer in answers) if hits is None else hits
    if all(one.same_as(other) for one, other in pairs):
        return Cell(case, "same", hits, 0.0, note)
    delta = max(abs(a - b) for one, other in pairs for a, b in zip(one.logprobs, other.logprobs, strict=True))
    tokens = all(one.tokens == other.tokens for one, other in pairs)
    return Cell(case, "close" if tokens and delta < CLOSE else "WRONG", hits, delta, note)


class Trial:
    """Runs one family."""

    def __init__(
        self,
        workshop: Workshop,
        family: Family,
        server: RcloneServer | None = None,
        *,
        prompts: int = 2,
        fresh: int = 0,
    ) -> None:
        """``server``: for the tier ``s3``. ``prompts``: how many of each sort; ``fresh``: of that sort."""
        self._workshop = workshop
        self._count = prompts
        self._fresh = fresh
        self._server = server
        self.family = family
        self._reference: Reference | None = None

    @property
    def name(self) -> str:
        """The family's, for paths and prefixes."""
        return self.family.name.replace(" ", "-")

    def reference(self) -> Reference:
        """Return the answers of a vLLM alone; they are computed at the first call. Raises EngineError."""
        if self._reference is not None:
            return self._reference
        name = self.name
        model = self.family.write(self._workshop.scratch / f"family-{name}")
        draft = self.family.draft(self._workshop.scratch / f"draft-{name}") if self.family.draft is not None else None
        self._reference = reference = Reference(model, draft, 0, [], [], [], [], [])
        try:
            if self.family.has_block_steps:
                with self.start(None) as engine:
                    reference.block_tokens = engine.about["block_size"]
                    engine.stop()
            with self.start(None) as engine:
                reference.block_tokens = engine.about["block_size"]
                reference.groups = [kind for kind, _ in engine.worker("kv_groups")[0]]
                chunk = reference.block_tokens
                if "MambaSpec" not in reference.groups:
                    chunk *= math.ceil(CHUNK_TOKENS / chunk)
                length = CHUNKS * chunk + TAIL - self.family.image_tokens
                reference.prompts = random_prompts(TINY, [length] * self._count, seed=31)
                reference.fresh = random_prompts(TINY, [length] * self._fresh, seed=33)
                others = random_prompts(TINY, [length] * self._count, seed=32)
                chunk -= self.family.image_tokens
                reference.partial = [
                    prompt[:chunk] + other[chunk:] for prompt, other in zip(reference.prompts, others, strict=True)
                ]
                reference.begins = [prompt[: chunk + TAIL] for prompt in reference.partial]
                for prompt in reference.prompts + reference.begins + reference.partial + reference.fresh:
                    assert engine.reset_prefix_cache()
                    [reference.answers[tuple(prompt)]] = engine.generate([prompt])
                engine.stop()
        except BaseException:
            self._reference = None
            raise
        return reference

    def run(self, kind: str, cases: Sequence[str] = ()) -> Iterator[Cell]:
        """Yield a cell for each case on a kind of tier. ``cases``: only these; none: all that the kind has. ``damaged``
        is everything, then each group alone.

        Raises EngineError when an engine does not start, or dies.
        """
        reference = self.reference()
        medium = make_medium(kind, self._workshop.scratch, self.name, self._server)
        wanted = {case.partition("-")[0] for case in cases} or {
            "cold",
            "hit",
            "partial",
            "damaged",
            "restart",
            "control",
        }
        with self.start(medium) as engine:
            cold = self.ask(engine, reference.prompts)
            yield reference.compare("cold", cold, reference.prompts)
            found = self.ask(engine, reference.prompts)
            if not any(answer.external_hit_tokens for answer in found):
                off = "Nothing is stored or loaded" in engine.log.read_text(errors="replace")
                yield reference.compare("hit", found, reference.prompts, "off" if off else "MISS")
                engine.stop()
                return
            yield reference.compare("hit", found, reference.prompts)
            if "partial" in wanted:
                begins = self.ask(engine, reference.begins)
                asked = reference.begins + reference.partial
                yield reference.compare("partial", begins + self.ask(engine, reference.partial), asked)
            if "damaged" in wanted:
                yield from self._damaged(engine, medium, reference, {case for case in cases if "damaged-" in case})
            engine.stop()
        if kind == "memory":
            return
        if "restart" in wanted:
            with self.start(medium) as engine:
                yield reference.compare("restart", self.ask(engine, reference.prompts), reference.prompts)
                engine.stop()
        if "control" in wanted and kind == "slab":
            yield from self._control(medium, reference)

    def _damaged(self, engine: Engine, medium: Medium, reference: Reference, only: Collection[str]) -> Iterator[Cell]:
        """Damage everything, then each group alone, on each rank alone; what was damaged is stored anew in between.
        ``only``: these cases; none: all.
        """
        each: list[tuple[list[int] | None, int | None]] = [(None, None)]
        ranks = range(self.family.ranks) if self.family.ranks > 1 else [None]
        if len(reference.groups) > 1 or self.family.ranks > 1:
            each += [([group], rank) for group in range(len(reference.groups)) for rank in ranks]
        for groups, rank in each:
            case = "damaged" if groups is None else f"damaged-{groups[0]}"
            case += "" if rank is None else f"-rank-{rank}"
            if only and case not in only:
                continue
            self.ask(engine, reference.prompts)
            refused = refusals(engine)
            if medium.directory is None:
                count = sum(engine.worker("flip_memory", groups, rank))
            else:
                count = medium.flip(groups, rank)
            note = "" if count else "nothing to damage"
            cell = reference.compare(case, self.ask(engine, reference.prompts), reference.prompts, note)
            if count and refusals(engine) == refused:
                cell = Cell(case, cell.verdict, cell.hit_tokens, cell.delta, "NOT REFUSED")
            yield cell

    def _control(self, medium: Medium, reference: Reference) -> Iterator[Cell]:
        """Let an engine that looks for no damage use what is damaged: answers must show it, for each group."""
        for group in range(len(reference.groups)):
            with self.start(medium) as engine:  # all is whole again
                self.ask(engine, reference.prompts)
                engine.stop()
            count = medium.scramble([group])
            with self.start(medium, verify="header") as engine:
                cell = reference.compare("", self.ask(engine, reference.prompts), reference.prompts)
                engine.stop()
            verdict = "shows" if cell.verdict == "WRONG" else "VACUOUS" if count else "nothing stored"
            yield Cell(f"control-{group}", verdict, cell.hit_tokens, cell.delta)

    def ask(self, engine: Engine, prompts: Prompts) -> list[Answer]:
        """Return answers to prompts of which the engine's device has nothing; what is to be stored is stored then."""
        assert engine.reset_prefix_cache()
        answers = engine.generate(prompts)
        assert engine.settle()
        return answers

    def start(self, medium: Medium | None, **fields: Any) -> Engine:
        """Start an engine on a tier, None: without a connector. ``fields``: further ones of our config."""
        reference, family = self._reference, self.family
        assert reference is not None
        options: dict[str, Any] = {"max_num_batched_tokens": CHUNK_TOKENS, **family.options}
        environment = dict(family.environment)
        if family.has_block_steps and reference.block_tokens:
            options["max_num_batched_tokens"] = reference.block_tokens
        if reference.draft is not None:
            options["speculative_config"] = {**options.get("speculative_config", {}), "model": str(reference.draft)}
        if family.ranks > 1:
            options |= {"tensor_parallel_size": family.ranks, "distributed_executor_backend": "mp", "in_process": False}
            environment |= RANKS_ENVIRONMENT
        if medium is not None:
            if medium.kind == "memory":
                fields.setdefault("verify", "always")
            options["connector"] = chain_config(medium.tier, **{**family.fields, **fields})
            environment |= medium.environment
        engine = self._workshop.start_engine(
            model=reference.model, environment=environment, worker_extension_cls=family.extension, **options
        )
        if family.image_tokens:
            engine.call("show", colour="red")
        return engine


RANKS_ENVIRONMENT: Final = {"VLLM_CPU_SIM_MULTI_NUMA": "1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}
"""Several ranks on a machine with one NUMA node."""


def refusals(engine: Engine) -> int:
    """How often the engine has said that a load was not usable."""
    return engine.log.read_text(errors="replace").count("not usable")


def why(error: EngineError) -> str:
    """Return what an engine died of, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "no reason given"
    causes = [line for line in lines if "Error" in line and not line.startswith(("File", "raise"))]
    return (causes[-1] if causes else first)[-200:]
