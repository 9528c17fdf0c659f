"""The proof's mutants in seconds: what can differ in a module, that a mutant lives for one test and not for another,
and that the list of those that may live is true to the sources.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.prove.mutants import SURVIVORS, allowed_survivors
from tests.prove.mutants.changes import changes_of
from tests.prove.mutants.guards import GUARDS

_ROOT = Path(__file__).parents[2]


def changed(source: str) -> list[str]:
    """Return the module with each change."""
    tree = ast.parse(source)
    texts = []
    for change in changes_of(tree, source.splitlines()):
        with change.made():
            texts.append(ast.unparse(tree))
    assert ast.unparse(tree) == ast.unparse(ast.parse(source)), "changes are unmade"
    return texts


@pytest.mark.parametrize(
    ("source", "others"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a and b", {"x = a or b", "x = a", "x = b"}),
        ("x = not a", {"x = a"}),
        ("x = a // 2", {"x = a * 2", "x = a // 3", "x = a // 1"}),
        ("x = True", {"x = False"}),
        ("a.b = c", {"pass"}),
        ("a += c", {"a -= c", "pass"}),
        ("f(a, b)", {"f(b, a)", "pass"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("def f():\n    return a", {"def f():\n    return None"}),
        ("for a in b:\n    break", {"for a in b:\n    continue"}),
        ("if a:\n    b()", {"if not a:\n    b()", "if a:\n    pass"}),
        ("raise ValueError('a b')", {"pass"}),
        ("x = 'word'", {"x = 'word?'"}),
    ],
)
def test_what_a_mutant_may_differ_in(source: str, others: set[str]) -> None:
    assert set(changed(source)) == others


@pytest.mark.parametrize(
    "source",
    [
        "'''Docstring.'''",
        "logger.info('%s', a)",
        "x: int",
        "__all__ = ['a']",
        "x = f'{a}'",
        "import a",
        "x = Literal['a']",
        "def check():\n    '''Assert all.'''\n    return a < b",
    ],
)
def test_what_nothing_is_decided_by_is_left_alone(source: str) -> None:
    assert changed(source) == []


def test_every_change_of_every_module_compiles_and_its_guards_are_there() -> None:
    for module, guards in GUARDS.items():
        source = (_ROOT / module).read_text()
        tree = ast.parse(source)
        changes = changes_of(tree, source.splitlines())
        assert changes or module.endswith("__init__.py"), module
        with changes[len(changes) // 2].made():
            compile(tree, module, "exec", dont_inherit=True)
        assert all((_ROOT / guard).exists() for guard in guards), module


def test_survivors_that_may_live_are_still_there() -> None:
    """Each names a line of its module and a change that can be made to it, once, in the order of the modules, and says
    why.
    """
    named = tomllib.loads(SURVIVORS.read_text())["survivor"]
    may_live = [(one["module"], one["text"], what) for one in named for what in one["changes"]]
    assert len(may_live) == len(set(may_live)), [one for one, count in Counter(may_live).items() if count > 1]
    assert [one["module"] for one in named] == sorted(one["module"] for one in named)
    assert all(one["why"] for one in named)
    for module in {one["module"] for one in named}:
        source = (_ROOT / module).read_text()
        there = {(module, change.text, change.what) for change in changes_of(ast.parse(source), source.splitlines())}
        assert {one for one in may_live if one[0] == module} <= there
    assert allowed_survivors() == set(may_live)


def test_changes_that_read_the_same_are_told_apart() -> None:
    """Or to let one live would be to let the others live, of which a test may tell."""
    source = "x = 0, 0\ny = 1\ny = 1\nz = 1"
    told = [(change.line, change.text, change.what) for change in changes_of(ast.parse(source), source.splitlines())]
    assert told == [
        (1, "x = 0, 0", "0 becomes 1 (1 of 2)"),
        (1, "x = 0, 0", "0 becomes 1 (2 of 2)"),
        (2, "y = 1", "1 becomes 2 (1 of 2)"),
        (2, "y = 1", "1 becomes 0 (1 of 2)"),
        (3, "y = 1", "1 becomes 2 (2 of 2)"),
        (3, "y = 1", "1 becomes 0 (2 of 2)"),
        (4, "z = 1", "1 becomes 2"),
        (4, "z = 1", "1 becomes 0"),
    ]


def test_mutants_are_killed_by_the_tests_of_their_module_and_live_where_there_are_none(tmp_path: Path) -> None:
    """In a process that has imported none of the package. The tests of another module notice nothing."""
    tried = (
        "from tests.prove.mutants.trial import try_mutants as t; import os, sys; out = os.dup(1); os.dup2(2, 1)\n"
        "def told(guard):\n"
        "    v = t('nixl_offload/catalog/placing.py', [guard], 10, 1)\n"
        "    return v.killed, len(v.survivors), v.broken\n"
        "r = told('tests/unit/test_placing.py'), told('tests/unit/test_admission.py')\n"
        "os.write(out, repr(r).encode())"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", tried],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(_ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    (killed, lived, broken), (killed_by_others, lived_for_others, _) = ast.literal_eval(ended.stdout)
    assert not broken
    assert killed >= 9
    assert (killed_by_others, lived_for_others) == (0, killed + lived)
