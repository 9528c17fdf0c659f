"""Fuzzing: bytes that others wrote, given to all that reads them, by the tests in ``TESTS``.

Hypothesis draws the inputs; the same tests try some in ``make test``. In the proof atheris steers what is drawn towards
branches that were not taken yet, in a process of its own for each test, for libFuzzer ends the process that it runs
in. It goes on from what reached something new in an earlier run, in ``build/prove/corpus``. What finds something is
tried again by pytest, which shows the smallest such input: keep that in ``tests/fixtures/fuzz``.

Threading: one thread.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from hypothesis import example, given, settings, strategies as st

from tests.prove.cells import ROOT, Cell, Outcome

TESTS: Final = {
    "storage": ("header", "index", "manifest"),
    "texts": ("config", "hints"),
    "answers": ("what_an_s3_server_answers",),
}
"""By module, ``tests/unit/test_fuzzed_*.py``: its tests of drawn inputs."""
CORPUS: Final = ROOT / "tests" / "fixtures" / "fuzz"
"""A directory for each kind of bytes: inputs that once reached something new, or found something."""
SECONDS: Final = 60
INPUT_S: Final = 30
"""Longer than that for one input is a finding."""
MEMORY_BYTES: Final = 4 << 30
"""What an input may have the process allocate, together with all that it has imported."""
_RUNS: Final = re.compile(r"stat::number_of_executed_units: +(\d+)")


# What is drawn.


def fuzzed(kind: str, seeds: Sequence[bytes], changes: st.SearchStrategy[bytes]) -> Any:
    """Return a decorator that gives a test ``seeds``, what is kept of this ``kind``, and ``changes`` as ``data``."""

    def decorate(test: Any) -> Any:
        for data in [*seeds, *kept(kind)]:
            test = example(data=data)(test)
        return settings(max_examples=200)(given(data=changes)(test))

    return decorate


def kept(kind: str) -> list[bytes]:
    """Return the inputs in ``CORPUS``."""
    return [file.read_bytes() for file in sorted((CORPUS / kind).glob("*"))]


@st.composite
def changed(draw: st.DrawFn, originals: Sequence[bytes], words: Sequence[bytes] = (), most: int = 1500) -> bytes:
    """Return one of some inputs with a few bytes or words put in, changed or taken out."""
    data, put = bytearray(draw(st.sampled_from(originals))), st.binary(max_size=8)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 8))] = draw(st.sampled_from(words) | put if words else put)
    return bytes(data[:most])


_RAW: Final = "\x01"
"""Around a value that stands for itself, in YAML that is not JSON."""
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 16, 4096, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e300, float("nan")),
    *(float("inf"), "", "x", "auto", "\0", "\ud800", "é" * 40, "1GiB", "7d", "0s", "-1B", "/x", "../x", "~/x", "\n"),
    *([], {}, [[]], [{}], {"": 0}, [None], [1, 2], {"kind": []}, ["a", "a"], "9" * 5000),
)
_YAML: Final = (
    "!!bool x", "!!int ''", "!!float ''", "!!timestamp x", "!!binary x", "!!set {a, b}", "!!omap [a: 1]", "=", "<<",
    "!!pairs [a: 1]", "!!null x", "2026-11-23", "2026-13-45", "1:30", "0x_", "0o7", ".nan", "&a b", "*a", "~", "1_0",
    "!!python/name:os.system x", "!x y", "{a: 1, a: 2}", "{<<: {a: 1}}", "{1: 2}", "{[a]: 2}", "@", "`", "|\n x",
)  # fmt: skip


@st.composite
def trees(draw: st.DrawFn, documents: Sequence[bytes], words: Sequence[str] = (), *, yaml: bool = False) -> bytes:
    """Return a JSON document with one to three places changed: another value, one less, one twice, one in another.

    ``words``: values and names to put in, besides all sorts. ``yaml``: some places hold what JSON has not.
    """
    root, raw = [json.loads(draw(st.sampled_from(documents)))], [f"{_RAW}{text}{_RAW}" for text in _YAML]
    values = st.sampled_from([*_VALUES, *words, *(raw if yaml else ())])
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(root))
        (owner, key), (other, name) = draw(st.sampled_from(places)), draw(st.sampled_from(places))
        how, value, copied = draw(st.integers(0, 5)), draw(values), copy.deepcopy(other[name])
        if how == 0 and owner is not root:
            del owner[key]
        elif how == 1:
            owner[key] = draw(st.sampled_from([[owner[key]], {"kind": owner[key]}]))
        elif how == 2:
            owner[key] = copied
        elif how == 3 and isinstance(owner[key], dict):
            owner[key][draw(st.sampled_from(words or ["x"]))] = copy.deepcopy(value)
        elif how == 4 and isinstance(owner[key], list):
            owner[key].append(copied)
        else:
            owner[key] = copy.deepcopy(value)
    mark = json.dumps(_RAW)[1:-1]
    return json.dumps(root[0]).replace(f'"{mark}', "").replace(f'{mark}"', "").encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of all values within one."""
    items = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


# The part of the proof.


def cells(seed: int) -> Iterator[Cell]:
    """Yield a cell for each test."""
    for module, names in TESTS.items():
        for name in names:
            yield Cell(f"{module}/{name}", partial(fuzz, module, name, seed), limit_s=2.0 * SECONDS + 120)


def fuzz(module: str, name: str, seed: int) -> Outcome:
    """Fuzz a test in a process of its own, in the current directory, until the first finding."""
    command = [sys.executable, "-W", "ignore", "-m", __name__, module, name, str(seed)]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    print(ended.stdout, ended.stderr)
    runs = _RUNS.search(ended.stderr)
    outcome = Outcome(counts={"inputs": int(runs[1]) if runs else 0})
    if ended.returncode or runs is None:
        # Hypothesis has kept what failed in the current directory, and makes it smaller.
        test = f"{ROOT}/tests/unit/test_fuzzed_{module}.py::test_{name}"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", test]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        print(shown)
        falsified = " ".join(line[4:300] for line in shown.splitlines() if line.startswith("E "))[:2000]
        outcome.wrong.append(f"ended with {ended.returncode}: {falsified or ended.stderr[-1000:]}")
    return outcome


def main(module: str, name: str, seed: str) -> None:
    """Fuzz, and never return: libFuzzer ends the process."""
    import atheris

    # Branches of the package lead the way, and those of the reader of YAML.
    with atheris.instrument_imports(include=["nixl_offload", "yaml"]):
        tests = importlib.import_module(f"tests.unit.test_fuzzed_{module}")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    corpus = ROOT / "build" / "prove" / "corpus" / f"{module}-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    options = {
        "seed": seed,
        "max_total_time": SECONDS,
        "timeout": INPUT_S,
        "rss_limit_mb": 3072,
        "print_final_stats": 1,
    }
    arguments = [sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), str(corpus)]
    atheris.Setup(arguments, getattr(tests, f"test_{name}").hypothesis.fuzz_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
