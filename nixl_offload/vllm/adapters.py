"""LoRA adapters by their content: which bytes each rank has loaded under a name, and whose KV a request may share.

vLLM's block hashes hold the name and the path of an adapter. On another server, or a minute later, both may stand for
other bytes. So each rank digests an adapter when it loads it, and keys of its requests hold all ranks' digests.

Threading: ``LoadedAdapters`` on a rank's main thread, ``AdapterTable`` on the scheduler's.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.lora.request import LoRARequest

from nixl_offload.vllm.rank_identity import adapter_digest

logger = logging.getLogger(__name__)


class AdapterName(NamedTuple):
    """The part of an adapter that vLLM's block hashes hold."""

    name: str
    path: str


def adapter_of(request: LoRARequest) -> AdapterName:
    """Return name and path of the adapter that a request names."""
    return AdapterName(str(request.lora_name), str(request.lora_path))


class AdapterUse(NamedTuple):
    """The adapter that a request's keys stand for, as every rank has loaded it."""

    adapter: AdapterName
    digests: tuple[str, ...]
    """By rank."""
    of_any_size: bool = False
    """Whether engines with other numbers of ranks share the chunks. Then equal digests count once."""

    def tag(self, block_hash: bytes) -> bytes:
        """Return the hash that replaces vLLM's ``block_hash``; it has the same length."""
        digests = dict.fromkeys(self.digests) if self.of_any_size else self.digests
        content = hashlib.sha256("".join(digests).encode("ascii")).digest()
        return hashlib.blake2b(block_hash, digest_size=len(block_hash), key=content).digest()


class LoadedAdapters:
    """The adapters that one rank has loaded."""

    def __init__(self) -> None:
        self._digests: dict[AdapterName, str | None] = {}
        self._untold: dict[AdapterName, tuple[str | None, ...]] = {}

    def loaded(self, request: LoRARequest, adapter: object) -> None:
        """Record a loaded adapter before anything changes it. Takes a few ms per 100 MB; never raises."""
        name, digest = adapter_of(request), None
        try:
            digest = adapter_digest(adapter)
        except Exception as error:  # noqa: BLE001 - without a digest, its requests are neither stored nor loaded
            logger.warning(
                "Requests with the LoRA adapter %s are neither stored nor loaded: its content cannot be told (%s)",
                name.name,
                error,
            )
        self._digests[name] = digest
        self._untold[name] = (*self._untold.get(name, ()), digest)

    def take(self) -> dict[AdapterName, tuple[str | None, ...]]:
        """Return the digests of adapters loaded since the last call, in order; None for a digest that failed."""
        untold, self._untold = self._untold, {}
        return untold

    def agrees(self, use: AdapterUse | None, rank: int) -> bool:
        """Whether a job's keys stand for the adapter now loaded here. ``use``: None for a job without an adapter."""
        return use is None or self._digests.get(use.adapter) == use.digests[rank]


@dataclass(slots=True)
class _Known:
    """What the ranks have reported about an adapter."""

    digests: dict[int, str | None] = field(default_factory=dict)
    changed_under: object = field(default_factory=object)
    """vLLM's prefix cache when the content last changed. It still holds blocks of the old content."""
    asked_step: int = 0


class AdapterTable:
    """The adapters that all ranks have loaded, by their reports."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._known: dict[AdapterName, _Known] = {}
        self.of_any_size = False
        """As ``AdapterUse.of_any_size``."""

    def hear(
        self, told: Mapping[int, Mapping[AdapterName, tuple[str | None, ...]]], prefix_cache: object
    ) -> set[AdapterName]:
        """Take the ranks' reports; return the adapters whose content changed. ``prefix_cache``: the current one."""
        changed: set[AdapterName] = set()
        for rank, adapters in told.items():
            for name, digests in adapters.items():
                known = self._known.setdefault(name, _Known())
                for digest in digests:
                    if rank in known.digests and known.digests[rank] != digest:
                        known.changed_under = prefix_cache
                        changed.add(name)
                    known.digests[rank] = digest
        for name in changed:
            logger.warning(
                "The LoRA adapter %s has other content than before, under the same path: its requests are neither "
                "stored nor loaded until vLLM's prefix cache is reset, which holds blocks of the old one",
                name.name,
            )
        return changed

    def find(self, name: AdapterName, prefix_cache: object) -> AdapterUse | None:
        """Return the adapter for keys of its requests; None if they may be neither stored nor loaded."""
        known = self._known.get(name)
        if known is None or known.changed_under is prefix_cache:
            return None
        told = (known.digests.get(rank) for rank in range(self._world_size))
        digests = tuple(digest for digest in told if digest is not None)
        return AdapterUse(name, digests, self.of_any_size) if len(digests) == self._world_size else None

    def may_come(self, name: AdapterName, step: int, heard_steps: int) -> bool:
        """Whether the ranks may have loaded this adapter and will report it within a step.

        ``step``: the step that is being scheduled; ``heard_steps``: how many steps the ranks have reported.
        """
        known = self._known.setdefault(name, _Known())
        if known.digests:
            return False
        known.asked_step = known.asked_step or step
        return heard_steps < known.asked_step
