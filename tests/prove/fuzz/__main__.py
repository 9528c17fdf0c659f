"""``python -m tests.prove.fuzz TARGET``: fuzz it by atheris; with files behind it, give it these inputs alone.

``python -m tests.prove.fuzz --replay``: give all targets what was kept and seeded changes of it, which takes seconds
and needs no atheris. In a process of its own: targets change what a process has. Threading: one thread.
"""

from __future__ import annotations

import argparse
import base64
import os
import random
import resource
import sys
import traceback
from pathlib import Path
from typing import Final

from tests.prove.fuzz import Target, targets

MEMORY_BYTES: Final = 4 << 30
"""What an input may have the process allocate, together with all that it has imported."""
_TREES: Final = 0.7
"""Share of changes that ``Target.mutate`` makes."""
_CHANGES: Final = 200
_FEWER: Final = {"stored/index": 3, "answers/bucket": 10, "answers/obstore": 20, "texts/config": 50}
"""Changes in a replay, where an input takes long."""


def main() -> int:
    """Run a target, or replay all."""
    parsing = argparse.ArgumentParser(prog="python -m tests.prove.fuzz", description=__doc__)
    parsing.add_argument("target", nargs="?")
    parsing.add_argument("inputs", nargs="*", type=Path)
    parsing.add_argument("--replay", action="store_true")
    parsing.add_argument("--seed", type=int, default=1)
    parsing.add_argument("--seconds", type=int, default=600, help="end then, however many runs are left")
    parsing.add_argument("--scratch", type=Path, default=Path("scratch"))
    parsing.add_argument(
        "--corpus", type=Path, default=Path("corpus"), help="keep inputs that reach something new here"
    )
    chosen = parsing.parse_args()
    chosen.scratch, chosen.corpus = chosen.scratch.absolute(), chosen.corpus.absolute()  # a target may go elsewhere
    inputs = [file.read_bytes() for file in chosen.inputs]
    chosen.scratch.mkdir(parents=True, exist_ok=True)
    if chosen.replay:
        found = sum(_replay(target, chosen.scratch) for target in targets().values())
        sys.stdout.flush()
        os._exit(min(found, 1))  # a server of a target's still listens
    if not inputs:
        _fuzz(chosen)
    one = targets()[chosen.target].begin(chosen.scratch)
    for data in inputs:
        one(data)
    return 0


def _replay(target: Target, scratch: Path) -> int:
    """Return how many inputs found something."""
    directory = scratch / target.directory
    directory.mkdir()
    os.chdir(directory)
    chance, found = random.Random(target.name), 0
    kept = target.kept()
    one = target.begin(directory)
    changes = [_changed(chance.choice(kept), target, chance) for _ in range(_FEWER.get(target.name, _CHANGES))]
    for data in [*kept, *changes]:
        try:
            one(data)
        except Exception:  # noqa: BLE001 - anything is a finding
            found += 1
            error = traceback.format_exc(limit=-3)
            print(f"{target.name}: {error}; input (base64): {base64.b64encode(data).decode()}")
    print(f"{target.name}: {len(kept)} kept inputs, {len(changes)} changes of them")
    return found


def _changed(data: bytes, target: Target, chance: random.Random) -> bytes:
    """Return an input with a few bytes, words or values changed."""
    if target.mutate is not None and (other := target.mutate(data, chance)) is not None:
        return other[: target.max_bytes]
    edited = bytearray(data or b"\0")
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(edited) + 1)
        put = chance.choice([*target.words, chance.randbytes(chance.randint(0, 4))])
        edited[at : at + chance.randint(0, 4)] = put
    return bytes(edited[: target.max_bytes])


def _fuzz(chosen: argparse.Namespace) -> None:
    """Fuzz, and never return: libFuzzer ends the process."""
    import atheris

    # Branches of the package lead the way, and those of the reader of YAML.
    with atheris.instrument_imports(include=["nixl_offload", "yaml"]):
        target = targets()[chosen.target]
    one = target.begin(chosen.scratch)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    corpus: Path = chosen.corpus
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.kept()):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = chosen.scratch / "words"
    escaped = ("".join(map(r"\x{:02x}".format, word)) for word in target.words)
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    options = {
        "seed": chosen.seed,
        "runs": target.runs,
        "max_total_time": chosen.seconds,
        "max_len": target.max_bytes,
        "timeout": target.input_s,
        "rss_limit_mb": 3072,
        "print_final_stats": 1,
        "artifact_prefix": f"{chosen.scratch}/",
        "verbosity": 1,
        "len_control": 0,
        **({"dict": words} if target.words else {}),
    }
    change = target.mutate

    def mutate(data: bytes, most: int, number: int) -> bytes:
        chance = random.Random(number)
        changed = change(data, chance) if change is not None and chance.random() < _TREES else None
        return atheris.Mutate(data, most) if changed is None or len(changed) > most else changed

    arguments = [sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), str(corpus)]
    atheris.Setup(arguments, one, **({} if change is None else {"custom_mutator": mutate}))
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
