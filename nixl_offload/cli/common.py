"""Shared by commands: common arguments, the tiers of a config file, sizes and times for people.

Commands print to ``sys.stdout``; ``main`` reports failures. Threading: one thread.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple, TypeVar

from nixl_offload.chunk.authentication import ChunkKeys, read_key_file
from nixl_offload.config import Config, StoredConfig
from nixl_offload.errors import ConfigError, NotSupportedError, StoreError, TierError
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo
from nixl_offload.tiers.kinds import open_inspector
from nixl_offload.units import parse_size

T = TypeVar("T")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def set_up(
    parser: ArgumentParser,
    run: Callable[[Namespace], int],
    description: str,
    *,
    config: bool = True,
    json: str = "print JSON",
) -> None:
    """Make ``parser`` call ``run``. Adds CONFIG if ``config``, and ``--json`` unless ``json`` is empty."""
    parser.description = description
    parser.set_defaults(run=run)
    if config:
        parser.add_argument("file", metavar="CONFIG", help="the YAML config")
    if json:
        parser.add_argument("--json", action="store_true", help=json)


def add_selection(parser: ArgumentParser) -> None:
    """Add ``--tier``, ``--namespace`` and ``--tenant``."""
    parser.add_argument("--tier", choices=("slab", "shared_dir", "s3"), help="only this tier of CONFIG")
    parser.add_argument("--namespace", metavar="NAME", help="only this namespace, 32 hex digits as ls prints them")
    parser.add_argument("--tenant", help="only the namespaces of this tenant")


def selected(inspector: Inspector, arguments: Namespace) -> Iterator[NamespaceInfo]:
    """Yield the namespaces that ``--namespace`` and ``--tenant`` select."""
    for namespace in inspector.namespaces():
        if arguments.namespace in (None, namespace.name) and arguments.tenant in (None, namespace.tenant):
            yield namespace


def report_nothing_found(arguments: Namespace, found: object) -> bool:
    """If ``found`` is empty and a namespace or tenant was named (perhaps misspelt), say so on stderr; return True."""
    asked = [f"{word} {value}" for word in ("namespace", "tenant") if (value := getattr(arguments, word)) is not None]
    if found or not asked:
        return False
    print(f"nixl-offload: nothing is there of {' and '.join(asked)}", file=sys.stderr)
    return True


def keys_of(config: Config) -> ChunkKeys | None:
    """Return the config's keys. None: it names no file, or the file cannot be read, which is printed to stderr."""
    if config.authenticate is None:
        return None
    try:
        return read_key_file(config.authenticate.key_file)
    except ConfigError as error:
        print(f"nixl-offload: {error}; going on without a key", file=sys.stderr)
        return None


def stored_tiers(config: Config, arguments: Namespace) -> list[StoredConfig]:
    """Return the selected tiers that outlive a server. Raises ConfigError if none is, or ``--namespace`` is wrong."""
    if arguments.namespace is not None and not re.fullmatch("[0-9a-f]{32}", arguments.namespace):
        said = f"--namespace: {arguments.namespace!r} is not one; allowed: 32 hex digits, as ls prints them"
        raise ConfigError(said)
    if not config.stored:
        raise ConfigError(f"{arguments.file}: tiers: only memory, which cannot be looked at from outside the server")
    found = [tier for tier in config.stored if arguments.tier in (None, tier.kind)]
    if not found:
        said = f"--tier: {arguments.tier!r} is not among the tiers of {arguments.file}; allowed: "
        raise ConfigError(said + ", ".join(tier.kind for tier in config.stored))
    return found


class TierFailure(NamedTuple):
    """A tier that could not be inspected; commands go on with the other tiers."""

    kind: str
    where: str | None
    words: str


def visit(arguments: Namespace, config: Config, call: Callable[[Inspector], T]) -> Iterator[T | TierFailure]:
    """Open the tiers that ``--tier`` selects, one after the other, and yield the result of ``call`` for each.

    If a tier cannot be opened or fails, print the error to stderr and yield a ``TierFailure``. Raises ConfigError.
    """
    for tier in stored_tiers(config, arguments):
        where = None
        try:
            with contextlib.closing(open_inspector(tier)) as inspector:
                where = inspector.where
                result: T | TierFailure = call(inspector)
        except (StoreError, TierError, NotSupportedError) as error:
            sys.stdout.flush()
            print(f"nixl-offload: {error}", file=sys.stderr)
            result = TierFailure(tier.kind, where, str(error))
        yield result


def about_size(size_bytes: float) -> str:
    """Render a size with about three digits: ``3.14GiB``."""
    number, unit = float(size_bytes), 0
    while number >= 1023.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    decimals = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f}{_UNITS[unit]}"


def moment(seconds: float | None) -> str:
    """Render seconds since the epoch in UTC: ``2026-11-21 14:03:13Z``; ``-`` for None and for times out of range."""
    try:
        return "-" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (ValueError, OverflowError, OSError):
        return "-"


def plural(count: int, noun: str) -> str:
    """Return ``1 object`` or ``1,234 objects``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return ``read`` as a type for argparse. The message of its ValueError is shown after the argument's text."""

    def checked(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} {error}") from None

    return checked


def read_size(text: str) -> int:
    """Return a size from the command line in bytes; plain digits are bytes. Raises ValueError."""
    return parse_size(int(text) if text.isascii() and text.isdigit() else text)


class Progress:
    """Progress on stderr. A terminal gets one line that is overwritten, a log a line every ten seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._each_s = 0.2 if self._is_terminal else 10.0
        self._next_s = time.monotonic() + self._each_s

    def __call__(self, text: str) -> None:
        """Show ``text``, unless a text was shown very recently."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._each_s
            line = f"\r\x1b[K{text}" if self._is_terminal else f"nixl-offload: {text}\n"
            print(line, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erase the line."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
