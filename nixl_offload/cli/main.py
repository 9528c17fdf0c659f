"""The command ``nixl-offload``: parses arguments, calls one command, turns our errors into exit codes.

Threading: a process of its own, one thread. Exit codes: 0 done, 1 failed, 2 wrong usage or config, 130 interrupted by
SIGINT or SIGTERM; both clean up alike. A failure prints a line on stderr. With ``--json`` one of exit code 1 or 2 also
prints ``{"error": ...}`` on stdout; commands raise nothing once they print JSON. argparse reports wrong options.
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
from collections.abc import Sequence
from typing import Final

from nixl_offload import __version__
from nixl_offload.errors import ConfigError, NixlOffloadError

COMMANDS: Final = {
    "configs": ("show", "list the sample configs, or print one of them"),
    "show": ("show", "check a config file and print what to pass to vLLM"),
    "check": ("check.command", "try every tier here; say what is wrong and how to fix it"),
    "bucket": ("bucket", "make a bucket ready (bucket init)"),
    "ls": ("ls", "list what is stored, by tier and namespace"),
    "stat": ("stat", "decode the headers of one chunk"),
    "verify": ("verify", "read and check everything that is stored"),
    "gc": ("gc", "delete the oldest chunks of a bucket or shared directory"),
    "schema": ("show", "print the config's JSON Schema, which lets editors complete and check it"),
}
"""Commands in the order of ``--help``: the module below ``nixl_offload.cli``, and the line in ``--help``. Modules are
imported only for their own commands, so ``--help`` is quick. Each has a function ``add_<command>``."""
_OUTPUT_REFUSED: Final = (errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO, errno.EPIPE)

_DESCRIPTION = """\
Keeps vLLM's KV cache in host memory, local files, a bucket or a shared directory. A prompt that was seen before is
loaded instead of computed. Start with a config file, say kv.yaml (`nixl-offload configs` has samples):

    chunk_tokens: 256
    tiers:
      - {kind: slab, path: /mnt/nvme/kv, capacity: 500GiB}

then

    nixl-offload show kv.yaml            # is the file right? prints it with all defaults, and what to pass to vLLM
    nixl-offload check kv.yaml           # does each tier work on this machine? what is wrong, and how to fix it
    vllm serve MODEL --shutdown-timeout 10 \\
        --kv-transfer-config "$(nixl-offload show --kv-transfer-config kv.yaml)"

Later, with or without a running server:

    nixl-offload ls kv.yaml              # what is stored, by model and tenant
    nixl-offload verify kv.yaml          # reads and checks all of it

With {kind: s3, bucket: our-kv-cache, ttl: 7d, capacity: 20TiB} in place of the file, many servers share one cache:

    nixl-offload bucket init kv.yaml     # once: shows what the bucket lacks, asks, applies it
    nixl-offload gc kv.yaml --delete     # every hour: brings the bucket down to its capacity, oldest first

`nixl-offload COMMAND --help` says more, with examples. Exit codes: 0 done; 1 something is wrong, missing or not done,
or the storage failed; 2 wrong usage or config; 130 interrupted. With --json, failures print {"error": "..."}.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. For usage errors argparse raises SystemExit(2)."""
    # A stream that was closed before the start (`>&-`) is None in Python.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 -- for as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    words = sys.argv[1:] if argv is None else argv
    try:
        return _run(words)
    except NixlOffloadError as error:
        message, code = str(error), 2 if isinstance(error, ConfigError) else 1
        if "--json" in words:
            with contextlib.suppress(OSError):
                print(json.dumps({"error": message}), flush=True)
    except OSError as error:
        # Errors of storage are translated where they happen. The rest is stdout: `| head`, or `> file` on a full disk.
        if error.filename is not None or error.errno not in _OUTPUT_REFUSED:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at exit
        message, code = f"the output cannot be written: {os.strerror(error.errno)}", 1
        if isinstance(error, BrokenPipeError):  # the reader has gone
            return code
    except (KeyboardInterrupt, RuntimeError) as error:
        # A signal while CPython starts a thread may appear as RuntimeError "release unlocked lock".
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        message, code = "interrupted", 130
    print(f"nixl-offload: {message}", file=sys.stderr)
    return code


def _run(words: Sequence[str]) -> int:
    """Run one command. Meanwhile SIGTERM raises KeyboardInterrupt, so that scratch files are removed."""
    arguments = _parser(next((word for word in words if not word.startswith("-")), "")).parse_args(words)
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler) if is_main else None
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _parser(*asked: str) -> argparse.ArgumentParser:
    """Return the parser. Only the commands in ``asked`` are imported and get their arguments."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="nixl-offload", description=_DESCRIPTION, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"nixl-offload {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=raw)
        if name in asked:
            getattr(importlib.import_module(f"nixl_offload.cli.{module}"), f"add_{name}")(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
