"""Movers of earlier releases that a config may still name, and what takes their place.

Threading: pure but for a log line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

logger = logging.getLogger(__name__)

RETIRED_MOVERS: Final[Mapping[str, tuple[str, str]]] = {
    "gds": ("gds_mt", "NIXL's GDS plugin can report failed I/O as done"),
    "boto3": ("obstore", "boto3 now serves administration only"),
}
"""Old name of a mover → its replacement, and why it went."""

_told: set[str] = set()


def replace_retired_movers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config``, unchecked as it may be, with the replacements in it. Warns once per process and mover."""
    tiers = config.get("tiers")
    if not isinstance(tiers, list | tuple):
        return dict(config)
    return {**config, "tiers": [_replaced(tier) if isinstance(tier, Mapping) else tier for tier in tiers]}


def _replaced(tier: Mapping[str, Any]) -> Mapping[str, Any]:
    old = tier.get("mover")
    if not isinstance(old, str) or old not in RETIRED_MOVERS:
        return tier
    new, why = RETIRED_MOVERS[old]
    if old not in _told:
        _told.add(old)
        logger.warning("mover: %s is gone, because %s; using mover: %s", old, why, new)
    return {**tier, "mover": new}
