"""What commands share: common arguments, the way from a config file to its tiers, sizes and times for people.

Threading: one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple, TextIO, TypeAlias, TypeVar

from nixl_offload.chunk.authentication import ChunkKeys, read_key_file
from nixl_offload.cli.commands import COMMANDS
from nixl_offload.config import Config, StoredConfig
from nixl_offload.errors import ConfigError, NotSupportedError, StoreError, TierError
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo
from nixl_offload.tiers.kinds import open_inspector
from nixl_offload.units import parse_duration, parse_size

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace, TextIO], int],
    *,
    description: str,
    summary: str = "",
    config: bool = True,
    json: str | None = "print JSON",
) -> argparse.ArgumentParser:
    """Add a command that ``run`` carries out, with CONFIG and ``--json`` unless the caller wants none."""
    parser = commands.add_parser(
        name,
        help=summary or COMMANDS[name][1],
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if config:
        parser.add_argument("file", metavar="CONFIG", help="the YAML config")
    if json is not None:
        parser.add_argument("--json", action="store_true", help=json)
    parser.set_defaults(run=run)
    return parser


def add_selection(parser: argparse.ArgumentParser, *, tenant: bool) -> None:
    """Add ``--tier`` and ``--namespace``, and ``--tenant`` if ``tenant``."""
    parser.add_argument("--tier", choices=("slab", "shared_dir", "s3"), help="only this tier of CONFIG")
    parser.add_argument("--namespace", metavar="NAME", help="only this namespace, 32 hex digits as ls prints them")
    if tenant:
        parser.add_argument("--tenant", help="only the namespaces of this tenant")


def selected(inspector: Inspector, arguments: argparse.Namespace) -> Iterator[NamespaceInfo]:
    """Yield the namespaces that ``--namespace`` and ``--tenant`` select."""
    tenant = getattr(arguments, "tenant", None)
    for namespace in inspector.namespaces():
        if arguments.namespace in (None, namespace.name) and tenant in (None, namespace.tenant):
            yield namespace


def keys_of(config: Config) -> ChunkKeys | None:
    """Return the keys that the config names; None: it names none, or, with a line on stderr, they cannot be read."""
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


def stored_tiers(config: Config, arguments: argparse.Namespace) -> list[StoredConfig]:
    """Return the tiers that outlive a server, those that ``--tier`` selects. Raises ConfigError: there is none, or
    ``--namespace`` names none.
    """
    if arguments.namespace is not None and not re.fullmatch("[0-9a-f]{32}", arguments.namespace):
        raise ConfigError(
            f"--namespace: {arguments.namespace!r} is not one; allowed: 32 hex digits, as ls and gc print them"
        )
    found = [tier for tier in config.stored if arguments.tier in (None, tier.kind)]
    if found:
        return found
    if not config.stored:
        raise ConfigError(f"{arguments.file}: tiers: only memory, which cannot be looked at from outside the server")
    raise ConfigError(
        f"--tier: {arguments.tier!r} is not among the tiers of {arguments.file}; allowed: "
        f"{', '.join(tier.kind for tier in config.stored)}"
    )


class TierFailure(NamedTuple):
    """A tier that could not be looked at; the others go on without it."""

    kind: str
    where: str | None
    words: str


def visit(arguments: argparse.Namespace, config: Config, call: Callable[[Inspector], T]) -> Iterator[T | TierFailure]:
    """Open the tiers that ``--tier`` selects, one after the other, and yield what ``call`` returns of each.

    A tier that cannot be opened, or fails meanwhile, is a line on stderr and a ``TierFailure``. Raises ConfigError.
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


def about_size(size_bytes: int) -> str:
    """Render a size to three digits or so: ``3.14GiB``."""
    number, unit = float(size_bytes), 0
    while number >= 1023.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    decimals = 0 if unit == 0 or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f}{_UNITS[unit]}"


def moment(seconds: float | None) -> str:
    """Render a time since the epoch in UTC: ``2026-11-21 14:03:13Z``; ``-`` for none, and for what no calendar has."""
    if seconds is None:
        return "-"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (ValueError, OverflowError, OSError):
        return "-"


def plural(count: int, noun: str) -> str:
    """Return ``1 object`` or ``1,234 objects``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_argument(text: str) -> int:
    """Read a size given on the command line."""
    try:
        return parse_size(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} {exc}") from None


def duration_argument(text: str) -> float:
    """Read a duration given on the command line."""
    try:
        return parse_duration(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} {exc}") from None


def rate_argument(text: str) -> int:
    """Read bytes per second given on the command line, such as 500MB/s."""
    per_second = text.removesuffix("/s")
    if per_second == text:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate; allowed: a size and /s, such as 500MB/s")
    rate = size_argument(per_second)
    if not rate:
        raise argparse.ArgumentTypeError(f"{text!r} would never end")
    return rate


class Progress:
    """Progress on stderr: one line that is overwritten on a terminal; a line every ten seconds in a log."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._each_s = 0.2 if self._is_terminal else 10.0
        self._next_s = time.monotonic() + self._each_s

    def __call__(self, text: str) -> None:
        """Show ``text``, unless something was shown just now."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._each_s
            line = f"\r\x1b[K{text}" if self._is_terminal else f"nixl-offload: {text}\n"
            print(line, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erase the line."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
