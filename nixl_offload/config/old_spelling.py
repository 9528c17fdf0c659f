"""Reads what earlier releases wrote: ``kind: file`` with ``layout: slab`` or ``layout: tree``.

Threading: pure functions over the data as the YAML gave it, whatever that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

KIND_OF_LAYOUT: Final = {"slab": "slab", "tree": "shared_dir"}
"""The kind of tier that each ``layout`` of ``kind: file`` is now; left out, it was ``slab``."""


def rewrite_tiers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with tiers of ``kind: file`` in today's spelling. Paths into it stay what they were.

    A ``layout`` that was never known is left as it is, and the tier with it.
    """
    tiers = raw.get("tiers")
    if not isinstance(tiers, list | tuple):
        return dict(raw)
    return {**raw, "tiers": [_rewrite(tier) if isinstance(tier, Mapping) else tier for tier in tiers]}


def spelled_as(tier: object) -> str:
    """Return the old spelling of the kind of ``tier``, as the user wrote it; empty for today's."""
    if not isinstance(tier, Mapping) or tier.get("kind") != "file":
        return ""
    return f"kind: file with layout: {tier.get('layout', 'slab')}"


def _rewrite(tier: Mapping[str, Any]) -> Mapping[str, Any]:
    layout = tier.get("layout", "slab")
    if tier.get("kind") != "file" or not isinstance(layout, str) or layout not in KIND_OF_LAYOUT:
        return tier
    rest = {name: value for name, value in tier.items() if name not in ("kind", "layout")}
    return {"kind": KIND_OF_LAYOUT[layout], **rest}
