"""LoRA adapters by their content: which bytes each rank has loaded under a name, and whose KV a request may share.

vLLM's block hashes hold the name and the path of an adapter. Behind both may lie other bytes, on another server or a
minute later. So each rank digests what it loads, when it loads it, and the keys of a request with an adapter hold the
digests of all ranks.

Threading: ``LoadedAdapters`` on a rank's main thread, ``AdapterTable`` on the scheduler's.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from nixl_offload.vllm.rank_identity import adapter_digest

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)


class AdapterName(NamedTuple):
    """What vLLM's block hashes hold of an adapter."""

    name: str
    path: str


def adapter_of(request: LoRARequest) -> AdapterName:
    """Return what vLLM's block hashes hold of the adapter that a request names."""
    return AdapterName(str(request.lora_name), str(request.lora_path))


class AdapterUse(NamedTuple):
    """The adapter that a request's keys stand for, as every rank has loaded it."""

    adapter: AdapterName
    digests: tuple[str, ...]
    """By rank."""
    of_any_size: bool = False
    """Engines with other numbers of ranks share the chunks: what ranks agree on counts once."""

    def tag(self, block_hash: bytes) -> bytes:
        """Return what takes the place of a block hash of vLLM's; as long as that."""
        digests = dict.fromkeys(self.digests) if self.of_any_size else self.digests
        content = hashlib.sha256("".join(digests).encode("ascii")).digest()
        return hashlib.blake2b(block_hash, digest_size=len(block_hash), key=content).digest()


class LoadedAdapters:
    """What one rank has loaded."""

    def __init__(self) -> None:
        self._digests: dict[AdapterName, str | None] = {}
        self._untold: dict[AdapterName, tuple[str | None, ...]] = {}

    def loaded(self, request: LoRARequest, adapter: object) -> None:
        """Take down what was loaded for ``request``, before anything changes it. Costs a few ms per 100 MB; never
        raises.
        """
        name, digest = adapter_of(request), None
        try:
            digest = adapter_digest(adapter)
        except Exception as error:  # noqa: BLE001 - without a digest its requests are neither stored nor loaded
            logger.warning(
                "Requests with the LoRA adapter %s are neither stored nor loaded: its content cannot be told (%s)",
                name.name,
                error,
            )
        self._digests[name] = digest
        self._untold[name] = (*self._untold.get(name, ()), digest)

    def take(self) -> dict[AdapterName, tuple[str | None, ...]]:
        """Return what was loaded since the last call, one after the other; None: its content is not known."""
        untold, self._untold = self._untold, {}
        return untold

    def agrees(self, use: AdapterUse | None, rank: int) -> bool:
        """Whether a job's keys stand for what this rank has loaded now. ``use``: None for a job without an adapter."""
        return use is None or self._digests.get(use.adapter) == use.digests[rank]


@dataclass(slots=True)
class _Known:
    """What the ranks have reported of an adapter."""

    digests: dict[int, str | None] = field(default_factory=dict)
    changed_under: object = field(default_factory=object)
    """vLLM's prefix cache as it was when the content changed last: it still holds blocks of the old one."""
    asked_step: int = 0


class AdapterTable:
    """What all ranks have loaded, as the scheduler's half has heard."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._known: dict[AdapterName, _Known] = {}
        self.of_any_size = False
        """As ``AdapterUse.of_any_size``."""

    def hear(
        self, told: Mapping[int, Mapping[AdapterName, tuple[str | None, ...]]], prefix_cache: object
    ) -> set[AdapterName]:
        """Take the reports of ranks. ``prefix_cache``: the current one. Returns the adapters whose content changed."""
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
        """Return what keys of this adapter's requests stand for; None: nothing that may be stored or loaded."""
        known = self._known.get(name)
        if known is None or known.changed_under is prefix_cache:
            return None
        told = (known.digests.get(rank) for rank in range(self._world_size))
        digests = tuple(digest for digest in told if digest is not None)
        return AdapterUse(name, digests, self.of_any_size) if len(digests) == self._world_size else None

    def may_come(self, name: AdapterName, step: int, heard_steps: int) -> bool:
        """Whether ranks may have loaded this adapter and not reported it yet: they do in their next report.

        ``step``: the one that is being scheduled; ``heard_steps``: of how many the reports are here.
        """
        known = self._known.setdefault(name, _Known())
        if known.digests:
            return False
        known.asked_step = known.asked_step or step
        return heard_steps < known.asked_step
