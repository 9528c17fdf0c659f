"""``nixl-offload gc`` over a slab's directory: whole namespaces that nobody serves any more, never single chunks.

A slab keeps to its capacity by itself, and an engine that starts removes other namespaces when it needs their room;
until then those of models that are no longer served lie there. Threading: one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final, TextIO

from nixl_offload.cli.common import report_nothing_found, selects
from nixl_offload.cli.terminal import about_size, moment, plural
from nixl_offload.errors import ConfigError
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo
from nixl_offload.units import format_duration

_HINT: Final = "a slab keeps to its capacity by itself; --namespace, --tenant or --older-than choose what may go"


def remove_namespaces(arguments: argparse.Namespace, inspector: Inspector, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError, TierError (``locked``: by whom; nothing was deleted)."""
    chooses = any(value is not None for value in (arguments.namespace, arguments.tenant, arguments.older_than))
    if arguments.max_size is not None:
        raise ConfigError(
            "--max-size: has no meaning for a slab, which keeps to its capacity by itself; here gc removes whole "
            "namespaces: --namespace, --tenant or --older-than"
        )
    if arguments.delete and not chooses:
        raise ConfigError(
            "--delete: which namespaces? A slab keeps to its capacity by itself; say --namespace, --tenant or "
            "--older-than (since an engine last opened them)"
        )
    before_s = None if arguments.older_than is None else time.time() - arguments.older_than
    infos = list(inspector.namespaces())
    rows = [_row(info, inspector.used_bytes(info) or 0, chooses and _goes(info, arguments, before_s)) for info in infos]
    selection = {"namespace": arguments.namespace, "tenant": arguments.tenant}
    missing = any(selection.values()) and not any(selects(arguments, info) for info in infos)
    if missing:
        report_nothing_found(arguments)
    if not arguments.json:
        _print_findings(inspector.where, rows, infos, arguments, out)
        out.flush()
    chosen = [(info, row) for info, row in zip(infos, rows, strict=True) if row["chosen"]]
    if arguments.delete:
        results = inspector.remove([info for info, _ in chosen]) if chosen else []
        for (_, row), failure in zip(chosen, results, strict=True):
            row |= {"failure": failure, "deleted": failure is None}
        if not arguments.json:
            gone = [row["bytes"] for row in rows if row["deleted"]]
            print(f"Deleted: {plural(len(gone), 'namespace')}, {about_size(sum(gone))}.", file=out)
    if arguments.json:
        limits = {"older_than_s": arguments.older_than}
        plain = {"where": inspector.where, "selection": selection, "limits": limits, "namespaces": rows}
        print(json.dumps(plain, indent=2), file=out)
    failures = [row["failure"] for row in rows if row["failure"]]
    for failure in failures:
        print(f"nixl-offload: {failure}; run again", file=sys.stderr)
    return 1 if failures or (missing and arguments.tenant is not None) else 0


def _goes(info: NamespaceInfo, arguments: argparse.Namespace, before_s: float | None) -> bool:
    if info.used_s is None or info.manifest is None:
        return False  # what no manifest identifies as ours is never removed
    return selects(arguments, info) and (before_s is None or info.used_s < before_s)


def _row(info: NamespaceInfo, size_bytes: int, goes: bool) -> dict[str, Any]:
    return {
        "name": info.name,
        "part": info.part or None,
        "tenant": info.tenant,
        "model": info.model,
        "bytes": size_bytes,
        "last_opened_s": info.used_s,
        "open_now": info.in_use is not None,
        "chosen": goes,
        "deleted": False,
        "failure": None,
    }


def _print_findings(
    where: str, rows: list[dict[str, Any]], infos: list[NamespaceInfo], arguments: argparse.Namespace, out: TextIO
) -> None:
    total = about_size(sum(row["bytes"] for row in rows))
    print(f"{where}: {plural(len(rows), 'namespace')}, {total} on disk", file=out)
    holder = next((info.in_use for info in infos if info.in_use), None)
    print(f"Open now: {holder}." if holder else "No engine has the directory open.", file=out)
    for info, row in sorted(zip(infos, rows, strict=True), key=lambda pair: pair[0].used_s or 0.0):
        last = moment(info.used_s) if info.used_s is not None else "?"
        goes = "to delete" if row["chosen"] else "stays"
        print(f"  {info.path}  {info.owner}, {about_size(row['bytes'])}, last opened {last}: {goes}", file=out)
    if arguments.older_than is not None:
        print(f"Limit: last opened more than {format_duration(arguments.older_than)} ago.", file=out)
    if not arguments.delete:
        words = "--delete does it" if any(row["chosen"] for row in rows) else _HINT
        print(f"Nothing was deleted; {words}.", file=out)
