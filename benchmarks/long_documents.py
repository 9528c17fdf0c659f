"""Long documents, each asked about several times: what every way of keeping KV makes of it, on a real vLLM.

``python -m benchmarks.long_documents [--json] [--quick] [--plot FILE] [--rounds N] [--only NAME,NAME] [--dir DIR]``.
Three working sets: documents that fit the GPU's KV cache, more than that, and more than the memory tier holds. First
each document is asked about once, then in every round once more, with another question, in an order of the round's own.
One request at a time; the contenders take turns at every request, in rotating order, so a noisy machine is equally
unkind to all. Every answer is compared with the one of the engine that caches nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from tqdm import tqdm

from benchmarks.long_documents_report import TOLERANCE, Result, about, difference, hits, problems, table
from benchmarks.long_documents_sides import NOTES, QUESTION_TOKENS, STEP_TOKENS, Contender, Sizes, start
from examples.demo import terminal
from examples.demo.engine import Answer
from examples.demo.model import DEMO, random_prompts, write_model

REFERENCE = "none"
GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """How much is asked."""

    steps: int = 4
    """Prefill steps per document."""
    answer_tokens: int = 4
    rounds: int = 3
    gpu_documents: int = 2
    memory_documents: int = 5
    sets: tuple[int, int, int] = (2, 4, 7)
    """Documents: fewer than fit the GPU, fewer than fit the memory tier, and more."""


QUICK = Plan(steps=2, rounds=1, gpu_documents=1, memory_documents=2, sets=(1, 2, 3))


@dataclass(frozen=True)
class Asked:
    """One answered request."""

    answer: Answer
    busy_s: float
    """Until the engine was at rest again: the answer, and what it wrote behind it."""


class Bench:
    """Asks all contenders the same, one request after the other."""

    def __init__(self, plan: Plan, sizes: Sizes, progress: Progress) -> None:
        self._plan, self._sizes, self._progress = plan, sizes, progress
        self._reference: dict[int, list[list[Answer]]] = {}
        """By working set and round. The first contenders that run leave it to those that run after them."""

    def run(self, contenders: Sequence[Contender]) -> list[Result]:
        """Measure all working sets. Raises EngineError when an engine fails."""
        warm_up = random_prompts(self._sizes.shape, [self._sizes.document_tokens], seed=99)
        for contender in contenders:
            contender.engine.generate(warm_up, max_tokens=1, timeout_s=600)
            contender.forget()
        results = []
        for documents in self._plan.sets:
            rounds = self._ask(contenders, documents)
            if documents not in self._reference:
                self._reference[documents] = [[asked.answer for asked in turn] for turn in rounds[contenders[0].name]]
            results += [self._result(documents, name, asked) for name, asked in rounds.items()]
            for contender in contenders:
                contender.forget()
        return results

    def _ask(self, contenders: Sequence[Contender], documents: int) -> dict[str, list[list[Asked]]]:
        """By contender, a list for each round, the first requests first."""
        rounds: dict[str, list[list[Asked]]] = {contender.name: [] for contender in contenders}
        turn = 0
        for number, prompts in enumerate(self._rounds(documents)):
            for turns in rounds.values():
                turns.append([])
            for prompt in prompts:
                begin = turn % len(contenders)
                for contender in (*contenders[begin:], *contenders[:begin]):
                    rounds[contender.name][-1].append(self._request(contender, prompt))
                    self._progress.advance(f"working set {documents}, round {number}: {contender.name}")
                turn += 1
            means = {
                name: statistics.fmean(asked.answer.ttft_s for asked in turns[-1]) for name, turns in rounds.items()
            }
            self._progress.say(
                f"working set {documents}, {f'round {number}' if number else 'first requests'}, mean TTFT: "
                + ", ".join(f"{name} {mean_s * 1e3:.0f} ms" for name, mean_s in means.items())
            )
        return rounds

    def _rounds(self, documents: int) -> Iterator[list[list[int]]]:
        """The prompts of each round, in its order."""
        shape, source = self._sizes.shape, random.Random(documents)
        texts = random_prompts(shape, [self._sizes.document_tokens] * documents, seed=100 + documents)
        for number in range(self._plan.rounds + 1):
            questions = random_prompts(shape, [QUESTION_TOKENS] * documents, seed=1000 * documents + number)
            prompts = [text + question for text, question in zip(texts, questions, strict=True)]
            source.shuffle(prompts)
            yield prompts

    def _request(self, contender: Contender, prompt: list[int]) -> Asked:
        [answer] = contender.engine.generate([prompt], max_tokens=self._sizes.answer_tokens, timeout_s=600)
        begin = time.perf_counter()
        contender.engine.settle()
        return Asked(answer, answer.total_s + time.perf_counter() - begin)

    def _result(self, documents: int, name: str, rounds: list[list[Asked]]) -> Result:
        first, repeats = rounds[0], rounds[1:]
        repeated = [asked for turn in repeats for asked in turn]
        ttfts = [asked.answer.ttft_s for asked in repeated]
        prompt_tokens = self._sizes.document_tokens + QUESTION_TOKENS
        per_s = statistics.median(len(turn) / sum(asked.busy_s for asked in turn) for turn in repeats)
        pairs = [
            (asked.answer, right)
            for turn, answers in zip(rounds, self._reference[documents], strict=True)
            for asked, right in zip(turn, answers, strict=True)
        ]
        differences = [difference(answer, right) for answer, right in pairs]
        tolerance = TOLERANCE[self._sizes.dtype]
        return Result(
            documents=documents,
            contender=name,
            first_ttft_mean_s=statistics.fmean(asked.answer.ttft_s for asked in first),
            ttft_mean_s=statistics.median(statistics.fmean(asked.answer.ttft_s for asked in turn) for turn in repeats),
            ttft_p50_s=statistics.median(ttfts),
            ttft_p99_s=float(np.percentile(ttfts, 99)),
            requests_per_s=per_s,
            prompt_tokens_per_s=per_s * prompt_tokens,
            hits=hits([asked.answer for asked in repeated], prompt_tokens),
            requests=len(pairs),
            same_answers=sum(found is not None and found <= tolerance for found in differences),
            logprob_difference=max((found for found in differences if found is not None), default=0.0),
            ttft_s=tuple(tuple(asked.answer.ttft_s for asked in turn) for turn in rounds),
        )


class Progress:
    """A bar on a terminal, lines in a log."""

    def __init__(self, total: int) -> None:
        self._line = terminal.start()
        self._bar = tqdm(total=total, unit="request", dynamic_ncols=True) if sys.stderr.isatty() else None

    def advance(self, words: str) -> None:
        if self._bar is not None:
            self._bar.set_description(words)
            self._bar.update()

    def say(self, words: str) -> None:
        with tqdm.external_write_mode(sys.stderr):
            self._line(words)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def waves(names: Sequence[str], sizes: Sizes) -> list[list[str]]:
    """Deal the contenders out to groups whose engines fit this machine's free memory side by side."""
    free = available_bytes() - GIB
    groups: list[list[str]] = []
    left = 0
    for name in names:
        left -= sizes.engine_bytes(name)
        if left < 0 or not groups:
            groups.append([])
            left = free - sizes.engine_bytes(name)
        groups[-1].append(name)
    return groups


def available_bytes() -> int:
    """Free memory, as Linux estimates it."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


def measure(
    plan: Plan, only: Sequence[str], directory: Path | None
) -> tuple[dict[str, str], dict[str, str], list[Result]]:
    """Run everything. Returns what it ran on, who could not run and why, and the results by working set."""
    import torch

    sizes = Sizes(
        shape=DEMO,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        document_tokens=plan.steps * STEP_TOKENS,
        answer_tokens=plan.answer_tokens,
        gpu_documents=plan.gpu_documents,
        memory_documents=plan.memory_documents,
        file_documents=sum(plan.sets) + 1,
    )
    requests = sum(plan.sets) * (plan.rounds + 1) * len(only)
    progress = Progress(requests)
    everybody_absent: dict[str, str] = {}
    words: dict[str, str] = {}
    results: list[Result] = []
    bench = Bench(plan, sizes, progress)
    with contextlib.ExitStack() as stack:
        stack.callback(progress.close)
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="nixl-offload-", ignore_cleanup_errors=True))
        )
        kv = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-", dir=directory)))
        model = write_model(scratch / "model", sizes.shape)
        for names in waves(only, sizes):
            progress.say(f"starting {len(names)} engines: {', '.join(names)}")
            with start(names, sizes, model, scratch, kv) as (contenders, absent):
                everybody_absent.update(absent)
                if contenders:
                    words = words or about(sizes, plan.rounds, contenders[0].engine.about)
                    results += bench.run(contenders)
    results.sort(key=lambda result: result.documents)
    return words, everybody_absent, results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_documents", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--quick", action="store_true", help="short documents, a third as many, one round")
    parser.add_argument("--rounds", type=int, help="how often each document is asked about after the first time")
    parser.add_argument("--only", help=f"some of: {', '.join(NOTES)}; by commas, {REFERENCE!r} is always there")
    parser.add_argument("--dir", type=Path, help="where the files of KV lie (default: TMPDIR)")
    parser.add_argument("--plot", type=Path, help="draw TTFT and hit rates to this PNG file")
    chosen = parser.parse_args(arguments)
    plan = QUICK if chosen.quick else Plan()
    if chosen.rounds is not None:
        plan = Plan(**{**asdict(plan), "rounds": chosen.rounds})
    only = [name for name in NOTES if not chosen.only or name == REFERENCE or name in chosen.only.split(",")]
    if plan.rounds < 1 or (chosen.only and len(only) != len({REFERENCE, *chosen.only.split(",")})):
        parser.error("--rounds must be at least 1, and --only name contenders")
    words, absent, results = terminal.attempt(lambda: measure(plan, only, chosen.dir))
    found = problems(results)
    if chosen.plot is not None:
        from benchmarks.long_documents_plot import draw

        draw(results, words, chosen.plot)
    if chosen.json:
        shown = {"ok": not found, "about": words, "absent": absent, "results": [asdict(result) for result in results]}
        print(json.dumps(shown, indent=1))
    else:
        out = Console(width=None if sys.stdout.isatty() else 150)
        for what, sentence in words.items():
            out.print(f"{what}: {sentence}", highlight=False)
        out.print(table(results))
        for name, reason in absent.items():
            out.print(f"{name} ({NOTES[name]}) cannot run here: {reason}", highlight=False)
    for sentence in found:
        print(f"WRONG: {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
