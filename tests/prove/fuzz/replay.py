"""Gives targets what was kept, and seeded changes of it: the part of fuzzing that takes seconds and needs no atheris.

``python -m tests.prove.fuzz.replay [TARGET ...]``: a process of its own, for targets change what a process has.
Threading: one thread.
"""

from __future__ import annotations

import base64
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.prove.fuzz.target import Target, told
from tests.prove.fuzz.targets import TARGETS

_CHANGES = 200
_FEWER = {"stored/index": 3, "answers/bucket": 10, "answers/obstore": 20, "texts/command_line": 20, "texts/config": 50}


def main(names: Sequence[str]) -> int:
    """Replay some targets or all; print what is found. Returns 1 when something was."""
    found = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in names or TARGETS:
            directory = Path(scratch, name.replace("/", "-"))
            directory.mkdir()
            os.chdir(directory)
            found += _replay(TARGETS[name], directory)
        os.chdir("/")
    sys.stdout.flush()
    os._exit(min(found, 1))  # a server of a target's still listens


def _replay(target: Target, scratch: Path) -> int:
    """Return how many inputs found something."""
    chance, found = random.Random(target.name), 0
    kept = [*target.seeds(), *(file.read_bytes() for file in target.corpus())]
    one = target.begin(scratch)
    changes = [changed(chance.choice(kept), target, chance) for _ in range(_FEWER.get(target.name, _CHANGES))]
    for data in [*kept, *changes]:
        try:
            one(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            found += 1
            print(f"{target.name}: {told(error)}; input (base64): {base64.b64encode(data).decode()}")
    print(f"{target.name}: {len(kept)} kept inputs, {len(changes)} changes of them")
    return found


def changed(data: bytes, target: Target, chance: random.Random) -> bytes:
    """Return an input with a few bytes, words or values changed."""
    if target.mutate is not None and (other := target.mutate(data, chance)) is not None:
        return other[: target.max_bytes]
    edited = bytearray(data or b"\0")
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(edited) + 1)
        put = chance.choice([*target.words, chance.randbytes(chance.randint(0, 4))])
        edited[at : at + chance.randint(0, 4)] = put
    return bytes(edited[: target.max_bytes])


if __name__ == "__main__":
    main(sys.argv[1:])
