"""The peers of ``benchmarks.s3``: NIXL's OBJ plugin with nothing around it, and vLLM's own ``obj`` tier.

Threading: one thread drives a side. vLLM and NIXL are imported when a side is made.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from benchmarks.s3_sides import POLL_S, STEP_S, Buffer, Keys, Move, Side
from examples.s3_server import RcloneServer


class PlainNixl(Side):
    """One agent; one handle for all objects of a call, which is the best that NIXL can be given."""

    name = "plain NIXL OBJ"

    def __init__(self, server: RcloneServer, buffer: Buffer, connections: int) -> None:
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        self._buffer = buffer
        self._agent_name = "benchmark"
        sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        self._agent = nixl_agent(self._agent_name, nixl_agent_config(backends=[], sync_mode=sync))
        self._agent.create_backend("OBJ", {**connection(server), "num_threads": str(connections)})
        self._memory = self._agent.register_memory([(buffer.address, buffer.size_bytes, 0, "")], "DRAM")
        self._next_device = 1  # an object's number; NIXL takes the last of the same number

    def move(self, move: Move, keys: Keys, first_row: int) -> None:
        agent, size = self._agent, self._buffer.piece_bytes
        objects = [(0, size, self._next_device + at, self.object_path(key)) for at, key in enumerate(keys)]
        self._next_device += len(keys)
        pieces = [(self._buffer.address + (first_row + at) * size, size, 0) for at in range(len(keys))]
        registered = agent.register_memory(objects, "OBJ")
        handle = agent.initialize_xfer(
            move, agent.get_xfer_descs(pieces, "DRAM"), registered.trim(), self._agent_name, b"", ["OBJ"]
        )
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"{self.name}: {state}")
        agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)

    def exists(self, keys: Keys) -> int:
        asked = [(0, 1, 0, self.object_path(key)) for key in keys]
        return sum(found is not None for found in self._agent.query_memory(asked, "OBJ", "OBJ"))

    def object_path(self, key: bytes) -> str:
        return f"plain/{key.hex()[:2]}/{key.hex()}"

    def close(self) -> None:
        self._agent.deregister_memory(self._memory)
        del self._agent


class VllmTier(Side):
    """vLLM's ``ObjectStoreSecondaryTierManager`` over host memory, called as its ``TieringOffloadingManager`` would.

    Kinder than a running vLLM: there is no copy between GPU and host, and it is polled each half a millisecond, not
    once per step of the engine. Jobs are of 16 chunks.
    """

    name = "vLLM obj tier"
    JOB_CHUNKS = 16

    def __init__(self, server: RcloneServer, buffer: Buffer, connections: int) -> None:
        from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext
        from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

        class Spec(OffloadingSpec):
            """As much of a spec as the tier reads: what names objects."""

            def get_manager(self) -> Any:
                raise NotImplementedError

            def get_worker(self, kv_caches: Any) -> Any:
                raise NotImplementedError

        self._context = ReqContext("benchmark")
        view = buffer.view.cast("B", (buffer.rows, buffer.piece_bytes))
        self._tier: Any = ObjectStoreSecondaryTierManager(
            Spec(_vllm_config(buffer.piece_bytes)),
            view,
            "obj",
            connection(server),
            prefix="vllm",
            io_threads=connections,
        )
        self._jobs = 0

    def move(self, move: Move, keys: Keys, first_row: int) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        submit = self._tier.submit_store if move == "WRITE" else self._tier.submit_load
        waiting = set()
        for begin in range(0, len(keys), self.JOB_CHUNKS):
            some = keys[begin : begin + self.JOB_CHUNKS]
            rows = np.arange(first_row + begin, first_row + begin + len(some), dtype=np.int32)
            self._jobs += 1
            waiting.add(self._jobs)
            submit(TransferJob(self._jobs, some, rows, move == "READ", self._context))
        while waiting:
            for result in self._tier.get_finished_jobs():
                if not result.success:
                    raise RuntimeError(f"{self.name}: job {result.job_id} failed")
                waiting.discard(result.job_id)
            time.sleep(POLL_S)

    def exists(self, keys: Keys) -> int:
        """As the scheduler does: ask for all, let the step end, ask again until there is no RETRY."""
        from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

        while True:
            answers = [self._tier.lookup(key, self._context) for key in keys]
            self._tier.on_schedule_end(ScheduleEndContext((), ()))
            if LookupResult.RETRY not in answers:
                self._tier.on_request_finished(self._context)  # forgets the answers
                return answers.count(LookupResult.HIT)
            time.sleep(STEP_S)

    def object_path(self, key: bytes) -> str:
        name: str = self._tier._file_mapper.get_file_name(key)
        return name.lstrip("/")

    def close(self) -> None:
        self._tier.drain_jobs()
        self._tier.shutdown()


def connection(server: RcloneServer) -> dict[str, str]:
    """What NIXL's OBJ plugin needs to reach the server, but for credentials."""
    return {"bucket": server.bucket, "endpoint_override": f"127.0.0.1:{server.port}", "scheme": "http"}


def prepare_nixl() -> None:
    """Make this process's NIXL quiet, and such that vLLM's tier runs on it. Before NIXL is imported.

    vLLM 0.32 asks for the telemetry of each transfer; NIXL 1.5.1 raises NIXL_ERR_NO_TELEMETRY unless it is turned on
    (and then the tier's first finished job kills the scheduler).
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ["NIXL_TELEMETRY_ENABLE"] = "y"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def _vllm_config(chunk_bytes: int) -> Any:
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="benchmark",
        model=OffloadingModelConfig(name="model", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
