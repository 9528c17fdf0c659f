"""What ``nixl-offload check`` says of the servers that ``--vllm-args`` describes: what identifies one, and whether two
share what they store.

Threading: one thread; vLLM runs in a process of its own (``child``), one for each environment, with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nixl_offload.cli.check.child import Answer, Trials
from nixl_offload.cli.check.lines import Line, Section, ok, unknown, warning
from nixl_offload.cli.check.report import Doing
from nixl_offload.config import Config, S3Config, SharedDirConfig, kv_transfer_config
from nixl_offload.errors import ConfigError
from nixl_offload.identity.compare import ABSENT, Comparison, Difference, Server, compare, is_named
from nixl_offload.identity.namespace import Setting

LIMIT_S: Final = 240.0
"""vLLM is imported, and for a model that it has not met before once more, by a process of vLLM's."""

_MOST_LINES: Final = 12
_MOST_BELOW: Final = 3
"""Values told of what lies below a setting that only one server has."""
_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_ORDINALS: Final = ("first", "second")


class CommandLine(NamedTuple):
    """One ``--vllm-args``."""

    variables: Mapping[str, str]
    """Environment variables that stand before it."""
    words: tuple[str, ...]
    """What follows ``vllm serve``."""

    @property
    def names_model(self) -> bool:
        """Whether it says which model; without one nothing is asked of vLLM."""
        if self.words and not self.words[0].startswith("-"):
            return True
        return any(re.match(r"--(model|config)(=|\Z)", word) for word in self.words)


def read_command_lines(texts: Sequence[str]) -> list[CommandLine]:
    """Take ``--vllm-args`` apart. Raises ConfigError: it is none, or one of two names no model, or there are more."""
    if len(texts) > len(_ORDINALS):
        raise ConfigError("--vllm-args: say it once, or twice to compare two servers")
    lines = [_read(text) for text in texts]
    for ordinal, line in zip(_ORDINALS, lines, strict=False):
        if len(lines) > 1 and not line.names_model:
            raise ConfigError(
                f"--vllm-args: the {ordinal} names no model; say it first, as for vllm serve: 'MODEL --max-model-len N'"
            )
    return lines


def servers_section(lines: Sequence[CommandLine], config: Config, doing: Doing) -> list[Section]:
    """Ask vLLM what the command lines come to. No section where no model is named.

    Raises ConfigError when vLLM has no such arguments.
    """
    if not any(line.names_model for line in lines):
        return []
    doing("asking vLLM what these arguments come to", long="importing it takes ten seconds and more")
    section = Section("servers", "Server" if len(lines) == 1 else "Two servers")
    section.facts = {"servers": None, "share": None, "because": [], "differences": [], "harmless": [], "weights": []}
    answers = _ask(lines, kv_transfer_config(config, config.to_dict()))
    for ordinal, answer in zip(_ORDINALS, answers, strict=False):
        which = f"the {ordinal}: " if len(lines) > 1 else ""
        if "usage" in answer:
            raise ConfigError(f"{which}{answer['usage']}")
        if "failed" in answer:
            said = f"vLLM gave no answer: {answer['failed']}" if answer.get("crashed") else answer["failed"]
            section.add([unknown("servers", f"{which}{said}", answer.get("mend"))])
            return [section]
    servers = [Server.from_dict(answer["server"]) for answer in answers]
    section.facts["servers"] = [_facts(server) for server in servers]
    if len(servers) == 1:
        section.add(server_lines(servers[0]))
        return [section]
    found = compare(servers[0], servers[1], lines[0].variables, lines[1].variables)
    shared_tier = any(isinstance(tier, S3Config | SharedDirConfig) for tier in config.tiers)
    section.facts |= {
        "share": found.share,
        "shared_tier": shared_tier,
        "because": [*found.because, *found.incomparable],
        "differences": [each._asdict() for each in found.differences],
        "harmless": [each._asdict() for each in found.harmless],
        "weights": [*found.weights],
    }
    section.add(comparison_lines(found, shared_tier=shared_tier))
    for ordinal, server in zip(_ORDINALS, servers, strict=True):
        if server.off is not None:
            section.add([warning("offloading", f"the {ordinal} stores and loads nothing: {server.off}")])
    return [section]


def comparison_lines(found: Comparison, *, shared_tier: bool = True) -> Iterator[Line]:
    """Yield whether two servers share, and why not. ``shared_tier``: whether several can use one tier at a time."""
    if found.share and not shared_tier:
        words = "these two servers have one namespace, as far as arguments and environment tell, but no shared tier"
        why = "a slab or memory belongs to one server at a time, so servers that run side by side share nothing"
        yield warning("sharing", f"{words}: {why}", "add a tier of kind: s3 or shared_dir")
    elif found.share:
        words = "these two servers share what they store, as far as arguments and environment tell"
        yield ok("sharing", f"{words}; each rank adds what it has allocated")
    elif found.incomparable:
        words = f"{_list(found.incomparable)} cannot be compared between processes"
        yield warning("sharing", f"these two servers share nothing, nor does one find its own after a restart: {words}")
    else:
        names = found.because or [each.path for each in found.differences[:3]]
        verb = "differs" if len(names) == 1 else "differ"
        yield warning("sharing", f"these two servers share nothing, because {_list(names)} {verb}")
    for first, second in found.weights if found.share else ():
        yield unknown("weights", f"{first} and {second} are compared by their content when the servers start")
    differences = list(_in_brief(found.differences))
    for path, values in differences[:_MOST_LINES]:
        name = path.rpartition(".")[2] if is_named(path, found.because) else path
        yield warning("differs", f"{name}: {_pair(values)}")
    if len(differences) > _MOST_LINES:
        yield warning("differs", f"{len(differences) - _MOST_LINES} more, which --json has")
    for name, values, reason in found.harmless:
        shown = "" if values[0] == values[1] else f": {_pair(values)}"
        yield ok("harmless", f"{name}{shown} ({reason})")


def _in_brief(differences: Sequence[Difference]) -> Iterator[Difference]:
    """Leave out what lies below something that only one of the two has, but for what that is."""
    found = dict(differences)
    for path, values in differences:
        if path.endswith(".(type)") and path.removesuffix(".(type)") in found:
            continue
        if ABSENT in values:
            if any(parent in found for parent in _parents(path)):
                continue
            kinds = found.get(f"{path}.(type)") or _below(path, differences) or values
            shown = (values[0] if kinds[0] == ABSENT else kinds[0], values[1] if kinds[1] == ABSENT else kinds[1])
            yield Difference(path, shown)
        else:
            yield Difference(path, values)


def _below(path: str, differences: Sequence[Difference]) -> tuple[Setting, Setting] | None:
    """Return a few of the values below ``path`` as text for each server; None where neither has any."""
    texts: list[Setting] = []
    for side in (0, 1):
        below = [
            f"{each.path.removeprefix(f'{path}.')}: {_text(each.values[side])}"
            for each in differences
            if each.path.startswith(f"{path}.") and each.values[side] != ABSENT
        ]
        more = ["…"] if len(below) > _MOST_BELOW else []
        texts.append(", ".join([*below[:_MOST_BELOW], *more]) or ABSENT)
    return None if texts == [ABSENT, ABSENT] else (texts[0], texts[1])


def _parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def server_lines(server: Server) -> Iterator[Line]:
    """Yield what identifies what one server stores."""
    revision = "" if server.revision is None else f" at {server.revision}"
    model = f"{server.model}{revision}"
    if "model_config" in server.files:
        yield ok("model", f"{model}, by the content of its files, which the server reads at start")
    elif server.by_name_alone:
        words = "its weights are known by name alone: whoever replaces them must change the tenant"
        yield warning("model", f"{model}; {words}")
    else:
        yield ok("model", model)
    if server.incomparable:
        words = f"{_list(server.incomparable)} cannot be compared between processes"
        yield warning("identity", f"nothing stored is found after a restart, or by another server: {words}")
    else:
        words = f"{len(server.values)} settings count: a server that differs in one shares nothing with this one"
        yield ok("identity", f"{words}; --vllm-args twice compares two")
    if server.off is not None:
        yield warning("offloading", f"this server stores and loads nothing: {server.off}")


def _read(text: str) -> CommandLine:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--vllm-args: not a command line: {error}") from error
    variables = {}
    if words and os.path.basename(words[0]) == "env":
        del words[0]
    while words and (match := _VARIABLE.fullmatch(words[0])):
        variables[match[1]] = match[2]
        del words[0]
    for before, word, behind in zip(words, words[1:], [*words[2:], ""], strict=False):
        if (os.path.basename(word) == "vllm" and behind == "serve") or (before == "-m" and word.startswith("vllm")):
            raise ConfigError("--vllm-args: begin with the model, or with vllm serve; NAME=VALUE may stand before it")
    if words and os.path.basename(words[0]) == "vllm":
        del words[0]
    if words and words[0] == "serve":
        del words[0]
    return CommandLine(variables, tuple(words))


def _ask(lines: Sequence[CommandLine], transfer: Mapping[str, Any]) -> list[Answer]:
    with contextlib.ExitStack() as stack:
        trials: dict[tuple[tuple[str, str], ...], Trials] = {}
        begun = []
        for line, other in zip(lines, reversed(lines), strict=True):
            key = tuple(sorted(line.variables.items()))
            if key not in trials:
                trials[key] = stack.enter_context(Trials(line.variables))
            theirs = other.words if len(lines) > 1 else None
            begun.append((trials[key], trials[key].begin("server", words=line.words, other=theirs, transfer=transfer)))
        return [child.answer(number, LIMIT_S) for child, number in begun]


def _facts(server: Server) -> dict[str, Any]:
    return {
        "model": server.model,
        "revision": server.revision,
        "weights": "content" if "model_config" in server.files else "name" if server.by_name_alone else "revision",
        "settings": len(server.values),
        "incomparable": [*server.incomparable],
        "off": server.off,
    }


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _pair(values: tuple[Setting, Setting]) -> str:
    return " | ".join(_text(each) for each in values)


def _text(value: Setting) -> str:
    return "not set" if value is None else str(value)
