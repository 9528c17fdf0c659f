"""``nixl-offload gc`` over a slab's directory: whole namespaces that nobody serves any more, never single chunks.

A slab keeps to its capacity by itself, and an engine that starts removes other namespaces when it has no room; until
then those of models that are no longer served lie there. Threading: one thread. Ownership: nothing is removed but under
the directory's lock, which an engine that runs has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, TextIO

from nixl_offload.cli.common import refuse_anothers_directory, tell_of_nothing
from nixl_offload.cli.inventory.base import Held
from nixl_offload.cli.inventory.slab import SlabInventory, shown_holder
from nixl_offload.cli.terminal import about_size, moment, plural
from nixl_offload.config import SlabConfig
from nixl_offload.errors import ConfigError, TierError
from nixl_offload.tiers.lock import DirectoryLock
from nixl_offload.tiers.slab import other_namespaces
from nixl_offload.units import format_duration


@dataclass(slots=True)
class _Namespace:
    held: Held
    size_bytes: int
    chosen: bool
    deleted: bool = False
    failure: str | None = None


def run_on_slab(arguments: argparse.Namespace, tier: SlabConfig, out: TextIO) -> int:
    """Print to ``out``. Raises ConfigError, StoreError, TierError (``locked``: by whom; nothing was deleted)."""
    _check(arguments)
    inventory = SlabInventory(tier)
    found = _look(inventory, arguments)
    by_name = arguments.namespace is not None or arguments.tenant is not None
    if by_name and not any(namespace.chosen for namespace in found):
        tell_of_nothing(arguments.namespace, arguments.tenant)
    if not arguments.json:
        _print_findings(inventory, found, arguments, out)
        out.flush()
    failed = False
    if arguments.delete:
        failed = _delete(inventory, arguments, found)
        if not arguments.json:
            gone = [namespace for namespace in found if namespace.deleted]
            size = about_size(sum(namespace.size_bytes for namespace in gone))
            print(f"Deleted: {plural(len(gone), 'namespace')}, {size}.", file=out)
    if arguments.json:
        print(json.dumps(_to_dict(inventory, found, arguments), indent=2), file=out)
    for namespace in found:
        if namespace.failure:
            print(f"nixl-offload: {namespace.failure}; run again", file=sys.stderr)
    return 1 if failed else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.max_size is not None:
        raise ConfigError(
            "--max-size: has no meaning for a slab, which keeps to its capacity by itself; here gc removes whole "
            "namespaces: --namespace, --tenant or --older-than"
        )
    if arguments.delete and not _selects(arguments):
        raise ConfigError(
            "--delete: which namespaces? A slab keeps to its capacity by itself; say --namespace, --tenant or "
            "--older-than (since an engine last opened them)"
        )


def _selects(arguments: argparse.Namespace) -> bool:
    return any(value is not None for value in (arguments.namespace, arguments.tenant, arguments.older_than))


def _look(inventory: SlabInventory, arguments: argparse.Namespace) -> list[_Namespace]:
    found = []
    for held in inventory.namespaces():
        # What is not recognised as ours by its manifest is never removed: that is ``foreign``'s rule, too.
        chosen = _selects(arguments) and held.used_s is not None and held.manifest is not None
        chosen &= arguments.namespace in (None, held.name) and arguments.tenant in (None, held.tenant)
        if arguments.older_than is not None and held.used_s is not None:
            chosen &= held.used_s < time.time() - arguments.older_than
        found.append(_Namespace(held, inventory.bytes_of(held), chosen))
    return found


def _delete(inventory: SlabInventory, arguments: argparse.Namespace, found: list[_Namespace]) -> bool:
    """Remove what is chosen, and still is once nobody else can use it. Return whether some could not be removed."""
    if not any(namespace.chosen for namespace in found):
        return False
    refuse_anothers_directory(str(inventory.base), "gc")
    lock = DirectoryLock(inventory.base / "lock", brief=True)
    try:
        lock.acquire()
    except TierError as error:
        if error.cause != "locked":
            raise
        holders = [shown_holder(inventory.base), *(namespace.held.in_use for namespace in found)]
        holder = next((holder for holder in holders if holder), "which one is not known")
        raise TierError(
            f"{inventory.where}: an engine has the directory open ({holder}); stop it, then run this again. "
            "Nothing was deleted.",
            cause="locked",
        ) from error
    try:
        for namespace in found:
            if not namespace.chosen:
                continue
            path = inventory.base / namespace.held.path
            used_s = other_namespaces.last_use_s(path)
            if used_s is None or used_s != namespace.held.used_s:
                namespace.failure = f"{path}: was opened or removed meanwhile, left"
                continue
            try:
                other_namespaces.remove(other_namespaces.ForeignNamespace(path, namespace.size_bytes, used_s))
                namespace.deleted = True
            except OSError as error:
                namespace.failure = f"{path}: cannot be removed: {os.strerror(error.errno or 0)}"
    finally:
        lock.release()
    return any(namespace.failure for namespace in found)


def _print_findings(
    inventory: SlabInventory, found: list[_Namespace], arguments: argparse.Namespace, out: TextIO
) -> None:
    total = about_size(sum(namespace.size_bytes for namespace in found))
    print(f"{inventory.where}: {plural(len(found), 'namespace')}, {total} on disk", file=out)
    holder = next((namespace.held.in_use for namespace in found if namespace.held.in_use), None)
    print(f"Open now: {holder}." if holder else "No engine has the directory open.", file=out)
    for namespace in sorted(found, key=lambda namespace: namespace.held.used_s or 0.0):
        held = namespace.held
        opened = moment(held.used_s) if held.used_s is not None else "?"
        mark = "to delete" if namespace.chosen else "stays"
        print(
            f"  {held.path}  tenant {held.tenant or '?'}, model {held.model or '?'}, "
            f"{about_size(namespace.size_bytes)}, last opened {opened}: {mark}",
            file=out,
        )
    if arguments.older_than is not None:
        print(f"Limit: last opened more than {format_duration(arguments.older_than)} ago.", file=out)
    if not arguments.delete:
        words = "--delete does it" if any(namespace.chosen for namespace in found) else _HINT
        print(f"Nothing was deleted; {words}.", file=out)


_HINT = "a slab keeps to its capacity by itself; --namespace, --tenant or --older-than choose what may go"


def _to_dict(inventory: SlabInventory, found: list[_Namespace], arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "where": inventory.where,
        "selection": {"namespace": arguments.namespace, "tenant": arguments.tenant},
        "limits": {"older_than_s": arguments.older_than},
        "namespaces": [
            {
                "name": namespace.held.name,
                "part": namespace.held.part or None,
                "tenant": namespace.held.tenant,
                "model": namespace.held.model,
                "bytes": namespace.size_bytes,
                "last_opened_s": namespace.held.used_s,
                "open_now": namespace.held.in_use is not None,
                "chosen": namespace.chosen,
                "deleted": namespace.deleted,
                "failure": namespace.failure,
            }
            for namespace in found
        ],
    }
