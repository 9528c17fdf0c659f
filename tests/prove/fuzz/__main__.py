"""``python -m tests.prove.fuzz TARGET``: fuzz it by atheris; with files behind it, give it these inputs alone.

Threading: one thread. What is found is written to ``--found``, a JSON line each, as it is found: libFuzzer ends the
process without coming back.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import resource
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from tests.prove.fuzz.target import One, kind_of, told

MEMORY_BYTES = 4 << 30
"""What an input may have the process allocate, together with all that it has imported."""
_FOUND_MOST = 10
_TREES = 0.7
"""Share of changes that ``Target.mutate`` makes."""


def main() -> int:
    """Run a target."""
    parsing = argparse.ArgumentParser(prog="python -m tests.prove.fuzz", description=__doc__)
    parsing.add_argument("target")
    parsing.add_argument("inputs", nargs="*", type=Path)
    parsing.add_argument("--seed", type=int, default=1)
    parsing.add_argument("--runs", type=int)
    parsing.add_argument("--seconds", type=int, default=600, help="end then, however many runs are left")
    parsing.add_argument("--found", type=Path, default=Path("found.jsonl"))
    parsing.add_argument("--scratch", type=Path, default=Path("scratch"))
    parsing.add_argument("--corpus", type=Path, help="keep inputs that reach something new here")
    chosen = parsing.parse_args()
    chosen.scratch, chosen.found = chosen.scratch.absolute(), chosen.found.absolute()  # a target may go elsewhere
    chosen.corpus = (chosen.corpus or chosen.scratch / "corpus").absolute()
    chosen.scratch.mkdir(parents=True, exist_ok=True)
    if chosen.inputs:
        from tests.prove.fuzz.targets import TARGETS

        inputs = [file.read_bytes() for file in chosen.inputs]  # a target may go elsewhere
        one = TARGETS[chosen.target].begin(chosen.scratch)
        for data in inputs:
            one(data)
        return 0
    return _fuzz(chosen)


def _fuzz(chosen: argparse.Namespace) -> int:
    import atheris

    # Branches of the package lead the way, and those of the reader of YAML.
    with atheris.instrument_imports(include=["nixl_offload", "yaml"]):
        from tests.prove.fuzz.targets import TARGETS
    target = TARGETS[chosen.target]
    one = target.begin(chosen.scratch)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    corpus: Path = chosen.corpus
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate([*target.seeds(), *(file.read_bytes() for file in target.corpus())]):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = chosen.scratch / "words"
    escaped = ("".join(map(r"\x{:02x}".format, word)) for word in target.words)
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    options = [
        f"-seed={chosen.seed}", f"-runs={chosen.runs or target.runs}", f"-max_total_time={chosen.seconds}",
        f"-max_len={target.max_bytes}", f"-timeout={target.input_s}", "-rss_limit_mb=3072", "-print_final_stats=1",
        f"-artifact_prefix={chosen.scratch}/", "-verbosity=1", "-len_control=0",
    ]  # fmt: skip
    options += [f"-dict={words}"] if target.words else []
    change = target.mutate

    def mutate(data: bytes, most: int, number: int) -> bytes:
        chance = random.Random(number)
        changed = change(data, chance) if change is not None and chance.random() < _TREES else None
        return atheris.Mutate(data, most) if changed is None or len(changed) > most else changed

    extra = {} if change is None else {"custom_mutator": mutate}
    atheris.Setup([sys.argv[0], *options, str(corpus)], _noting(one, chosen.found), **extra)
    atheris.Fuzz()
    return 0


def _noting(one: One, found: Path) -> One:
    """Return what gives inputs to a target and writes down what is found, each place in the code once."""
    places = set()

    def noting(data: bytes) -> None:
        try:
            one(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            place = _place_of(error)
            if place in places or len(places) >= _FOUND_MOST:
                return
            places.add(place)
            with found.open("a") as file:
                json.dump(
                    {"kind": kind_of(error), "error": told(error), "input": base64.b64encode(data).decode()}, file
                )
                file.write("\n")

    return noting


def _place_of(error: Exception) -> Iterable[object]:
    frames = traceback.extract_tb(error.__traceback__)
    return (type(error), *((frame.filename, frame.lineno) for frame in frames[-2:]))


if __name__ == "__main__":
    sys.exit(main())
