"""The commands: the module of each below ``nixl_offload.cli``, and what ``nixl-offload --help`` says of it.

Threading: constants. A module is imported when its command is asked for, so that ``--help`` need not wait for numpy. It
has a function ``add_<command>``.
"""

from __future__ import annotations

from typing import Final

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
"""In the order of ``--help``."""
