"""Tells requests with different values of ``cache_salt`` apart, for tiers with ``share_per_salt``.

Threading: the scheduler's thread. A salt may be a user's secret, and as long as a user likes: only a hash of it is
kept, in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nixl_offload.types import NO_SALT, Salt

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Salted:
    """State of a request with a ``cache_salt``."""

    salt: Salt


def note_salt(request: Request, req_context: ReqContext) -> None:
    """Keep for later what ``salt_of`` returns."""
    if request.cache_salt:
        req_context.set_state(Salted(Salt(hash(str(request.cache_salt)) or 1)))


def salt_of(req_context: ReqContext) -> Salt:
    """Return the salt of a request that was noted; else ``NO_SALT``."""
    salted = req_context.get_state(Salted)
    return NO_SALT if salted is None else salted.salt
