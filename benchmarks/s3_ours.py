"""Our sides of ``benchmarks.s3``: a mover used as the engine uses it, and the store that is asked and listed beside it.

Threading: one thread drives a side; its HEADs run on threads of its own, as many as there are connections.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from benchmarks.s3_sides import POLL_S, STEP_S, Buffer, Keys, Move, Side
from examples.s3_server import RcloneServer
from nixl_offload.config.schema import LookupOptions, S3Config
from nixl_offload.errors import MoverError
from nixl_offload.identity.namespace import GroupFields, NamespaceFields, make_namespace
from nixl_offload.movers.base import FileId, MemoryRegion, Mover, Op, Transfer, TransferState
from nixl_offload.movers.select_object import make_mover
from nixl_offload.stores.base import Store
from nixl_offload.stores.s3 import open_store
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.tier import SharedTier
from nixl_offload.types import Key, Lookup, LookupContext

OURS: dict[str, Literal["obj", "obstore"]] = {
    "ours, NIXL OBJ": "obj",
    "ours, obstore": "obstore",
}
"""Names of our sides, and the mover of each."""


NAMESPACE = make_namespace(
    NamespaceFields(
        tenant="benchmark",
        engine="benchmark",
        platform="cpu",
        attention_backend=None,
        model="model",
        revision=None,
        weights=None,
        dtype="float16",
        kv_layout="BLHNC",
        tokens_per_block=16,
        blocks_per_chunk=1,
        tokens_per_hash=16,
        hash_algorithm="sha256",
        hash_seed=None,
        groups=(GroupFields(0, 16, (1,)),),
        ranks=("0",),
        settings={},
        tp=1,
        pp=1,
        pcp=1,
        dcp=1,
        world_size=1,
    )
)


def open_ours(name: str, server: RcloneServer, buffer: Buffer, connections: int) -> Side:
    """Open one of ``OURS``, with obstore for the control plane, as in a server."""
    kind = OURS[name]
    mover, open_client = connect(kind, kind, server, connections)
    return Ours(name, kind, mover, open_client, buffer, connections)


def connect(
    kind: Literal["obj", "obstore"], prefix: str, server: RcloneServer, connections: int
) -> tuple[Mover, Callable[[], Store]]:
    """Return a mover of this kind under ``prefix``, and what opens a store beside it."""
    tier = S3Config.model_validate({**server.tier(prefix), "mover": kind, "connections": connections})
    mover = make_mover(kind, tier)
    return mover, lambda: open_store(tier)


class Ours(Side):
    """One of ours."""

    lists = True

    def __init__(
        self,
        name: str,
        prefix: str,
        mover: Mover,
        open_client: Callable[[], Store],
        buffer: Buffer,
        connections: int,
    ) -> None:
        """``mover`` and stores work under ``prefix``; the mover belongs to this side from here on."""
        self.name, self._prefix = name, prefix
        self._mover, self._open_client, self._connections = mover, open_client, connections
        self._store = open_client()
        self._piece_bytes = buffer.piece_bytes
        self._memory = mover.register_memory(MemoryRegion(buffer.address, buffer.size_bytes))
        self._threads = ThreadPoolExecutor(connections)
        self._tier: SharedTier | None = None

    def move(self, move: Move, keys: Keys, first_row: int) -> None:
        """An object per transfer, twice as many transfers as connections."""
        size = self._piece_bytes
        whole = np.array([[0, size]], dtype=np.int64)
        waiting = deque(enumerate(keys, first_row))
        flying: deque[tuple[Transfer, FileId]] = deque()
        while waiting or flying:
            while waiting and len(flying) < 2 * self._connections:
                row, key = waiting.popleft()
                target = self._mover.open_object(_shard(key), size)
                piece = np.array([[row * size, size]], dtype=np.int64)
                flying.append((self._mover.submit(Op[move], self._memory, piece, target, whole), target))
            quiet_s = self._mover.look()
            if quiet_s:
                time.sleep(max(quiet_s, POLL_S))
                continue
            for _ in range(len(flying)):
                transfer, target = flying.popleft()
                if transfer.state is TransferState.PENDING:
                    flying.append((transfer, target))
                    continue
                if transfer.state is TransferState.FAILED:
                    raise MoverError(transfer.error or "failed")
                self._mover.close_file(target)

    def exists(self, keys: Keys) -> int:
        """A HEAD per key."""
        return sum(self._heads(keys))

    def prefix(self, chain: Keys) -> tuple[int, int]:
        """Let the scheduler's half answer, asked by steps as vLLM asks it: on after RETRY, no further after MISS."""
        assert self._tier is not None, "forget first"
        before = self._tier.counts().probes.heads
        while True:
            answers = []
            for end_token, key in enumerate(chain, start=1):
                answers.append(self._tier.lookup(key, LookupContext("benchmark", end_token), time.monotonic()))
                if answers[-1] is Lookup.MISS:
                    break
            self._tier.flush(time.monotonic())
            if Lookup.RETRY not in answers:
                self._tier.forget_request("benchmark")
                return answers.count(Lookup.HIT), self._tier.counts().probes.heads - before
            time.sleep(STEP_S)

    def forget(self) -> None:
        self._close_tier()
        self._tier = SharedTier(
            0,
            self._open_client(),
            NAMESPACE,
            lookup=LookupOptions.model_validate({"timeout": "60s"}),
            ttl_s=None,
            name=self.name,
            threads=self._connections,
        )
        self.prefix([Key(os.urandom(36)) for _ in range(self._connections)])  # opens the connections

    def _close_tier(self) -> None:
        if self._tier is not None:
            self._tier.close()
        self._tier = None

    def _heads(self, keys: Keys) -> list[bool]:
        return list(self._threads.map(lambda key: self._store.head(_shard(key)) is not None, keys))

    def list(self) -> int:
        return sum(1 for _ in self._store.list(""))

    def object_path(self, key: bytes) -> str:
        return f"{self._prefix}/{_shard(key)}"

    def close(self) -> None:
        self._close_tier()
        self._threads.shutdown()
        self._mover.close()
        self._store.close()


def _shard(key: bytes) -> str:
    return shard_name(NAMESPACE.name, Key(key), 0)
