"""Which faults a tier can meet at a point, and why the others make no sense there.

Threading: constants and pure functions. Imports nothing of the product, for a cell sets the clock before it does.
"""

from __future__ import annotations

from typing import Final

TIERS: Final = ("memory", "slab", "shared_dir", "s3_obj", "s3_obstore")
"""``s3_obj``: over NIXL's OBJ plugin; ``s3_obstore``: over that client."""
POINTS: Final = (
    "lookup",
    "store",
    "load",
    "write-through",
    "promotion",
    "eviction",
    "start",
    "shutdown",
    "gc",
    "verify",
    "sleep",
)
FAULTS: Final = (
    "EIO",
    "ENOSPC",
    "EROFS",
    "short",
    "long",
    "slow",
    "hang",
    "flipped",
    "truncated",
    "swapped",
    "stale",
    "vanished",
    "permission",
    "500",
    "503",
    "403",
    "reset",
    "wrong length",
    "late write",
    "clock jump",
    "fork",
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


def why_not(tier: str, point: str, fault: str) -> str | None:
    """Return why ``fault`` makes no sense there, None where it does."""
    if (why := senseless(tier, point)) is not None:
        return why
    if tier == "memory":
        if fault in _ERRNOS or fault in ANSWERS or fault in {"short", "slow"}:
            return "copies within memory meet no storage: they are whole or the process is gone"
        if fault in {"long", "truncated", "vanished", "wrong length"}:
            return "a slot of memory has one length, and is there as long as the process"
        if fault in RESTING and point in {"start", "shutdown"}:
            return "memory is empty at a start, and gone at the end"
        if fault in {"hang", "late write"} and point not in {"write-through", "promotion", "shutdown", "sleep"}:
            return "nothing but a farther tier's transfer touches a slot of memory from outside"
        if fault == "OOM of staging" and point not in {"start", "sleep"}:
            return "memory is taken at the start"
        return None
    if fault == "OOM of staging" and point in {"write-through", "promotion"}:
        return "what goes to and from slots of memory needs no staging"
    is_bucket = tier.startswith("s3")
    if fault in ANSWERS and not is_bucket:
        return "no server answers for a directory"
    if fault == "EROFS" and is_bucket:
        return "a bucket that cannot be written to answers 403"
    if fault == "permission" and is_bucket:
        return "a bucket that forbids answers 403"
    if point in {"gc", "verify"} and fault in {"late write", "OOM of staging"}:
        return "commands write no chunk, and need no staging"
    if point in {"gc", "verify"} and fault == "short" and not is_bucket:
        return "a file that ends early is truncated"
    if is_bucket and fault == "EIO" and point in {"lookup", "gc", "verify"}:
        return "a server's trouble has a status: see 500"
    if fault in {"ENOSPC", "EROFS"} and point in {"lookup", "load", "promotion", "verify"}:
        return "nothing is written"
    if fault == "ENOSPC" and point == "gc":
        return "nothing is written but what frees space"
    if fault == "permission" and tier == "slab" and point in {"load", "promotion"}:
        return "the slab's file is open"
    if point == "lookup" and fault in {"short", "late write", "OOM of staging"}:
        return "a lookup transfers nothing"
    if point == "lookup" and tier == "slab" and fault in {"hang", "slow", *_ERRNOS}:
        return "the index knows: a lookup reaches no storage"
    if point == "start" and fault in {"short", "late write"}:
        return "a start transfers no chunk"
    if tier == "slab" and fault == "wrong length":
        return "slots have the length of their class; see swapped, which crosses classes, and truncated"
    return None


def faults_at(tier: str, point: str) -> tuple[str, ...]:
    """Return the faults that make sense there."""
    return tuple(fault for fault in FAULTS if why_not(tier, point, fault) is None)
