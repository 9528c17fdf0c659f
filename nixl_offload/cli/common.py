"""From a config file to the tiers in it, for commands that look at them or after them.

Threading: one thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from nixl_offload.cli.inventory.base import Inventory
from nixl_offload.cli.inventory.shared import SharedInventory
from nixl_offload.cli.inventory.slab import SlabInventory, require_directory
from nixl_offload.config import Config, S3Config, SharedDirConfig, SlabConfig
from nixl_offload.errors import ConfigError, NotSupportedError, StoreError, TierError
from nixl_offload.stores.base import Store
from nixl_offload.stores.select import open_store

T = TypeVar("T")

NAMESPACE_NAME: Final = re.compile(r"[0-9a-f]{32}")
SharedConfig = SharedDirConfig | S3Config
StoredConfig = SlabConfig | SharedConfig
TIER_ERRORS: Final = (StoreError, TierError, NotSupportedError)
"""What one tier may raise without being the others' affair."""
MEMORY_TOLD: Final = (
    "memory tier: lives in the server's processes and cannot be looked at from outside; the server's metrics tell what "
    "it holds"
)


def stored_tiers(config: Config, file: str, kind: str | None = None) -> list[StoredConfig]:
    """Return the tiers that outlive a server: all of them, or those of ``kind``. Raises ConfigError: there is none."""
    stored = [tier for tier in config.tiers if isinstance(tier, StoredConfig)]
    found = [tier for tier in stored if kind in (None, tier.kind)]
    if found:
        return found
    if not stored:
        raise ConfigError(f"{file}: tiers: only memory, which cannot be looked at from outside the server")
    raise ConfigError(
        f"--tier: {kind!r} is not among the tiers of {file}; allowed: {', '.join(t.kind for t in stored)}"
    )


def open_inventory(tier: StoredConfig) -> Inventory:
    """Return what looks at the tier; the caller closes it. Raises StoreError, NotSupportedError."""
    if isinstance(tier, SlabConfig):
        return SlabInventory(tier)
    return SharedInventory(open_existing(tier), kind=tier.kind, capacity_bytes=tier.capacity_bytes)


def check_namespace(text: str | None) -> None:
    """Raise ConfigError for what is no name of a namespace."""
    if text is not None and not NAMESPACE_NAME.fullmatch(text):
        raise ConfigError(f"--namespace: {text!r} is not one; allowed: 32 hex digits, as ls and gc print them")


def collected_tier(config: Config, file: str, kind: str | None = None) -> StoredConfig:
    """Return the tier that ``gc`` looks after: the one that many servers share, or the one of ``kind``.

    A slab is meant where nothing is shared, or where ``kind`` says so. Raises ConfigError when there is no tier to look
    after, or when several are shared and ``kind`` does not say which.
    """
    shared = [tier for tier in config.tiers if isinstance(tier, SharedConfig)]
    if kind is None and len(shared) > 1:
        kinds = [tier.kind for tier in shared]
        raise ConfigError(
            f"{file}: tiers: {' and '.join(kinds)} are both shared, and gc looks after one at a time; say --tier "
            f"{' or --tier '.join(kinds)}"
        )
    if kind is None and shared:
        return shared[0]
    return stored_tiers(config, file, kind)[0]


def s3_tier(config: Config, file: str) -> S3Config:
    """Return the tier that is a bucket. Raises ConfigError when there is none."""
    for tier in config.tiers:
        if isinstance(tier, S3Config):
            return tier
    raise ConfigError(f"{file}: tiers: none of them has kind: s3, so there is no bucket")


def open_existing(tier: SharedConfig) -> Store:
    """Return the tier's store. Raises StoreError where it would have to be made first: nothing can be in it."""
    if isinstance(tier, SharedDirConfig):
        require_directory(Path(tier.path))
    return open_store(tier)


def tell_of_nothing(namespace: str | None, tenant: str | None) -> None:
    """Say on stderr that what was asked for by name is not there: perhaps it is misspelt."""
    asked = [f"{word} {value}" for word, value in (("namespace", namespace), ("tenant", tenant)) if value is not None]
    print(f"nixl-offload: nothing is there of {' and '.join(asked)}", file=sys.stderr)


def refuse_anothers_directory(path: str, command: str) -> None:
    """Raise ConfigError for root in a directory of somebody else: what root makes there, the lock too, no server could
    open.
    """
    if os.geteuid() != 0:
        return
    for place in (os.path.join(path, "lock"), path):
        with contextlib.suppress(OSError):
            owner = os.stat(place, follow_symlinks=False).st_uid
            if owner != 0:
                raise ConfigError(
                    f"{path}: belongs to user {owner}, whose server could not open what root puts there; run this "
                    f"as that user: sudo -u '#{owner}' nixl-offload {command} ..."
                )


@dataclass(frozen=True, slots=True)
class TierFailure:
    """A tier that could not be looked at; the others go on without it."""

    kind: str
    where: str | None
    error: Exception

    def tell(self) -> None:
        """Say it on stderr."""
        print(f"nixl-offload: {self.error}", file=sys.stderr)

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {"tier": self.kind, "where": self.where, "failure": str(self.error)}


def attempt(kind: str, where: str | None, call: Callable[[], T]) -> T | TierFailure:
    """Return what ``call`` returns; what the tier raises is told."""
    try:
        return call()
    except TIER_ERRORS as error:
        failure = TierFailure(kind, where, error)
        failure.tell()
        return failure


def open_inventories(tiers: Sequence[StoredConfig], opened: ExitStack) -> tuple[list[Inventory], list[TierFailure]]:
    """Open what can be looked at, closed with ``opened``, and tell what cannot."""
    found = [attempt(tier.kind, None, partial(open_inventory, tier)) for tier in tiers]
    inventories = [entry for entry in found if not isinstance(entry, TierFailure)]
    for inventory in inventories:
        opened.callback(inventory.close)
    return inventories, [entry for entry in found if isinstance(entry, TierFailure)]
