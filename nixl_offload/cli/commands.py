"""The commands: the module of each, and what ``nixl-offload --help`` says of it.

Threading: constants. A module is imported when its command is asked for, so that ``--help`` need not wait for numpy.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Command(NamedTuple):
    """One command."""

    module: str
    """Below ``nixl_offload.cli``. It has a function ``add_parser``."""
    summary: str


COMMANDS: Final = {
    "configs": Command("configs", "list the sample configs, or print one of them"),
    "show": Command("show", "check a config file and print what to pass to vLLM"),
    "check": Command("check.command", "try every tier here; say what is wrong and how to fix it"),
    "bucket": Command("bucket", "make a bucket ready (bucket init)"),
    "ls": Command("ls", "list what is stored, by tier and namespace"),
    "stat": Command("stat", "decode the headers of one chunk"),
    "verify": Command("verify.command", "read and check everything that is stored"),
    "gc": Command(
        "gc.command", "delete the oldest chunks of a bucket or shared directory, unused namespaces of a slab"
    ),
    "schema": Command("schema", "print the config's JSON Schema, which lets editors complete and check it"),
}
"""In the order of ``--help``."""
