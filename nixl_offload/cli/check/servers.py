"""What ``nixl-offload check`` finds of the servers that ``--vllm-args`` describes: whether their block hashes last,
what identifies what one stores, and whether two share it.

Threading: one thread; vLLM runs in a child process with a deadline, one for each environment.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from nixl_offload.cli.check.child import Answer, ChildProcess
from nixl_offload.cli.check.report import CheckProgress, Finding, Section, ok, unknown, warning, wrong
from nixl_offload.config import Config, blocks_per_chunk, kv_transfer_config
from nixl_offload.errors import ConfigError
from nixl_offload.identity.compare import ABSENT, Comparison, Difference, Server, compare, is_named
from nixl_offload.identity.namespace import Setting

LIMIT_S: Final = 240.0
"""vLLM is imported, and for a model that it has not met before once more, by a process of vLLM's."""
_STEADY: Final = ("sha256", "sha256_cbor")
_SEEDED: Final = ("xxhash", "xxhash_cbor")
_DEFAULT: Final = "sha256, vLLM's default"
_MAX_DIFFERENCES: Final = 12
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
    """Parse ``--vllm-args``. Raises ConfigError: it is no command line, one of two names no model, there are more."""
    if len(texts) > len(_ORDINALS):
        raise ConfigError("--vllm-args: say it once, or twice to compare two servers")
    lines = [_read(text) for text in texts]
    for ordinal, line in zip(_ORDINALS, lines, strict=False):
        if len(lines) > 1 and not line.names_model:
            raise ConfigError(
                f"--vllm-args: the {ordinal} names no model; say it first, as for vllm serve: 'MODEL --max-model-len N'"
            )
    return lines


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
    if words and os.path.basename(words[0]) == "vllm":
        del words[0]
    if words and words[0] == "serve":
        del words[0]
    if re.search(r"(^|[\s/])vllm serve\s|\s-m vllm", " ".join(words)):
        raise ConfigError("--vllm-args: begin with the model, or with vllm serve; NAME=VALUE may stand before it")
    return CommandLine(variables, tuple(words))


def hashes_section(config: Config, words: Sequence[str] | None, environment: Mapping[str, str]) -> Section:
    """Say whether a restart, or another server, finds what was stored. ``words`` are vLLM's arguments, None: not given.

    Raises ConfigError when a value is no value.
    """
    parser = _HashArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--prefix-caching-hash-algo", "--prefix_caching_hash_algo", dest="algorithm")
    parser.add_argument("--no-enable-prefix-caching", "--no_enable_prefix_caching", dest="off", action="store_true")
    parser.add_argument("--enable-prefix-caching", "--enable_prefix_caching", dest="off", action="store_false")
    parser.add_argument("--block-size", "--block_size", type=int)
    said, _ = parser.parse_known_args(list(words or ()))
    section = Section("hashes", "Block hashes")
    seed = environment.get("PYTHONHASHSEED")
    section.add("hash algorithm", _algorithm(config, said.algorithm, seed, told=words is not None))
    if said.off and not config.serve_without_prefix_caching:
        off = "off (--no-enable-prefix-caching): nothing is stored or loaded"
        section.add("prefix caching", warning(off, "start the server without --no-enable-prefix-caching"))
    if said.block_size is not None:
        blocks = blocks_per_chunk(config.chunk_tokens, said.block_size)
        tokens = blocks * said.block_size
        words = f"{tokens} are {blocks} of vLLM's blocks of {said.block_size}"
        found = ok(words if tokens == config.chunk_tokens else f"{config.chunk_tokens}, rounded up: {words}")
        section.add("chunk_tokens", found)
    return section


def _algorithm(config: Config, algorithm: str | None, seed: str | None, *, told: bool) -> Finding:
    if not config.stored:
        return ok("any will do: with a memory tier alone nothing outlives the server")
    here = {None: "unset", "": "empty"}.get(seed, seed)
    words = f"{algorithm or _DEFAULT}: found by every server with the same PYTHONHASHSEED (here: {here})"
    if algorithm is None and not told:
        return ok(f"{words}. If yours names another, say how it is started: nixl-offload check --vllm-args '...'")
    if algorithm in (None, *_STEADY) or (algorithm in _SEEDED and seed is not None):
        return ok(words)
    if algorithm not in _SEEDED:
        known = ", ".join(_STEADY + _SEEDED)
        return wrong(f"vLLM knows no {algorithm!r}; it has {known}", "--prefix-caching-hash-algo sha256")
    lost = f"{algorithm} without PYTHONHASHSEED: hashes differ in every process, so nothing is stored or loaded"
    return wrong(lost, "export PYTHONHASHSEED=0 for every server, or --prefix-caching-hash-algo sha256")


class _HashArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # it raises instead of leaving
        raise ConfigError(f"--vllm-args: {message}")


def servers_section(lines: Sequence[CommandLine], config: Config, progress: CheckProgress) -> Section:
    """Have vLLM read one or two command lines. Raises ConfigError when vLLM has no such arguments."""
    progress("asking vLLM what these arguments come to", why_long="importing it takes ten seconds and more")
    section = Section("servers", "Server" if len(lines) == 1 else "Two servers")
    section.facts = {"servers": None, "share": None, "because": [], "differences": [], "harmless": [], "weights": []}
    which = [""] if len(lines) == 1 else [f"the {ordinal}: " for ordinal in _ORDINALS]
    servers = []
    for prefix, answer in zip(which, _ask(lines, kv_transfer_config(config, config.to_dict())), strict=True):
        if "usage" in answer:
            raise ConfigError(f"{prefix}{answer['usage']}")
        if "failed" in answer:
            why = f"vLLM gave no answer: {answer['failed']}" if answer.get("crashed") else answer["failed"]
            section.add("servers", unknown(f"{prefix}{why}", answer.get("fix")))
            return section
        servers.append(Server.from_dict(answer["server"]))
    section.facts["servers"] = [
        {
            "model": server.model,
            "revision": server.revision,
            "weights": "content" if "model_config" in server.files else "name" if server.by_name_alone else "revision",
            "settings": len(server.values),
            "incomparable": [*server.incomparable],
            "off": server.off,
        }
        for server in servers
    ]
    if len(servers) == 1:
        add_server(section, servers[0])
    else:
        found = compare(servers[0], servers[1], lines[0].variables, lines[1].variables)
        add_comparison(section, found, shared_tier=bool(config.shared))
    for prefix, server in zip(which, servers, strict=True):
        if server.off is not None:
            subject = prefix.removesuffix(": ") or "this server"
            section.add("offloading", warning(f"{subject} stores and loads nothing: {server.off}"))
    return section


def _ask(lines: Sequence[CommandLine], transfer: Mapping[str, Any]) -> list[Answer]:
    answers = []
    with contextlib.ExitStack() as stack:
        open_child = functools.cache(lambda *variables: stack.enter_context(ChildProcess(dict(variables))))
        for line, other in zip(lines, reversed(lines), strict=True):
            child, theirs = open_child(*sorted(line.variables.items())), other.words if len(lines) > 1 else None
            answers.append(child.run("server", limit_s=LIMIT_S, words=line.words, other=theirs, transfer=transfer))
    return answers


def add_server(section: Section, server: Server) -> None:
    """Add what identifies what one server stores."""
    model = server.model if server.revision is None else f"{server.model} at {server.revision}"
    if "model_config" in server.files:
        section.add("model", ok(f"{model}, by the content of its files, which the server reads at start"))
    elif server.by_name_alone:
        words = "its weights are known by name alone: whoever replaces them must change the tenant"
        section.add("model", warning(f"{model}; {words}"))
    else:
        section.add("model", ok(model))
    if server.incomparable:
        lost = "nothing stored is found after a restart, or by another server"
        words = f"{lost}: {_list(server.incomparable)} cannot be compared between processes"
        section.add("identity", warning(words))
        return
    words = f"{len(server.values)} settings count: a server that differs in one shares nothing with this one"
    section.add("identity", ok(f"{words}; --vllm-args twice compares two"))


def add_comparison(section: Section, found: Comparison, *, shared_tier: bool = True) -> None:
    """Add whether two servers share, and what separates them. ``shared_tier``: they can use one tier at a time."""
    section.facts |= {
        "share": found.share,
        "shared_tier": shared_tier,
        "because": [*found.because, *found.incomparable],
        "differences": [each._asdict() for each in found.differences],
        "harmless": [each._asdict() for each in found.harmless],
        "weights": [*found.weights],
    }
    section.add("sharing", _sharing(found, shared_tier=shared_tier))
    for first, second in found.weights if found.share else ():
        section.add("weights", unknown(f"{first} and {second} are compared by their content when the servers start"))
    differences = list(_in_brief(found.differences))
    for path, values in differences[:_MAX_DIFFERENCES]:
        name = path.rpartition(".")[2] if is_named(path, found.because) else path
        section.add("differs", warning(f"{name}: {_pair(values)}"))
    if len(differences) > _MAX_DIFFERENCES:
        section.add("differs", warning(f"{len(differences) - _MAX_DIFFERENCES} more, which --json has"))
    for name, values, reason in found.harmless:
        shown = "" if values[0] == values[1] else f": {_pair(values)}"
        section.add("harmless", ok(f"{name}{shown} ({reason})"))


def _sharing(found: Comparison, *, shared_tier: bool) -> Finding:
    told = "as far as arguments and environment tell"
    if found.share and shared_tier:
        return ok(f"these two servers share what they store, {told}; each rank adds what it has allocated")
    if found.share:
        why = "a slab or memory belongs to one server at a time, so servers that run side by side share nothing"
        words = f"these two servers have one namespace, {told}, but no shared tier: {why}"
        return warning(words, "add a tier of kind: s3 or shared_dir")
    if found.incomparable:
        words = f"{_list(found.incomparable)} cannot be compared between processes"
        return warning(f"these two servers share nothing, nor does one find its own after a restart: {words}")
    names = found.because or [each.path for each in found.differences[:3]]
    verb = "differs" if len(names) == 1 else "differ"
    return warning(f"these two servers share nothing, because {_list(names)} {verb}")


def _in_brief(differences: Sequence[Difference]) -> Iterator[Difference]:
    """Leave out what lies below a setting that only one of the two has, but for its type."""
    found = dict(differences)
    for path, (first, second) in differences:
        if path.endswith(".(type)") and path.removesuffix(".(type)") in found:
            continue
        if ABSENT not in (first, second):
            yield Difference(path, (first, second))
        elif not any(path.startswith(f"{parent}.") for parent in found):
            one, other = found.get(f"{path}.(type)", (ABSENT, ABSENT))
            has_more = any(each.startswith(f"{path}.") for each in found)
            one, other = ("(set)" if has_more and each == ABSENT else each for each in (one, other))
            yield Difference(path, (one if first == ABSENT else first, other if second == ABSENT else second))


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _pair(values: tuple[Setting, Setting]) -> str:
    return " | ".join("not set" if each is None else str(each) for each in values)
