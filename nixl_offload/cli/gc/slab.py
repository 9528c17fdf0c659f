"""``nixl-offload gc`` over a slab's directory: whole namespaces that nobody serves any more, never single chunks.

A slab keeps to its capacity by itself, and an engine that starts removes other namespaces when it needs their room;
until then those of models that are no longer served lie there. Threading: one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import Any, Final, TextIO

from nixl_offload.cli.common import report_nothing_found
from nixl_offload.cli.terminal import about_size, moment, plural
from nixl_offload.errors import ConfigError
from nixl_offload.tiers.inspect import Inspector, NamespaceInfo
from nixl_offload.units import format_duration

_HINT: Final = "a slab keeps to its capacity by itself; --namespace, --tenant or --older-than choose what may go"


@dataclass(slots=True)
class _Listed:
    info: NamespaceInfo
    size_bytes: int
    chosen: bool
    deleted: bool = False
    failure: str | None = None


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
    found = [
        _Listed(info, inspector.used_bytes(info) or 0, chooses and _is_chosen(info, arguments))
        for info in inspector.namespaces()
    ]
    chosen = [each for each in found if each.chosen]
    selects = arguments.namespace is not None or arguments.tenant is not None
    missing = selects and not any(_is_named(each.info, arguments) for each in found)
    if missing:
        report_nothing_found(arguments)
    if not arguments.json:
        _print_findings(inspector, found, arguments, out)
        out.flush()
    if arguments.delete:
        results = inspector.remove([each.info for each in chosen]) if chosen else []
        for each, failure in zip(chosen, results, strict=True):
            each.failure, each.deleted = failure, failure is None
        if not arguments.json:
            gone = [each.size_bytes for each in found if each.deleted]
            print(f"Deleted: {plural(len(gone), 'namespace')}, {about_size(sum(gone))}.", file=out)
    if arguments.json:
        print(json.dumps(_to_dict(inspector, found, arguments), indent=2), file=out)
    failures = [each.failure for each in found if each.failure]
    for failure in failures:
        print(f"nixl-offload: {failure}; run again", file=sys.stderr)
    return 1 if failures or (missing and arguments.tenant is not None) else 0


def _is_named(info: NamespaceInfo, arguments: argparse.Namespace) -> bool:
    return arguments.namespace in (None, info.name) and arguments.tenant in (None, info.tenant)


def _is_chosen(info: NamespaceInfo, arguments: argparse.Namespace) -> bool:
    if info.used_s is None or info.manifest is None:
        return False  # what no manifest identifies as ours is never removed
    return _is_named(info, arguments) and (
        arguments.older_than is None or info.used_s < time.time() - arguments.older_than
    )


def _print_findings(inspector: Inspector, found: list[_Listed], arguments: argparse.Namespace, out: TextIO) -> None:
    total = about_size(sum(each.size_bytes for each in found))
    print(f"{inspector.where}: {plural(len(found), 'namespace')}, {total} on disk", file=out)
    holder = next((each.info.in_use for each in found if each.info.in_use), None)
    print(f"Open now: {holder}." if holder else "No engine has the directory open.", file=out)
    for each in sorted(found, key=lambda each: each.info.used_s or 0.0):
        last = moment(each.info.used_s) if each.info.used_s is not None else "?"
        print(
            f"  {each.info.path}  {each.info.owner}, {about_size(each.size_bytes)}, last opened {last}: "
            f"{'to delete' if each.chosen else 'stays'}",
            file=out,
        )
    if arguments.older_than is not None:
        print(f"Limit: last opened more than {format_duration(arguments.older_than)} ago.", file=out)
    if not arguments.delete:
        words = "--delete does it" if any(each.chosen for each in found) else _HINT
        print(f"Nothing was deleted; {words}.", file=out)


def _to_dict(inspector: Inspector, found: list[_Listed], arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "where": inspector.where,
        "selection": {"namespace": arguments.namespace, "tenant": arguments.tenant},
        "limits": {"older_than_s": arguments.older_than},
        "namespaces": [
            {
                "name": each.info.name,
                "part": each.info.part or None,
                "tenant": each.info.tenant,
                "model": each.info.model,
                "bytes": each.size_bytes,
                "last_opened_s": each.info.used_s,
                "open_now": each.info.in_use is not None,
                "chosen": each.chosen,
                "deleted": each.deleted,
                "failure": each.failure,
            }
            for each in found
        ],
    }
