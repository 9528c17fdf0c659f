"""What ``nixl-offload gc`` found, plans and did: as text for people and as JSON.

Threading: pure but for printing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TextIO

from nixl_offload.cli.gc.collect import STALE_DRAFT_S, Census, NamespaceCensus, Outcome
from nixl_offload.cli.terminal import about_size, moment, plural
from nixl_offload.tiers.shared.sweep import GRACE_S, Plan, Tally
from nixl_offload.units import format_duration

_HEADINGS = ("namespace", "tenant", "model", "chunks", "objects", "size", "oldest", "newest")
_RIGHT = ("chunks", "objects", "size")


@dataclass(slots=True)
class GcReport:
    """All that there is to tell."""

    where: str
    selection: dict[str, str | None]
    census: Census
    max_bytes: int | None
    older_than_s: float | None
    plan: Plan
    tree: bool
    outcome: Outcome | None = None
    """None: only looked."""

    def print_findings(self, out: TextIO) -> None:
        """Print what is there and what the plan is."""
        total = self.census.ages().total
        said = " and ".join(f"{name} {value}" for name, value in self.selection.items() if value)
        print(f"{self.where}{f', {said}' if said else ''}: {_counted(total)}", file=out)
        if self.census.foreign_objects:
            print(f"{plural(self.census.foreign_objects, 'foreign object')} beside them, never touched", file=out)
        if self.census.namespaces:
            print(file=out)
            _print_table([_row(namespace) for namespace in self.census.namespaces], out)
            print(file=out)
        print(f"Limits: {self._limits()}.", file=out)
        if self.max_bytes is not None or self.older_than_s is not None:
            goes = f"{_counted(self.plan.estimate)} to delete" if self.plan.estimate.chunks else "nothing to delete"
            print(f"Plan: {goes}; {about_size(self.plan.kept_bytes)} stay.", file=out)
        if self.plan.over_bytes:
            print(
                f"That is {about_size(self.plan.over_bytes)} too much, but what is left was written or refreshed "
                f"within the last {format_duration(GRACE_S)}; later runs will get to it.",
                file=out,
            )

    def print_outcome(self, out: TextIO) -> None:
        """Print what was done."""
        outcome = self.outcome
        if outcome is None:
            drafts = " (and what writers that died have left)" if self.tree and not any(self.selection.values()) else ""
            if self.plan.estimate.chunks or drafts:
                print(f"Nothing was deleted; --delete does it{drafts}.", file=out)
            return
        print(f"Deleted: {_counted(outcome.deleted)}.", file=out)
        if outcome.manifests:
            print(f"Deleted: {plural(outcome.manifests, 'manifest')} of namespaces that are empty.", file=out)
        if outcome.drafts:
            age = format_duration(STALE_DRAFT_S)
            print(f"Deleted: {plural(outcome.drafts, 'draft')} older than {age}, of writers that died.", file=out)

    def print_failures(self, err: TextIO) -> None:
        """Print what went wrong, one line each."""
        outcome = self.outcome
        if outcome is None or not outcome.failures:
            return
        for failure in outcome.failures:
            print(f"nixl-offload: {failure}", file=err)
        end = "gave up after several failures in a row" if outcome.gave_up else "the rest went on"
        count = f"up to {plural(outcome.failed_objects, 'object')} not deleted; " if outcome.failed_objects else ""
        print(f"nixl-offload: {count}{end}; run again", file=err)

    def to_dict(self) -> dict[str, Any]:
        """Return it all as plain data. Times are seconds since the epoch, sizes bytes."""
        plan, outcome = self.plan, self.outcome
        return {
            "where": self.where,
            "selection": self.selection,
            "namespaces": [_namespace_dict(namespace) for namespace in self.census.namespaces],
            "foreign_objects": self.census.foreign_objects,
            "total": _tally_dict(self.census.ages().total),
            "limits": {"max_bytes": self.max_bytes, "older_than_s": self.older_than_s},
            "plan": {
                "delete": _tally_dict(plan.estimate),
                "keep_bytes": plan.kept_bytes,
                "over_bytes": plan.over_bytes,
            },
            "outcome": None
            if outcome is None
            else {
                "deleted": _tally_dict(outcome.deleted),
                "manifests": outcome.manifests,
                "drafts": outcome.drafts,
                "failed_objects": outcome.failed_objects,
                "failures": outcome.failures,
                "gave_up": outcome.gave_up,
            },
        }

    def _limits(self) -> str:
        limits = []
        if self.max_bytes is not None:
            limits.append(f"at most {about_size(self.max_bytes)}")
        if self.older_than_s is not None:
            limits.append(f"nothing older than {format_duration(max(self.older_than_s, GRACE_S))}")
        return ", ".join(limits) or "none; say --max-size or --older-than, or capacity or ttl in the config"


def _counted(tally: Tally) -> str:
    return f"{plural(tally.chunks, 'chunk')} in {plural(tally.objects, 'object')}, {about_size(tally.size_bytes)}"


def _row(namespace: NamespaceCensus) -> tuple[str, ...]:
    total = namespace.ages.total
    return (
        namespace.name,
        namespace.tenant or "?",
        namespace.model or "?",
        f"{total.chunks:,}",
        f"{total.objects:,}",
        about_size(total.size_bytes),
        moment(namespace.ages.oldest_s),
        moment(namespace.ages.newest_s),
    )


def _print_table(rows: list[tuple[str, ...]], out: TextIO) -> None:
    table = [_HEADINGS, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADINGS))]
    for row in table:
        cells = (
            cell.rjust(width) if heading in _RIGHT else cell.ljust(width)
            for heading, cell, width in zip(_HEADINGS, row, widths, strict=True)
        )
        print("  ".join(cells).rstrip(), file=out)


def _tally_dict(tally: Tally) -> dict[str, int]:
    return {"chunks": tally.chunks, "objects": tally.objects, "bytes": tally.size_bytes}


def _namespace_dict(namespace: NamespaceCensus) -> dict[str, Any]:
    ages = namespace.ages
    return {
        "name": namespace.name,
        "tenant": namespace.tenant,
        "model": namespace.model,
        **_tally_dict(ages.total),
        "oldest_s": ages.oldest_s if math.isfinite(ages.oldest_s) else None,
        "newest_s": ages.newest_s if math.isfinite(ages.newest_s) else None,
    }
