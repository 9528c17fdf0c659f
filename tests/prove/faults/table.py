"""Which faults a tier can meet at a point.

Threading: constants and pure functions. Imports nothing of the product, for a cell sets the clock before it does.
"""

from __future__ import annotations

from typing import Final

TIERS: Final = ("memory", "slab", "shared_dir", "s3_obj", "s3_obstore")
"""``s3_obj``: over NIXL's OBJ plugin; ``s3_obstore``: over that client."""
POINTS: Final = (
    *("lookup", "store", "load", "write-through", "promotion", "eviction"),
    *("start", "shutdown", "gc", "verify", "sleep"),
)
FAULTS: Final = (
    *("EIO", "ENOSPC", "EROFS", "short", "long", "slow", "hang", "flipped", "truncated", "swapped", "stale"),
    *("vanished", "permission", "500", "503", "403", "reset", "wrong length", "late write", "clock jump", "fork"),
    "OOM of staging",
)

_ERRNOS = frozenset({"EIO", "ENOSPC", "EROFS", "permission"})
ANSWERS: Final = frozenset({"500", "503", "403", "reset"})
RESTING: Final = frozenset({"long", "flipped", "truncated", "swapped", "stale", "vanished", "wrong length"})
"""What befalls chunks that lie in a tier."""

_SENSELESS_POINTS: Final = {
    ("memory", "gc"): "what lies in a server's memory goes with it: no command looks into it",
    ("memory", "verify"): "what lies in a server's memory goes with it: no command looks into it",
    ("s3_obj", "gc"): "commands reach a bucket over obstore, whatever moves its chunks: see s3_obstore/gc",
    ("s3_obj", "verify"): "commands reach a bucket over obstore, whatever moves its chunks: see s3_obstore/verify",
    ("slab", "gc"): "gc is for tiers that servers share",
    ("s3_obj", "eviction"): "servers evict nothing from a bucket; gc does: see s3_obstore/gc",
    ("s3_obstore", "eviction"): "servers evict nothing from a bucket; gc does: see s3_obstore/gc",
}


def senseless(tier: str, point: str) -> str | None:
    """Return why a whole cell makes no sense, None where it does."""
    return _SENSELESS_POINTS.get((tier, point))


def makes_sense(tier: str, point: str, fault: str) -> bool:
    """Whether a tier can meet ``fault`` at a point."""
    if senseless(tier, point) is not None:
        return False
    if tier == "memory":
        if fault in _ERRNOS | ANSWERS | {"short", "slow", "long", "truncated", "vanished", "wrong length"}:
            return False  # copies within memory meet no storage; a slot has one length
        if fault in RESTING:
            return point not in {"start", "shutdown"}  # memory is empty at a start, and gone at the end
        if fault in {"hang", "late write"}:  # of a farther tier's transfer
            return point in {"write-through", "promotion", "shutdown", "sleep"}
        return fault != "OOM of staging" or point in {"start", "sleep"}
    is_bucket, is_command = tier.startswith("s3"), point in {"gc", "verify"}
    absurd = {
        "OOM of staging": is_command or point in {"lookup", "write-through", "promotion"},  # none is needed
        "EROFS": is_bucket or point in {"lookup", "load", "promotion", "verify"},  # or nothing is written
        "permission": is_bucket or (tier == "slab" and point in {"lookup", "load", "promotion"}),  # its file is open
        "ENOSPC": is_command or point in {"lookup", "load", "promotion"},  # nothing is written
        "EIO": (point == "lookup" and tier != "shared_dir") or (is_bucket and is_command),  # a server answers 500
        "short": point in {"lookup", "start"} or (is_command and not is_bucket),  # nothing is transferred
        "late write": point in {"lookup", "start"} or is_command,
        "wrong length": tier == "slab",  # slots have the length of their class
        "hang": tier == "slab" and point == "lookup",  # the index knows
        "slow": tier == "slab" and point == "lookup",
        **dict.fromkeys(ANSWERS, not is_bucket),
    }
    return not absurd.get(fault, False)


def faults_at(tier: str, point: str) -> tuple[str, ...]:
    """Return the faults that make sense there."""
    return tuple(fault for fault in FAULTS if makes_sense(tier, point, fault))
