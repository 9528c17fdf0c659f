"""Tries mutants of one module: each in a forked process in which the tests that run its line are run until one fails.

Most mutants differ within functions. For these a process imports and collects all once, learns which test runs which
lines, and forks: the child replaces the code of the functions that differ, and runs tests, the fastest first. What
takes effect at import is tried in a process that imports the module's changed source, and collects anew. The first
test that fails, or takes much longer than it should, ends the process; tearing down gets a moment, for it may hang.
Threading: one thread. No process is left behind.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import random
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import coverage
import pytest
from hypothesis import settings

from tests.prove.mutants.changes import Change, changes_of

ROOT = Path(__file__).parents[3]
_MEMORY_BYTES = 16 << 30
_FILE_BYTES = 16 << 30
_GRACE_S = 3.0
_SLOWER = 4.0
"""A test that has not ended within so many times what it takes without the mutant has noticed it."""
_TEARDOWN_S = 0.5
"""For files outside of the cell's directory to be removed, after a test that fails."""
_IMPORTED_SHARE = 10
"""One mutant in so many differs at import: these take a hundred times as long to try."""
_LIVES, _UNFIT = 0, 3
_NO_TESTS = 5


@dataclass(slots=True)
class Verdicts:
    """What became of the mutants of a module."""

    killed: int = 0
    spared: int = 0
    """Drawn, but may live."""
    survivors: list[Change] = field(default_factory=list)
    """Which no test has noticed."""
    broken: list[str] = field(default_factory=list)
    """Tests that fail without any mutant, and so say nothing."""


@dataclass(slots=True)
class _Test:
    """What was learnt of one without a mutant."""

    index: int
    name: str
    seconds: float
    passed: bool
    lines: frozenset[int]


def sample(module: str, count: int, seed: int) -> tuple[list[Change], ast.Module]:
    """Return ``count`` changes of a module (all, if there are no more), and the tree that they are in."""
    source = (ROOT / module).read_text()
    tree = ast.parse(source)
    changes = changes_of(tree, source.splitlines())
    drawn = random.Random(f"{module} {seed}").sample(changes, len(changes))
    at_import = [change for change in drawn if not change.in_function][: max(1, count // _IMPORTED_SHARE)]
    chosen = [change for change in drawn if change.in_function][: count - len(at_import)] + at_import
    return chosen, tree


def try_mutants(
    module: str, guards: Sequence[str], count: int, seed: int, may_live: Collection[tuple[str, str]] = ()
) -> Verdicts:
    """Draw ``count`` mutants of ``module``, a path from the root of the repository, and try them with ``guards``.

    Those in ``may_live`` (text of the line, change) are not tried: who lives takes the longest.
    """
    assert not any(name.startswith("nixl_offload") for name in sys.modules), "they are to be imported changed"
    settings.register_profile("mutants", derandomize=True, database=None, deadline=None, print_blob=False)
    settings.load_profile("mutants")
    drawn, tree = sample(module, count, seed)
    changes = [change for change in drawn if (change.text, change.what) not in may_live]
    verdicts = Verdicts(spared=len(drawn) - len(changes))
    warm = [change for change in changes if change.in_function]
    ended = _in_child(lambda: _Warm(module, tree, warm).run(guards), None)
    if ended is None or isinstance(ended, int):
        raise RuntimeError(f"the tests of {module} do not run: {ended}")
    tests, fates, collected_s = ended
    verdicts.broken = [test.name for test in tests if not test.passed]
    if len(verdicts.broken) == len(tests):
        raise RuntimeError(f"no test of {module} passes")
    cold = [change for change in changes if not change.in_function] + [
        change for change, fate in zip(warm, fates, strict=True) if fate is None
    ]
    judged = [(change, fate) for change, fate in zip(warm, fates, strict=True) if fate is not None]
    judged += [(change, _try_import(module, tree, change, guards, tests, collected_s)) for change in cold]
    for change, fate in judged:
        if fate == "killed":
            verdicts.killed += 1
        else:
            verdicts.survivors.append(change)
    return verdicts


class _Trial:
    """A pytest session that tries one mutant. A plugin, in a process of its own."""

    def __init__(self, tests: Sequence[_Test]) -> None:
        self._seconds = {test.name: test.seconds for test in tests if test.passed}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what fails without a mutant; the fastest first."""
        items[:] = sorted((item for item in items if item.nodeid in self._seconds), key=self._seconds_of)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._setups = item.session._setupstate
        faulthandler.dump_traceback_later(_GRACE_S + _SLOWER * self._seconds_of(item), exit=True)
        result = yield
        faulthandler.cancel_dump_traceback_later()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            faulthandler.dump_traceback_later(_TEARDOWN_S, exit=True)
            try:
                self._setups.teardown_exact(None)
            finally:
                os._exit(1)

    def _seconds_of(self, item: pytest.Item) -> float:
        return self._seconds[item.nodeid]


class _Warm:
    """A pytest session in which mutants are tried instead of tests run. A plugin."""

    def __init__(self, module: str, tree: ast.Module, changes: Sequence[Change]) -> None:
        self._file = str(ROOT / module)
        self._module = module.removesuffix(".py").replace("/", ".")
        self._tree = tree
        self._changes = changes
        self._failed = False
        self._fates: list[str | None] = []
        self._tests: list[_Test] = []
        self._collected_s = 0.0

    def run(self, guards: Sequence[str]) -> tuple[list[_Test], list[str | None], float] | int:
        """Return the tests, what became of each change (None: not tried), and the seconds until tests could run.

        Instead: pytest's exit status, when it did not get that far.
        """
        self._collected_s = -time.monotonic()
        importlib.import_module(self._module)
        code = _pytest(guards, [self])
        return (self._tests, self._fates, self._collected_s) if code == 0 else code

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests cannot be collected")
        self._collected_s += time.monotonic()
        self._tests = _in_child(lambda: self._learn(session.items), None)
        functions = _functions_of(self._file)
        before = _codes(compile(self._tree, self._file, "exec", dont_inherit=True))
        for change in self._changes:
            self._fates.append(self._try(change, session, functions, before))
        return True

    def _learn(self, items: Sequence[pytest.Item]) -> list[_Test]:
        """Run each test, and take down how long it takes and which lines of the module it runs."""
        measured = coverage.Coverage(data_file=None, include=[self._file], config_file=False, concurrency="thread")
        measured.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "already-imported"])
        found = []
        with measured.collect():
            for index, (item, following) in enumerate(zip(items, [*items[1:], None], strict=True)):
                measured.switch_context(f"test {index}")
                self._failed, begun_s = False, time.monotonic()
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
                found.append(_Test(index, item.nodeid, time.monotonic() - begun_s, not self._failed, frozenset()))
        by_line = measured.get_data().contexts_by_lineno(self._file)
        for test in found:
            test.lines = frozenset(line for line, contexts in by_line.items() if f"test {test.index}" in contexts)
        return found

    def _try(
        self,
        change: Change,
        session: pytest.Session,
        functions: dict[tuple[str, int], list[FunctionType]],
        before: dict[tuple[str, int], CodeType],
    ) -> str | None:
        """Return "killed" or "lives"; None: it cannot be tried so."""
        touched = range(change.line, change.last_line + 1)
        chosen = [test for test in self._tests if test.passed and not test.lines.isdisjoint(touched)]
        if not chosen:
            return None  # no test runs it: perhaps the import does, as it does an Enum's __init__
        with change.made():
            after = _codes(compile(self._tree, self._file, "exec", dont_inherit=True))
        differing = [key for key in before if before[key] != after.get(key)]
        # The outermost function that differs brings those within it along.
        replaced = [(function, after[key]) for key in differing for function in functions.get(key, ()) if key in after]
        if not replaced:
            return None

        def run() -> int:
            try:
                for function, code in replaced:
                    function.__code__ = code
            except ValueError:  # another number of free variables
                return _UNFIT
            trial = _Trial(chosen)
            trial.pytest_collection_modifyitems(session.items)
            session.config.pluginmanager.register(trial)
            for item, following in zip(session.items, [*session.items[1:], None], strict=True):
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            return _LIVES

        fate = _in_child(run, _GRACE_S + _SLOWER * sum(test.seconds for test in chosen))
        return None if fate == _UNFIT else "lives" if fate == _LIVES else "killed"


class _Changed(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds one module, and gives it code that was compiled from a changed tree."""

    def __init__(self, module: str, code: CodeType) -> None:
        super().__init__(module.removesuffix(".py").removesuffix("/__init__").replace("/", "."), str(ROOT / module))
        self._code = code

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:  # type: ignore[override]
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return self._code


def _try_import(
    module: str, tree: ast.Module, change: Change, guards: Sequence[str], tests: Sequence[_Test], collected_s: float
) -> str:
    """Import the module with the change, and run all its tests until one fails. Return "killed" or "lives"."""
    with change.made():
        code = compile(tree, str(ROOT / module), "exec", dont_inherit=True)

    def run() -> int:
        sys.meta_path.insert(0, _Changed(module, code))
        return int(_pytest(guards, [_Trial(tests)]))

    fate = _in_child(run, _GRACE_S + _SLOWER * (collected_s + sum(test.seconds for test in tests)))
    if fate == _NO_TESTS:
        raise RuntimeError(f"no tests are left of {guards}")
    return "lives" if fate == _LIVES else "killed"


def _pytest(words: Sequence[str], plugins: list[object]) -> int:
    files = [str(ROOT / word) if word.startswith("tests/") else word for word in words]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long", f"--rootdir={ROOT}", "--tb=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of hypothesis, which is imported already
    return int(pytest.main([*files, "-c", str(ROOT / "pyproject.toml"), *options], plugins=plugins))


def _in_child(call: Callable[[], Any], limit_s: float | None) -> Any:
    """Return what ``call`` returns in a forked process; None: it raised, died, or took longer than ``limit_s``."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reading)
            os.setpgid(0, 0)
            # Also of those without a mutant: what does not pass within these limits must not count as noticing one.
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
            answer = pickle.dumps(call())
            with os.fdopen(writing, "wb") as out:
                out.write(answer)
            code = 0
        except BaseException:  # noqa: BLE001 - this process must not go on as if it were its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    answer = b"".join(_received(reading, None if limit_s is None else time.monotonic() + limit_s))
    _end(child)
    return pickle.loads(answer) if answer.endswith(pickle.STOP) else None


def _received(pipe: int, until_s: float | None) -> Iterator[bytes]:
    with os.fdopen(pipe, "rb", buffering=0) as answers:
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not select.select([answers], [], [], left_s)[0]:
                return
            some = answers.read(1 << 20)
            if not some:
                return
            yield some


def _end(child: int) -> None:
    for target in (os.killpg, os.kill):
        try:
            target(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os.waitpid(child, 0)


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Return the code of all functions, by qualified name and first line; of two at one place neither."""
    found: dict[tuple[str, int], CodeType] = {}
    twice = set()
    waiting = [code]
    while waiting:
        for inner in waiting.pop().co_consts:
            if isinstance(inner, CodeType):
                key = (inner.co_qualname, inner.co_firstlineno)
                if key in found:
                    twice.add(key)
                found[key] = inner
                waiting.append(inner)
    return {key: inner for key, inner in found.items() if key not in twice}


def _functions_of(file: str) -> dict[tuple[str, int], list[FunctionType]]:
    """Return the functions that there are of a module's file."""
    found: dict[tuple[str, int], list[FunctionType]] = {}
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename == file:
            code = function.__code__
            found.setdefault((code.co_qualname, code.co_firstlineno), []).append(function)
    return found
