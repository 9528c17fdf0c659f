"""Opens the scheduler's half of all tiers, once the digest of a local model's weights is known.

Threading: one thread reads weights, then each tier has one that opens it; the scheduler's thread takes the results
over. Nothing that they do can hold up a step or end the engine.
Ownership: tiers belong to whoever takes them; those that nobody takes are closed here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nixl_offload.config import Config, TierConfig
from nixl_offload.identity.namespace import Namespace
from nixl_offload.identity.weights import WeightsDigest, cache_directory_of
from nixl_offload.tiers.kinds import AnyTier
from nixl_offload.vllm.background import BackgroundOpening
from nixl_offload.vllm.identity import build_namespace, loaded_weights, models_of, sources_of_ranks
from nixl_offload.vllm.open_tiers import open_tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

    from nixl_offload.vllm.messages import RankGeometry

SMALL_BYTES = 1 << 30
"""Reading this much takes about a second, unless the machine is busy."""
CLOSE_S = 1.0
"""How long a shutdown waits for tiers that are just being opened."""


def name_of(tier: TierConfig) -> str:
    """Return what messages call a tier: its kind, and where it is."""
    return f"{tier.kind} tier {tier.where}"


class TierOpening:
    """Turns what the ranks have sent into a namespace and open tiers. Begins at once."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        offloading: OffloadingConfig,
        ranks: Sequence[RankGeometry],
        *,
        namespace: Namespace | None = None,
        before: Sequence[AnyTier] = (),
    ) -> None:
        """``namespace``: None: it is to be made. ``before``: tiers of the same places, which are closed first."""
        self._given = namespace
        self._before = before
        self._config = config
        self._vllm_config = vllm_config
        self._offloading = offloading
        self._ranks = ranks
        self._is_prepared = threading.Event()
        """The namespace is known, or cannot be, and the tiers are being opened."""
        self._lock = threading.Lock()
        """Guards what follows."""
        self._digests: dict[tuple[str, bool], WeightsDigest] = {}
        """By path, and whether it counts alone: of weights, and of directories and large files that settings name."""
        self._closed = False
        self._namespace: Namespace | None = None
        self._error: Exception | None = None
        self._tiers: dict[int, BackgroundOpening[AnyTier]] = {}
        """Those that nobody has taken, by position."""
        self._preparing = BackgroundOpening(self._prepare, _nothing, what="Offloading", thread_name="nixl-offload-open")

    def wait(self, weights_s: float, small_weights_s: float, tiers_s: float) -> bool:
        """Wait so long at most for the weights to be known, then for each tier to be tried once. False: not yet.

        ``small_weights_s``: likewise, for weights of ``SMALL_BYTES`` or less.
        """
        if self._preparing.error is not None:
            return False
        if not self._is_prepared.wait(weights_s):
            with self._lock:
                size_bytes = sum(digest.progress()[1] for digest in self._digests.values())
            if size_bytes > SMALL_BYTES or not self._is_prepared.wait(small_weights_s):
                return False
        with self._lock:
            tiers = list(self._tiers.values())
        until_s = time.monotonic() + tiers_s
        # One that hangs uses the time up; of those behind it, which need none, it is asked all the same.
        tried = [tier.wait(max(0.0, until_s - time.monotonic())) for tier in tiers]
        return all(tried)

    @property
    def namespace(self) -> Namespace | None:
        """What the tiers are opened for; None: not known yet. Raises what keeps it from being known."""
        self._preparing.take()  # begins now where no thread could be started before
        with self._lock:
            if self._error is not None:
                raise self._error
            return self._namespace

    def errors(self) -> dict[int, Exception]:
        """Return why tiers are not open that have been tried, by position."""
        with self._lock:
            tried = {position: tier.error for position, tier in self._tiers.items()}
        return {position: error for position, error in tried.items() if error is not None}

    def take(self) -> dict[int, AnyTier]:
        """Return the tiers that were opened since the last call, by position."""
        if not self._tiers:
            return {}
        with self._lock:
            opened = {at: tier for at, opening in self._tiers.items() if (tier := opening.take()) is not None}
            for position in opened:
                del self._tiers[position]
        return opened

    def close(self) -> None:
        """Give up, and close what nobody took. Waits ``CLOSE_S`` at most. Idempotent."""
        with self._lock:
            self._closed = True
            digests, tiers = list(self._digests.values()), list(self._tiers.values())
        for digest in digests:
            digest.close()
        until_s = time.monotonic() + CLOSE_S
        self._preparing.close(CLOSE_S)
        for tier in tiers:
            tier.stop()
        for tier in tiers:
            tier.close(max(0.0, until_s - time.monotonic()))

    def _prepare(self) -> None:
        for before in self._before:
            with contextlib.suppress(Exception):
                before.close()
        try:
            namespace = self._make_namespace()
        except BaseException as error:  # noqa: BLE001 - whoever asks is told, of a panic in a library, too
            with self._lock:
                self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))
        else:
            with self._lock:
                self._namespace = namespace
                for position, tier in enumerate(() if self._closed else self._config.tiers):
                    parallel, nearer = self._vllm_config.parallel_config, self._config.tiers[:position]
                    make = functools.partial(open_tier, tier, position, namespace, parallel, nearer)
                    self._tiers[position] = BackgroundOpening(
                        make, _close, what=name_of(tier), thread_name=f"nixl-offload-open-{position}"
                    )
        finally:
            self._is_prepared.set()

    def _make_namespace(self) -> Namespace:
        if self._given is not None:
            return self._given
        models = models_of(self._vllm_config, sources_of_ranks(self._ranks))
        weights = {
            files: self._digest(files) for files in {model.files for model in models.values()} if files is not None
        }
        results = {files: digest.wait_for_result() for files, digest in weights.items()}
        return build_namespace(
            self._vllm_config,
            self._offloading,
            self._config,
            self._ranks,
            {path: results[model.files] for path, model in models.items() if model.files is not None},
            lambda path: self._digest(path, alone=os.path.isfile(path)).wait_for_result(),
            loaded_weights(self._vllm_config, models, weights, self._ranks),
        )

    def _digest(self, path: str, *, alone: bool = False) -> WeightsDigest:
        """Begin to read, as ``WeightsDigest`` does, once, until ``close``."""
        cache = cache_directory_of(self._config)  # may ask who the user is, over a network
        with self._lock:
            digest = self._digests.get((path, alone)) or WeightsDigest(path, cache, alone=alone)
            self._digests[path, alone] = digest
            if self._closed:
                digest.close()
        return digest


def _close(tier: AnyTier) -> None:
    tier.close()


def _nothing(_: None) -> None:
    pass
