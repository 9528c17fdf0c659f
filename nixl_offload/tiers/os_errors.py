"""What an errno means for a tier: the one place where operating-system errors of tiers in files are translated.

Threading: pure functions, safe anywhere.
"""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

from nixl_offload.errors import TierError

_CAUSES: Final = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EFBIG: "full",
    errno.EROFS: "readonly",
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.ESTALE: "missing",
    errno.ENODEV: "missing",
    errno.ENXIO: "missing",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EMFILE: "files",
    errno.ENFILE: "files",
}


def cause_of(error_number: int | None) -> str:
    """Return the ``TierError.cause`` that an errno stands for; ``io`` for all that has no word of its own."""
    return _CAUSES.get(error_number or 0, "io")


def tier_error(error: OSError, doing: str) -> TierError:
    """Translate ``error``; ``doing`` says in a few words what failed ("cannot open /x"). Raise it ``from error``."""
    why = os.strerror(error.errno) if error.errno else str(error)
    if error.errno == errno.EMFILE:
        why += f" (RLIMIT_NOFILE, ulimit -n: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
    return TierError(f"{doing}: {why}", cause=cause_of(error.errno))
