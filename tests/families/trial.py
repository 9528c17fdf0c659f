"""Tries a family on a kind of tier: cold, found, partly found, damaged, after a restart; compared with a vLLM alone.

Threading: one thread. Ownership: engines end with each trial; files belong to the workshop, objects to the server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    """``cold``, ``hit``, ``partial``, ``damaged``, ``damaged-N`` (KV cache group N alone), ``restart``, ``control``."""
    verdict: str
    """``same``: tokens and logprobs to the last bit. ``close``: tokens, and logprobs within ``CLOSE``. ``WRONG``, or
    ``differs`` where a vLLM alone, with a hit of its own prefix cache, does not answer as one that computes either. For
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
    answers: dict[tuple[int, ...], Answer] = field(default_factory=dict)
    own: str = ""
    """The verdict on vLLM's own answers where its prefix cache has the beginning of a prompt."""

    def compare(self, case: str, answers: Sequence[Answer], prompts: Prompts, note: str = "") -> Cell:
        """Return the verdict on ``answers``."""
        cell = judge(case, answers, [self.answers[tuple(prompt)] for prompt in prompts], note)
        if cell.verdict == self.own == "WRONG":
            return replace(cell, verdict="differs", note="as vLLM alone")
        return cell


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
        self, workshop: Workshop, family: Family, server: RcloneServer | None = None, *, prompts: int = 2
    ) -> None:
        """``server``: for the tier ``s3``. ``prompts``: how many of each sort."""
        self._workshop = workshop
        self._count = prompts
        self._server = server
        self.family = family
        self._reference: Reference | None = None

    def reference(self) -> Reference:
        """Return the answers of a vLLM alone; they are computed at the first call. Raises EngineError."""
        if self._reference is not None:
            return self._reference
        name = self.family.name.replace(" ", "-")
        model = self.family.write(self._workshop.scratch / f"family-{name}")
        draft = self.family.draft(self._workshop.scratch / f"draft-{name}") if self.family.draft is not None else None
        self._reference = reference = Reference(model, draft, 0, [], [], [], [])
        try:
            if self.family.has_block_steps:
                with self._start(None) as engine:
                    reference.block_tokens = engine.about["block_size"]
                    engine.stop()
            with self._start(None) as engine:
                reference.block_tokens = engine.about["block_size"]
                reference.groups = [kind for kind, _ in engine.worker("kv_groups")[0]]
                chunk = reference.block_tokens
                if "MambaSpec" not in reference.groups:
                    chunk *= math.ceil(CHUNK_TOKENS / chunk)
                length = CHUNKS * chunk + TAIL
                reference.prompts = random_prompts(TINY, [length] * self._count, seed=31)
                others = random_prompts(TINY, [length] * self._count, seed=32)
                reference.partial = [
                    prompt[:chunk] + other[chunk:] for prompt, other in zip(reference.prompts, others, strict=True)
                ]
                reference.begins = [prompt[: chunk + TAIL] for prompt in reference.partial]
                for prompt in reference.prompts + reference.begins + reference.partial:
                    assert engine.reset_prefix_cache()
                    [reference.answers[tuple(prompt)]] = engine.generate([prompt])
                assert engine.reset_prefix_cache()
                engine.generate(reference.begins)
                reference.own = reference.compare("", engine.generate(reference.partial), reference.partial).verdict
                engine.stop()
        except BaseException:
            self._reference = None
            raise
        return reference

    def run(self, kind: str, cases: Sequence[str] = ()) -> Iterator[Cell]:
        """Yield a cell for each case on a kind of tier. ``cases``: only these; none: all that the kind has.

        Raises EngineError when an engine does not start, or dies.
        """
        reference = self.reference()
        medium = make_medium(kind, self._workshop.scratch, self.family.name.replace(" ", "-"), self._server)
        wanted = {case.partition("-")[0] for case in cases} or {
            "cold",
            "hit",
            "partial",
            "damaged",
            "restart",
            "control",
        }
        with self._start(medium) as engine:
            cold = self._ask(engine, reference.prompts)
            yield reference.compare("cold", cold, reference.prompts)
            found = self._ask(engine, reference.prompts)
            if not any(answer.external_hit_tokens for answer in found):
                off = "Nothing is stored or loaded" in engine.log.read_text(errors="replace")
                yield reference.compare("hit", found, reference.prompts, "off" if off else "MISS")
                engine.stop()
                return
            yield reference.compare("hit", found, reference.prompts)
            if "partial" in wanted:
                begins = self._ask(engine, reference.begins)
                asked = reference.begins + reference.partial
                yield reference.compare("partial", begins + self._ask(engine, reference.partial), asked)
            if "damaged" in wanted:
                yield from self._damaged(engine, medium, reference)
            engine.stop()
        if kind == "memory":
            return
        if "restart" in wanted:
            with self._start(medium) as engine:
                yield reference.compare("restart", self._ask(engine, reference.prompts), reference.prompts)
                engine.stop()
        if "control" in wanted and kind == "slab":
            yield from self._control(medium, reference)

    def _damaged(self, engine: Engine, medium: Medium, reference: Reference) -> Iterator[Cell]:
        """Damage everything, then each group alone; what was damaged is stored anew in between."""
        each: list[list[int] | None] = [None]
        if len(reference.groups) > 1:
            each += [[group] for group in range(len(reference.groups))]
        for groups in each:
            self._ask(engine, reference.prompts)
            refused = _refused(engine)
            count = engine.worker("flip_memory", groups)[0] if medium.directory is None else medium.flip(groups)
            case = "damaged" if groups is None else f"damaged-{groups[0]}"
            note = "" if count else "nothing to damage"
            cell = reference.compare(case, self._ask(engine, reference.prompts), reference.prompts, note)
            if count and _refused(engine) == refused:
                cell = Cell(case, cell.verdict, cell.hit_tokens, cell.delta, "NOT REFUSED")
            yield cell

    def _control(self, medium: Medium, reference: Reference) -> Iterator[Cell]:
        """Let an engine that looks for no damage use what is damaged: answers must show it, for each group."""
        for group in range(len(reference.groups)):
            with self._start(medium) as engine:  # all is whole again
                self._ask(engine, reference.prompts)
                engine.stop()
            count = medium.scramble([group])
            with self._start(medium, verify="header") as engine:
                cell = reference.compare("", self._ask(engine, reference.prompts), reference.prompts)
                engine.stop()
            verdict = "shows" if cell.verdict in ("WRONG", "differs") else "VACUOUS" if count else "nothing stored"
            yield Cell(f"control-{group}", verdict, cell.hit_tokens, cell.delta)

    def _ask(self, engine: Engine, prompts: Prompts) -> list[Answer]:
        assert engine.reset_prefix_cache()
        answers = engine.generate(prompts)
        assert engine.settle()
        return answers

    def _start(self, medium: Medium | None, **fields: Any) -> Engine:
        reference = self._reference
        assert reference is not None
        options: dict[str, Any] = {"max_num_batched_tokens": CHUNK_TOKENS, **self.family.options}
        if self.family.has_block_steps and reference.block_tokens:
            options["max_num_batched_tokens"] = reference.block_tokens
        if reference.draft is not None:
            options["speculative_config"] = {**options.get("speculative_config", {}), "model": str(reference.draft)}
        if medium is None:
            return self._workshop.start_engine(model=reference.model, worker_extension_cls=_EXTENSION, **options)
        if medium.kind == "memory":
            fields.setdefault("verify", "always")
        return self._workshop.start_engine(
            connector=chain_config(medium.tier, **{**self.family.fields, **fields}),
            model=reference.model,
            environment=medium.environment,
            worker_extension_cls=_EXTENSION,
            **options,
        )


_EXTENSION: Final = "tests.families.extension.FamilyExtension"


def _refused(engine: Engine) -> int:
    return engine.log.read_text(errors="replace").count("not usable")


def why(error: EngineError) -> str:
    """Return what an engine died of, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "no reason given"
    causes = [line for line in lines if "Error" in line and not line.startswith(("File", "raise"))]
    return (causes[-1] if causes else first)[-200:]
