"""What keeps two servers from sharing: compares what their argument lists come to, in the users' own words first.

Threading: immutable values and pure functions, safe anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from nixl_offload.identity.excused_environment import EXCUSED_ENVIRONMENT
from nixl_offload.identity.namespace import Setting

ABSENT: Final = "(not there)"
"""Stands for a setting that only the other server has."""
_PATHS: Final = {"PYTHONHASHSEED": "hash_seed"}
"""Settings that come from variables, where they are not ``environment.NAME``."""
_NO_EFFECT: Final = "what counts comes out the same"


class Difference(NamedTuple):
    """A setting that counts and is not the same."""

    path: str
    values: tuple[Setting, Setting]


class Harmless(NamedTuple):
    """An argument or environment variable that is not the same, and costs nothing."""

    name: str
    values: tuple[Setting, Setting]
    """None, both: they are of no use here, and may be secret."""
    reason: str


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument in which a server differs from the other one."""

    value: Setting
    """This server's; None: not given, or of no use here."""
    changes: Sequence[str] | None
    """Settings that count and would change if this server had the other's value of this argument, and of no other;
    None: vLLM refuses that."""
    reason: str | None
    """Why it counts for nothing, where that is known beforehand."""


@dataclass(frozen=True, slots=True)
class Server:
    """What an argument list comes to."""

    model: str
    revision: str | None
    by_name_alone: bool
    """Whether nothing but a name tells which weights they are."""
    files: Mapping[str, str]
    """By where the model stands in the configuration: the file or directory whose content counts, links resolved."""
    values: Mapping[str, Setting]
    """What counts, as far as it is known before ranks have allocated anything."""
    incomparable: Sequence[str]
    """Settings that mean nothing in another process."""
    off: str | None
    """Why this server would store and load nothing."""
    arguments: Mapping[str, Argument]
    """Those that differ from the other server's, by name."""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Server:
        """Take back what ``dataclasses.asdict`` made, by way of JSON."""
        arguments = {name: Argument(**each) for name, each in plain["arguments"].items()}
        return cls(**{**plain, "arguments": arguments})


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two servers differ in."""

    differences: tuple[Difference, ...]
    """What arguments and variables name comes first, then what follows from it."""
    because: tuple[str, ...]
    """Arguments and variables that make the differences, as far as any can be named."""
    harmless: tuple[Harmless, ...]
    incomparable: tuple[str, ...]
    weights: tuple[tuple[str, str], ...]
    """Local files of the two whose content is compared when servers start."""

    @property
    def share(self) -> bool:
        """Whether nothing is known that keeps them apart."""
        return not self.differences and not self.incomparable


def differing(first: Mapping[str, Setting], second: Mapping[str, Setting]) -> list[Difference]:
    """Return what is not the same, in the first's order, then what the second alone has. 1, 1.0 and True differ."""
    paths = dict.fromkeys([*first, *second])
    pairs = [Difference(path, (first.get(path, ABSENT), second.get(path, ABSENT))) for path in paths]
    return [
        each for each in pairs if each.values[0] != each.values[1] or type(each.values[0]) is not type(each.values[1])
    ]


def compare(
    first: Server, second: Server, first_variables: Mapping[str, str], second_variables: Mapping[str, str]
) -> Comparison:
    """Say what keeps two servers apart. ``..._variables``: the environment, as far as only that server has it."""
    incomparable = tuple(dict.fromkeys([*first.incomparable, *second.incomparable]))
    found = [each for each in differing(first.values, second.values) if each.path not in incomparable]
    paths = {each.path for each in found}
    weights = tuple(
        (first.files[key], second.files[key])
        for key in first.files
        if key in second.files and first.files[key] != second.files[key]
    )
    told = {path for each in (first, second) for it in each.arguments.values() for path in it.changes or ()}
    variables = {
        name: _PATHS.get(name, f"environment.{name}")
        for name in dict.fromkeys([*first_variables, *second_variables])
        if first_variables.get(name) != second_variables.get(name)
    }
    open_question = not paths <= told.union(variables.values())
    causes, harmless = [], []
    for name, mine in first.arguments.items():
        theirs = second.arguments[name]
        refused = mine.changes is None or theirs.changes is None
        if mine.changes or theirs.changes or (open_question and refused and mine.reason is None):
            causes.append(name)
        elif name != "model":  # of equal models ``weights`` tells
            harmless.append(Harmless(name, (mine.value, theirs.value), mine.reason or _NO_EFFECT))
    for name, path in variables.items():
        reason = EXCUSED_ENVIRONMENT.get(name)
        if path in paths or (open_question and not reason):
            causes.append(name)
        else:
            harmless.append(Harmless(name, (None, None), reason or _NO_EFFECT))
    found.sort(key=lambda each: not is_named(each.path, causes))
    return Comparison(tuple(found), tuple(causes), tuple(harmless), incomparable, weights)


def is_named(path: str, names: Sequence[str]) -> bool:
    """Whether a setting is called as one of these arguments or variables is."""
    return path.rpartition(".")[2] in names
