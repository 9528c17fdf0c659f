"""The scenarios by name, and how many schedules each is tried under: about eight minutes of a quiet core in all."""

from __future__ import annotations

from typing import NamedTuple


class Share(NamedTuple):
    """Numbers of schedules."""

    random: int
    """Random walks and priorities."""
    bounded: int
    """That deviate from the default schedule once, or twice where fewer do once: shared by several of the programs that
    the scenario's own choices make, by others for another seed.
    """
    fine: int
    """At random, with switch points at attributes, too."""


_LARGE = Share(250, 100, 50)
_SMALL = Share(300, 600, 200)

PLAN = {
    "world/serving": _LARGE,
    "world/promoting": _LARGE,
    "world/resetting": _LARGE,
    "world/failing": _LARGE,
    "world/sleeping": _LARGE,
    "world/ending": _LARGE,
    "lookups/asking": _SMALL,
    "lookups/closing": _SMALL,
    "lookups/lookups": _LARGE,
    "storage/journal": _SMALL,
    "storage/journal lost": _SMALL,
    "storage/calls": _SMALL,
    "storage/copying": _SMALL,
    "storage/over a store": _SMALL,
    "storage/retried": _SMALL,
    "storage/launching": _SMALL,
    "opening/in the background": _SMALL,
    "opening/ranks": _LARGE,
    "opening/weights": _SMALL,
}
