"""Reads what configs of earlier releases say: ``kind: file`` with a ``layout``, and movers that are gone.

Threading: pure functions over the data as the YAML gave it, whatever that is; a log line for a mover that is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

logger = logging.getLogger(__name__)

KIND_OF_LAYOUT: Final = {"slab": "slab", "tree": "shared_dir"}
"""The kind of tier that each ``layout`` of ``kind: file`` is now; left out, it was ``slab``."""

RETIRED_MOVERS: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "gds": ("gds_mt", "NIXL's GDS plugin can report failed I/O as done", ("file", "slab", "shared_dir")),
    "boto3": ("obstore", "boto3 now serves administration only", ("s3",)),
}
"""Old name of a mover → its replacement, why it went, and the kinds of tiers that had it."""

_warned: set[str] = set()

_Tier = Mapping[str, Any]


def rewrite_kinds(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with tiers of ``kind: file`` in today's spelling. Paths into it stay what they were.

    A ``layout`` that was never known is left as it is, and the tier with it.
    """
    return _each_tier(config, _rewrite_kind)


def replace_retired_movers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the replacements of ``RETIRED_MOVERS``. Warns once per process and mover."""
    return _each_tier(config, _replace_mover)


def old_spelling(tier: object) -> str:
    """Return the old spelling of the kind of ``tier``, as the user wrote it; empty for today's."""
    if not isinstance(tier, Mapping) or tier.get("kind") != "file":
        return ""
    return f"kind: file with layout: {tier.get('layout', 'slab')}"


def _each_tier(config: Mapping[str, Any], rewrite: Callable[[_Tier], _Tier]) -> dict[str, Any]:
    tiers = config.get("tiers")
    if not isinstance(tiers, list | tuple):
        return dict(config)
    return {**config, "tiers": [rewrite(tier) if isinstance(tier, Mapping) else tier for tier in tiers]}


def _rewrite_kind(tier: _Tier) -> _Tier:
    layout = tier.get("layout", "slab")
    if tier.get("kind") != "file" or not isinstance(layout, str) or layout not in KIND_OF_LAYOUT:
        return tier
    rest = {name: value for name, value in tier.items() if name not in ("kind", "layout")}
    return {"kind": KIND_OF_LAYOUT[layout], **rest}


def _replace_mover(tier: _Tier) -> _Tier:
    old = tier.get("mover")
    if not isinstance(old, str) or old not in RETIRED_MOVERS:
        return tier
    new, why, kinds = RETIRED_MOVERS[old]
    if tier.get("kind") not in kinds:
        return tier
    if old not in _warned:
        _warned.add(old)
        logger.warning("mover: %s is gone, because %s; using mover: %s", old, why, new)
    return {**tier, "mover": new}
