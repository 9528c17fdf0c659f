"""What a mutant may differ in from a module: one operator, constant, condition, statement, result or argument.

Threading: one thread; a ``Change`` is made and unmade in the tree that it is of. Texts of messages, docstrings and log
lines, annotations, types, ``zip``'s ``strict``, ``__repr__`` and checks for tests are left as they are: nothing is
decided by them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

_COMPARED: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_CALCULATED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Pow: ast.Mult,
}
_CALLED: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGERS: Final = ("logger", "_log")
_DECLARING: Final = ("dataclass", "field", "TypeVar", "NewType", "cast")
"""What these are given says how a type is written down; type checkers see to it."""
_SWAPPED_LEAST: Final = 2


@dataclass(frozen=True, slots=True)
class Change:
    """One difference; ``made`` puts it into the tree for as long as it lasts."""

    line: int
    last_line: int
    what: str
    """In words, such as ``Lt becomes LtE``; with a number where others of the same text and words are there."""
    in_function: bool
    """Whether it takes effect when a function runs, not when the module is imported."""
    owner: ast.AST
    field: str
    index: int | None
    value: Any
    text: str = ""
    """Of the line."""

    @contextmanager
    def made(self) -> Iterator[None]:
        """Have the tree differ so."""
        if self.index is None:
            before = getattr(self.owner, self.field)
            setattr(self.owner, self.field, self.value)
        else:
            before, getattr(self.owner, self.field)[self.index] = (
                getattr(self.owner, self.field)[self.index],
                self.value,
            )
        try:
            yield
        finally:
            if self.index is None:
                setattr(self.owner, self.field, before)
            else:
                getattr(self.owner, self.field)[self.index] = before


def changes_of(tree: ast.Module, lines: Sequence[str]) -> list[Change]:
    """Return all, in the order of the source, whose ``lines`` are given. No two have both text and words alike: several
    zeros of a line, or of two lines that read the same, are ``0 becomes 1 (1 of 2)`` and ``(2 of 2)``.
    """
    found = sorted(_Walk().within(tree, "body", in_function=False), key=lambda change: change.line)
    found = [replace(change, text=lines[change.line - 1].strip()) for change in found]
    alike = Counter((change.text, change.what) for change in found)
    seen = Counter[tuple[str, str]]()
    for at, change in enumerate(found):
        name = (change.text, change.what)
        seen[name] += 1
        if alike[name] > 1:
            found[at] = replace(change, what=f"{change.what} ({seen[name]} of {alike[name]})")
    return found


class _Walk:
    """Goes through a tree and yields what can differ."""

    def within(self, owner: ast.AST, field: str, *, in_function: bool) -> Iterator[Change]:
        value = getattr(owner, field)
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield from self._at(owner, field, index, item, in_function)
        elif isinstance(value, ast.AST):
            yield from self._at(owner, field, None, value, in_function)

    def _at(self, owner: ast.AST, field: str, index: int | None, node: ast.AST, in_function: bool) -> Iterator[Change]:
        if _is_text(node):
            return
        for what, value in _instead_of(node, owner):
            if isinstance(value, ast.AST) and isinstance(node, ast.expr | ast.stmt):
                ast.fix_missing_locations(ast.copy_location(value, node))
            yield Change(node.lineno, node.end_lineno or node.lineno, what, in_function, owner, field, index, value)
        for inner, position, what, value in _inside(node):
            line, last = node.lineno, node.end_lineno or node.lineno
            yield Change(line, last, what, in_function, node, inner, position, value)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for name in node._fields:
            if name not in ("annotation", "returns", "type_params", "type_comment"):
                yield from self.within(node, name, in_function=in_function or (is_function and name == "body"))


def _is_text(node: ast.AST) -> bool:
    """Whether it and what is in it are left alone."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.FunctionDef) and (node.name == "__repr__" or _asserts(node)):
        return True
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _DECLARING:
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
        return True
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Constant):
            return True
        function = node.value.func if isinstance(node.value, ast.Call) else None
        return (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id in _LOGGERS
        )
    return False


def _asserts(node: ast.FunctionDef) -> bool:
    """Whether it is for tests, to find what is wrong."""
    return (ast.get_docstring(node) or "").startswith("Assert ")


def _instead_of(node: ast.AST, owner: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what may stand in a node's place."""
    if isinstance(node, ast.Constant):
        yield from _other_constants(node, owner)
    elif isinstance(node, ast.BoolOp):
        for gone in range(len(node.values)):
            rest = node.values[:gone] + node.values[gone + 1 :]
            kept = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            yield f"without {ast.unparse(node.values[gone])!r}", kept
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "without 'not'", node.operand
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "without '-'", node.operand
    elif (
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom | ast.Await))
        or isinstance(node, ast.AugAssign | ast.Delete | ast.Raise)
        or (isinstance(node, ast.Assign) and not all(isinstance(target, ast.Name) for target in node.targets))
    ):
        yield "removed", ast.Pass()
    elif isinstance(node, ast.Continue | ast.Break):
        other = ast.Break() if isinstance(node, ast.Continue) else ast.Continue()
        yield f"{type(node).__name__.lower()} becomes {type(other).__name__.lower()}", other
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "returns None", ast.Return(ast.Constant(None))


def _inside(node: ast.AST) -> Iterator[tuple[str, int | None, str, Any]]:
    """Yield what may differ in a node itself: field, index, words, value."""
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            for other in _COMPARED[type(operator)]:
                yield "ops", index, f"{type(operator).__name__} becomes {other.__name__}", other()
    elif isinstance(node, ast.BoolOp):
        other_bool = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "op", None, f"{type(node.op).__name__} becomes {type(other_bool).__name__}", other_bool
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _CALCULATED:
        if not _is_formatting(node):
            other_op = _CALCULATED[type(node.op)]
            yield "op", None, f"{type(node.op).__name__} becomes {other_op.__name__}", other_op()
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp):
        if not (isinstance(node.test, ast.UnaryOp) or _is_true(node.test)):
            wrong = ast.fix_missing_locations(ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test))
            yield "test", None, f"if not {ast.unparse(node.test)}", wrong
    elif isinstance(node, ast.Call):
        yield from _other_calls(node)


def _other_calls(node: ast.Call) -> Iterator[tuple[str, int | None, str, Any]]:
    function = node.func
    if isinstance(function, ast.Name) and function.id in _CALLED:
        other = ast.copy_location(ast.Name(_CALLED[function.id], ast.Load()), function)
        yield "func", None, f"{function.id} becomes {_CALLED[function.id]}", other
    elif len(node.args) >= _SWAPPED_LEAST and not any(isinstance(argument, ast.Starred) for argument in node.args[:2]):
        if isinstance(function, ast.Name) and function.id in ("isinstance", "getattr", "cast", "hasattr"):
            return
        first, second, *others = node.args
        if ast.dump(first) != ast.dump(second):
            yield "args", None, f"swaps {ast.unparse(first)!r} and {ast.unparse(second)!r}", [second, first, *others]


def _other_constants(node: ast.Constant, owner: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield f"{value} becomes {not value}", ast.Constant(not value)
    elif isinstance(value, int | float):
        yield f"{value} becomes {value + 1}", ast.Constant(value + 1)
        if value and not isinstance(owner, ast.Slice):
            yield f"{value} becomes {value - 1}", ast.Constant(value - 1)
    elif isinstance(value, str) and value and " " not in value and not _is_message(owner):
        yield f"{value!r} becomes {value + '?'!r}", ast.Constant(value + "?")
    elif isinstance(value, bytes):
        yield f"{value!r} becomes {value + b'?'!r}", ast.Constant(value + b"?")


def _is_message(owner: ast.AST) -> bool:
    """Whether a string that stands there is read by people: an argument of what is raised, or part of a text."""
    if isinstance(owner, ast.Call):
        name = owner.func.id if isinstance(owner.func, ast.Name) else getattr(owner.func, "attr", "")
        return name.endswith("Error") or name in ("join", "format", "strftime")
    return isinstance(owner, ast.JoinedStr | ast.FormattedValue | ast.Expr) or (
        isinstance(owner, ast.BinOp) and isinstance(owner.op, ast.Mod | ast.Add)
    )


def _is_formatting(node: ast.BinOp | ast.AugAssign) -> bool:
    left = node.left if isinstance(node, ast.BinOp) else node.value
    return isinstance(left, ast.JoinedStr) or (isinstance(left, ast.Constant) and isinstance(left.value, str | bytes))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
