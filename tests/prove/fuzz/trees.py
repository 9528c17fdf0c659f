"""Changes JSON where bytes would only break it: another value in a place, one less, one twice, one within another.

Threading: pure functions.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any, Final

Mutate = Callable[[bytes, random.Random], bytes | None]
"""Returns a changed input, None where it is not what can be changed so."""

_RAW: Final = "\x01"
"""Around what stands for itself, in a text that is not JSON."""
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 16, 4096, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.0, 1e300, float("nan")),
    *(float("inf"), "", "x", "auto", "\0", "\ud800", "é" * 40, "1GiB", "7d", "0s", "-1B", "/x", "../x", "~/x", "\n"),
    *([], {}, [[]], [{}], {"": 0}, [None], [1, 2], {"kind": []}, ["a", "a"], "9" * 5000),
)
_YAML_VALUES: Final = (
    "!!bool x|!!int ''|!!float ''|!!timestamp x|!!binary x|!!set {a, b}|!!omap [a: 1]|=|<<|!!pairs [a: 1]|!!null x|"
    "2026-11-23|2026-13-45|1:30|0x_|0o7|.nan|&a b|*a|~|1_0|!!python/name:os.system x|!x y|{a: 1, a: 2}|{<<: {a: 1}}|"
    "{1: 2}|{[a]: 2}|@|`"
)
_YAML: Final = tuple(f"{_RAW}{text}{_RAW}" for text in (*_YAML_VALUES.split("|"), "|\n x"))


def json_mutated(data: bytes, chance: random.Random, words: tuple[Any, ...] = ()) -> bytes | None:
    """Change one to three places of a JSON document. ``words``: values and names to put in, besides all sorts."""
    try:
        root = [json.loads(data)]
    except (ValueError, RecursionError):
        return None
    for _ in range(chance.randint(1, 3)):
        _change(root, chance, words)
    return json.dumps(root[0]).encode()


def yaml_mutated(data: bytes, chance: random.Random, words: tuple[Any, ...] = ()) -> bytes | None:
    """The same, in YAML: a document of JSON is one, and some places may hold what JSON has not."""
    changed = json_mutated(data, chance, (*words, *_YAML))
    if changed is None:
        return None
    mark = json.dumps(_RAW)[1:-1].encode()
    return changed.replace(b'"' + mark, b"").replace(mark + b'"', b"")


def _change(root: list[Any], chance: random.Random, words: tuple[Any, ...]) -> None:
    places = list(_places(root))
    owner, key = chance.choice(places)
    how = chance.randrange(6)
    if how == 0 and owner is not root:
        del owner[key]
    elif how == 1:
        owner[key] = chance.choice((lambda value: [value], lambda value: {"kind": value}))(owner[key])
    elif how == 2:
        other, name = chance.choice(places)
        owner[key] = copy.deepcopy(other[name])
    elif how == 3 and isinstance(owner[key], dict):
        name = chance.choice([word for word in words if isinstance(word, str)] or ["x"])
        owner[key][name] = copy.deepcopy(chance.choice(_VALUES))
    elif how == 4 and isinstance(owner[key], list):
        owner[key].append(copy.deepcopy(chance.choice(owner[key] or [None])))
    else:
        owner[key] = copy.deepcopy(chance.choice((*_VALUES, *words)))


def _places(value: Any) -> Any:
    """Yield (container, key) of all values within one."""
    items = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
