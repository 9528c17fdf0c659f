"""An operating-system error as an error of a tier. ``stores.filesystem`` has the table of causes.

Threading: pure functions, safe anywhere.
"""

from __future__ import annotations

from nixl_offload.errors import TierError
from nixl_offload.stores.filesystem import cause_of, words_of

__all__ = ["cause_of", "tier_error"]


def tier_error(error: OSError, doing: str) -> TierError:
    """Translate ``error``; ``doing`` says in a few words what failed ("cannot open /x"). Raise it ``from error``."""
    return TierError(f"{doing}: {words_of(error)}", cause=cause_of(error.errno))
