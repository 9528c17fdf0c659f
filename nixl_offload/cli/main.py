"""The command ``nixl-offload``: parses arguments, calls one command, turns our errors into exit codes.

Threading: a process of its own, one thread. Exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted, by
SIGINT or SIGTERM alike: a service manager's stop leaves no more behind than Ctrl-C. A failure is a line on stderr; with
``--json`` it is ``{"error": ...}`` on stdout too, unless the command printed its own JSON before.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn, TextIO, cast

from nixl_offload import __version__
from nixl_offload.cli.commands import COMMANDS
from nixl_offload.errors import ConfigError, NixlOffloadError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
_PACKAGES: Final = {"yaml": "PyYAML"}
"""Of modules that are not called like the package that brings them."""
_OUTPUT_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO)
_LISTINGS: Final = ("configs", "ls", "show", "schema")
"""Their reader may stop early (``| head``). Of other commands the exit code is a verdict, which is not known yet."""

_DESCRIPTION = """\
Keeps vLLM's KV cache in host memory, on local files, in a bucket or in a shared directory, so that a prompt once seen
is loaded instead of computed again. Start with a config file, say kv.yaml (`nixl-offload configs` has samples):

    chunk_tokens: 256
    tiers:
      - {kind: slab, path: /mnt/nvme/kv, capacity: 500GiB}

then

    nixl-offload show kv.yaml            # is the file right? prints it with all defaults, and what to pass to vLLM
    nixl-offload check kv.yaml           # does each tier work on this machine? what is wrong, and how to fix it
    vllm serve MODEL --shutdown-timeout 10 \\
        --kv-transfer-config "$(nixl-offload show --kv-transfer-config kv.yaml)"

Later, beside the running server or without one:

    nixl-offload ls kv.yaml              # what is stored, by model and tenant
    nixl-offload verify kv.yaml          # reads and checks all of it

With {kind: s3, bucket: our-kv-cache, ttl: 7d, capacity: 20TiB} in place of the file, many servers share one cache:

    nixl-offload bucket init kv.yaml     # once: shows what the bucket lacks, asks, applies it
    nixl-offload gc kv.yaml --delete     # every hour: brings the bucket down to its capacity, oldest first

`nixl-offload COMMAND --help` says more, with examples. Exit codes: 0 done, 1 something is wrong or the storage failed,
2 wrong usage or config, 130 interrupted. With --json a command that fails prints {"error": "..."}.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Usage errors leave by SystemExit(2), as argparse does."""
    # Python has None for a stream that was closed before it started (`>&-`): nobody wants to read it.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 -- for as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    words = sys.argv[1:] if argv is None else argv
    _Parser.json = "--json" in words
    output = _Output(sys.stdout)
    try:
        return _run(words, output)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "nixl_offload"):
            raise
        package = _PACKAGES.get(missing, missing)
        message = f"{sys.executable} has no module {missing!r}; {sys.executable} -m pip install {package}"
        return _fail(message, EXIT_FAILED, output)


def _run(words: Sequence[str], output: _Output) -> int:
    """Run one command. Raises ModuleNotFoundError where a package that it needs is not installed."""
    arguments = _parser(next((word for word in words if not word.startswith("-")), "")).parse_args(words)
    try:
        with _terminated_is_interrupted():
            code: int = arguments.run(arguments, cast(TextIO, output))
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # The reader has gone.
        _discard_stdout()
        return 0 if arguments.command in _LISTINGS else EXIT_FAILED
    except OSError as exc:
        # Storage's own errors are translated where they happen; what is left is `> file` on a full disk.
        if exc.filename is not None or exc.errno not in _OUTPUT_REFUSED:
            raise
        _discard_stdout()
        print(f"nixl-offload: the output cannot be written: {os.strerror(exc.errno)}", file=sys.stderr)
        return EXIT_FAILED
    except (NixlOffloadError, KeyboardInterrupt, RuntimeError) as exc:
        # A signal that comes while CPython starts a thread may show as "release unlocked lock".
        error = exc.__context__ if isinstance(exc, RuntimeError) else exc
        if error is not exc and not isinstance(error, KeyboardInterrupt):
            raise
        code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else code
        return _fail(str(error) or "interrupted", code, output)


def _fail(message: str, code: int, output: _Output) -> int:
    """Say why, also as JSON where that is asked for, unless the command printed its own before."""
    if _Parser.json and not output.begun:
        with contextlib.suppress(OSError):
            print(json.dumps({"error": message}), file=sys.stdout, flush=True)
    print(f"nixl-offload: {message}", file=sys.stderr)
    return code


class _Output:
    """Standard output that knows whether something was printed."""

    def __init__(self, stream: TextIO) -> None:
        self.begun = False
        self._stream = stream

    def write(self, text: str) -> int:
        self.begun = True
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Parser(argparse.ArgumentParser):
    """Says on stdout, too, what is wrong with the arguments, where ``json`` is asked for."""

    json = False

    def error(self, message: str) -> NoReturn:
        if self.json:
            print(json.dumps({"error": message}), flush=True)
        super().error(message)


def _discard_stdout() -> None:
    """Keep the interpreter from complaining at exit about what it cannot write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that scratch space is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser with the arguments of every command."""
    return _parser(*COMMANDS)


def _parser(*asked: str) -> argparse.ArgumentParser:
    """Return the parser; only the commands ``asked`` for are imported and have their arguments."""
    parser: argparse.ArgumentParser = _Parser(
        prog="nixl-offload", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"nixl-offload {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        if name in asked:
            getattr(importlib.import_module(f"nixl_offload.cli.{module}"), f"add_{name}")(commands)
        else:
            commands.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())
