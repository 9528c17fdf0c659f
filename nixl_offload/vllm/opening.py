"""Opens the scheduler's half of all tiers, once it is known which weights a local model has.

Threading: ``Opening`` has one daemon thread, which waits and opens; the scheduler's thread takes the result over.
Nothing that it does can hold up a step or end the engine. Ownership: tiers belong to whoever takes them; those that
nobody takes are closed here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nixl_offload.config import Config
from nixl_offload.hardware.cores import unbound
from nixl_offload.identity.namespace import Namespace
from nixl_offload.identity.weights import WeightsDigest, cache_directory_of
from nixl_offload.tiers.memory.tier import MemoryTier
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.tiers.slab.tier import SlabTier
from nixl_offload.vllm.identity import build_namespace, models_of, warn_about_weights
from nixl_offload.vllm.open_tiers import open_tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

    from nixl_offload.vllm.messages import RankGeometry

OpenTier = MemoryTier | SlabTier | SharedTier
Opened = tuple[Namespace, list[OpenTier]]

SMALL_BYTES = 1 << 30
"""So much is read in a second, or the machine is too busy."""
CLOSE_S = 1.0
"""How long a shutdown waits for tiers that are just being opened."""


class Opening:
    """The way from what the ranks have told to open tiers. Begins at once."""

    def __init__(
        self, config: Config, vllm_config: VllmConfig, offloading: OffloadingConfig, ranks: Sequence[RankGeometry]
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._offloading = offloading
        self._ranks = ranks
        self._known = threading.Event()
        """Set when it is known which weights there are, or that nobody will know."""
        self._done = threading.Event()
        self._lock = threading.Lock()
        """Guards what follows."""
        self._weights: dict[str, WeightsDigest] = {}
        """By file or directory; filled once, before anything is awaited."""
        self._result: Opened | Exception | None = None
        self._closed = False
        with unbound():
            self._thread = threading.Thread(target=self._run, name="nixl-offload-open", daemon=True)
            self._thread.start()

    def wait(self, weights_s: float, small_weights_s: float) -> bool:
        """Wait so long at most for the weights to be known, then for the tiers to be open. False: not yet.

        ``small_weights_s``: likewise, for weights of ``SMALL_BYTES`` or less.
        """
        if not self._known.wait(weights_s):
            with self._lock:
                size_bytes = sum(weights.progress()[1] for weights in self._weights.values())
            if size_bytes > SMALL_BYTES or not self._known.wait(small_weights_s):
                return False
        self._done.wait()
        return True

    def take(self) -> Opened | Exception | None:
        """Return what came of it, once; None: nothing yet, or it was taken."""
        with self._lock:
            result, self._result = self._result, None
            return result

    def close(self) -> None:
        """Give up, and close what nobody took. Waits ``CLOSE_S`` at most. Idempotent."""
        with self._lock:
            self._closed = True
        for weights in self._weights.values():
            weights.close()
        self._thread.join(CLOSE_S)
        result = self.take()
        if result is not None and not isinstance(result, Exception):
            _close(result[1])

    def _run(self) -> None:
        result: Opened | Exception
        try:
            result = self._open()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine serves on without
            result = error
        with self._lock:
            if not self._closed:
                self._result = result
            elif not isinstance(result, Exception):
                _close(result[1])
        self._known.set()
        self._done.set()

    def _open(self) -> Opened:
        models, cache = models_of(self._vllm_config), cache_directory_of(self._config)
        with self._lock:
            if not self._closed:
                for files in {model.files for model in models.values() if model.files is not None}:
                    self._weights[files] = WeightsDigest(files, cache)
        for weights in self._weights.values():
            while not weights.wait(60.0):
                pass
        digests = {
            path: self._weights[model.files].result() for path, model in models.items() if model.files is not None
        }
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


def _close(tiers: Sequence[OpenTier]) -> None:
    for tier in tiers:
        tier.close()
