"""What commands share: their common arguments, and the way from a config file to the tiers in it.

Threading: one thread; ``Throttle`` is safe in several.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, TextIO, TypeAlias, TypeVar

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.key_file import read_key_file
from nixl_offload.cli.commands import COMMANDS
from nixl_offload.config import Config, StoredConfig
from nixl_offload.errors import ConfigError, NotSupportedError, StoreError, TierError
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo
from nixl_offload.tiers.kinds import open_inspector

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

STORED_KINDS: Final = ("slab", "shared_dir", "s3")
TIER_ERRORS: Final = (StoreError, TierError, NotSupportedError)
"""Errors of one tier; the command goes on with the others."""
MEMORY_NOTE: Final = (
    "memory tier: lives in the server's processes and cannot be looked at from outside; the server's metrics tell what "
    "it holds"
)
_NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}")


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace, TextIO], int],
    *,
    description: str,
    summary: str | None = None,
    config: bool = True,
    json: str | None = "print JSON",
) -> argparse.ArgumentParser:
    """Add a command that ``run`` carries out; with CONFIG and ``--json``, unless told otherwise.

    ``summary``: of a command of a command; of the others ``COMMANDS`` has it.
    """
    summary = COMMANDS[name].summary if summary is None else summary
    parser = commands.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if config:
        parser.add_argument("file", metavar="CONFIG", help="the YAML config")
    if json is not None:
        parser.add_argument("--json", action="store_true", help=json)
    parser.set_defaults(run=run)
    return parser


def add_selection(parser: argparse.ArgumentParser, *, tenant: bool) -> None:
    """Add ``--tier`` and ``--namespace``, ``--tenant`` too where it says so."""
    parser.add_argument("--tier", choices=STORED_KINDS, help="only this tier of CONFIG")
    parser.add_argument("--namespace", metavar="NAME", help="only this namespace, 32 hex digits as ls prints them")
    if tenant:
        parser.add_argument("--tenant", help="only the namespaces of this tenant")


def check_namespace(text: str | None) -> None:
    """Raise ConfigError unless ``text`` is a namespace's name, or None."""
    if text is not None and not _NAMESPACE_NAME.fullmatch(text):
        raise ConfigError(f"--namespace: {text!r} is not one; allowed: 32 hex digits, as ls and gc print them")


def selected(inspector: Inspector, arguments: argparse.Namespace) -> Iterator[NamespaceInfo]:
    """Yield the namespaces that ``--namespace`` and ``--tenant`` select."""
    tenant = getattr(arguments, "tenant", None)
    for namespace in inspector.namespaces():
        if arguments.namespace in (None, namespace.name) and tenant in (None, namespace.tenant):
            yield namespace


def keys_of(config: Config) -> ChunkKeys | None:
    """Return the keys that the config names; None: it names none, or this user cannot read them, which is told."""
    if config.authenticate is None:
        return None
    try:
        return read_key_file(config.authenticate.key_file)
    except ConfigError as error:
        print(f"nixl-offload: {error}; going on without a key", file=sys.stderr)
        return None


def report_nothing_found(arguments: argparse.Namespace) -> None:
    """Say on stderr that the namespace or tenant asked for is not there: perhaps it is misspelt."""
    asked = [f"{word} {value}" for word in ("namespace", "tenant") if (value := getattr(arguments, word, None))]
    print(f"nixl-offload: nothing is there of {' and '.join(asked)}", file=sys.stderr)


def stored_tiers(config: Config, file: str, kind: str | None = None) -> list[StoredConfig]:
    """Return the tiers that outlive a server: all of them, or those of ``kind``. Raises ConfigError: there is none."""
    stored = config.stored
    found = [tier for tier in stored if kind in (None, tier.kind)]
    if found:
        return found
    if not stored:
        raise ConfigError(f"{file}: tiers: only memory, which cannot be looked at from outside the server")
    raise ConfigError(
        f"--tier: {kind!r} is not among the tiers of {file}; allowed: {', '.join(t.kind for t in stored)}"
    )


@dataclass(frozen=True, slots=True)
class TierFailure:
    """A tier that could not be looked at; the others go on without it."""

    kind: str
    where: str | None
    words: str


def attempt(kind: str, where: str | None, call: Callable[[], T]) -> T | TierFailure:
    """Return what ``call`` returns. An error of the tier is printed to stderr and returned."""
    try:
        return call()
    except TIER_ERRORS as error:
        sys.stdout.flush()
        print(f"nixl-offload: {error}", file=sys.stderr)
        return TierFailure(kind, where, str(error))


def visit(inspector: Inspector | TierFailure, call: Callable[[Inspector], T]) -> T | TierFailure:
    """Return what ``call`` returns, or why the tier could not be opened or failed meanwhile."""
    if isinstance(inspector, TierFailure):
        return inspector
    return attempt(inspector.kind, inspector.where, lambda: call(inspector))


@contextlib.contextmanager
def opened(arguments: argparse.Namespace, config: Config) -> Iterator[list[Inspector | TierFailure]]:
    """Open the tiers that ``--tier`` selects, for ``visit``. Raises ConfigError."""
    check_namespace(arguments.namespace)
    tiers = stored_tiers(config, arguments.file, arguments.tier)
    found = [attempt(tier.kind, None, partial(open_inspector, tier)) for tier in tiers]
    try:
        yield found
    finally:
        for each in found:
            if isinstance(each, Inspector):
                each.close()


class Throttle:
    """Spreads reads so that together they take no more than so many bytes a second. None: no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._next_s = 0.0

    def wait(self, size_bytes: int, stop: threading.Event) -> None:
        """Return when ``size_bytes`` may be read, or when ``stop`` is set."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(self._next_s, now_s)
            self._next_s = begin_s + size_bytes / self._bytes_per_s
        if begin_s > now_s:
            stop.wait(begin_s - now_s)
