"""Opens the scheduler's half of all tiers, once the digest of a local model's weights is known.

Threading: a ``BackgroundOpening`` waits and opens; the scheduler's thread takes the result over.
Nothing that it does can hold up a step or end the engine. Ownership: tiers belong to whoever takes them; those that
nobody takes are closed here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nixl_offload.config import Config
from nixl_offload.identity.namespace import Namespace
from nixl_offload.identity.weights import WeightsDigest, cache_directory_of
from nixl_offload.tiers.memory.tier import MemoryTier
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.vllm.background import BackgroundOpening
from nixl_offload.vllm.identity import ModelName, build_namespace, models_of, warn_about_weights
from nixl_offload.vllm.open_tiers import open_tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

    from nixl_offload.vllm.messages import RankGeometry

OpenTier = MemoryTier | SlabTier | SharedTier
OpenTiers = tuple[Namespace, list[OpenTier]]

SMALL_BYTES = 1 << 30
"""Reading this much takes about a second, unless the machine is busy."""
CLOSE_S = 1.0
"""How long a shutdown waits for tiers that are just being opened."""


class TierOpening:
    """Turns what the ranks have sent into open tiers, on a thread of its own. Begins at once."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, offloading: OffloadingConfig, ranks: Sequence[RankGeometry]
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._offloading = offloading
        self._ranks = ranks
        self._known = threading.Event()
        """Set when the digests of the weights are known, or cannot be."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._weights: dict[str, WeightsDigest] = {}
        """By file or directory; filled once, before anything is awaited."""
        self._closed = False
        self._opening = BackgroundOpening(self._open, lambda opened: _close(opened[1]), name="nixl-offload-open")

    def wait(self, weights_s: float, small_weights_s: float) -> bool:
        """Wait so long at most for the weights to be known, then for the tiers to be open. False: not yet.

        ``small_weights_s``: likewise, for weights of ``SMALL_BYTES`` or less.
        """
        if not self._known.wait(weights_s):
            with self._lock:
                size_bytes = sum(weights.progress()[1] for weights in self._weights.values())
            if size_bytes > SMALL_BYTES or not self._known.wait(small_weights_s):
                return False
        return self._opening.wait()

    def take(self) -> OpenTiers | None:
        """Return the open tiers, once; None: not yet, or they were taken. Raises what kept them from opening, once."""
        return self._opening.take()

    def close(self) -> None:
        """Give up, and close what nobody took. Waits ``CLOSE_S`` at most. Idempotent."""
        with self._lock:
            self._closed = True
        for weights in self._weights.values():
            weights.close()
        self._opening.close(CLOSE_S)

    def _open(self) -> OpenTiers:
        try:
            models = models_of(self._vllm_config)
            digests = self._digests(models)
        finally:
            self._known.set()
        warn_about_weights(models, self._weights)
        namespace = build_namespace(self._vllm_config, self._offloading, self._config, self._ranks, digests)
        tiers: list[OpenTier] = []
        try:
            for position, tier in enumerate(self._config.tiers):
                tiers.append(open_tier(tier, position, namespace, self._offloading.parallel))
        except BaseException:
            _close(tiers)
            raise
        return namespace, tiers

    def _digests(self, models: Mapping[str, ModelName]) -> dict[str, str]:
        cache = cache_directory_of(self._config)
        with self._lock:
            if not self._closed:
                for files in {model.files for model in models.values() if model.files is not None}:
                    self._weights[files] = WeightsDigest(files, cache)
        for weights in self._weights.values():
            while not weights.wait(60.0):
                pass
        return {path: self._weights[model.files].result() for path, model in models.items() if model.files is not None}


def _close(tiers: Sequence[OpenTier]) -> None:
    for tier in tiers:
        tier.close()
