"""Another connector beside ours, inside ``MultiConnector``: it finds a part of most prompts and loads it some steps
later, and it keeps the blocks of some requests for a while after their end.

Threading: the test's thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from tests.vllm.pipeline_rig import BLOCK_TOKENS


@dataclass
class _Work(KVConnectorMetadata):
    loads: dict[str, tuple[list[int], list[list[int]], int, int]] = field(default_factory=dict)
    """By request: its tokens, its blocks by group, and the first and the last token to load."""
    kept: set[str] = field(default_factory=set)


class SlowConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves."""

    fill: ClassVar[Callable[[Sequence[int], list[list[int]], int, int], None]]
    """Writes the KV of tokens to blocks of the only rank."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._random = random.Random(1)
        self._found: dict[str, int] = {}
        self._out: set[str] = set()
        """Requests that wait for the rank's half."""
        self._work = _Work()
        self._waiting: list[tuple[int, str, Any]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        blocks = (request.num_tokens - 1 - num_computed_tokens) // BLOCK_TOKENS
        if blocks < 1 or request.lora_request or request.mm_features or self._random.random() < 0.5:
            return 0, False
        self._found[request.request_id] = num_computed_tokens
        return self._random.randint(1, blocks) * BLOCK_TOKENS, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self._found.pop(request.request_id, 0)
        if num_external_tokens:
            self._out.add(request.request_id)
            tables = [list(ids) for ids in blocks.get_block_ids()]
            self._work.loads[request.request_id] = (
                list(request.all_token_ids),
                tables,
                first,
                first + num_external_tokens,
            )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        work, self._work = self._work, _Work()
        return work

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if request.status is RequestStatus.FINISHED_ABORTED or self._random.random() < 0.5:
            return False, None
        self._work.kept.add(request.request_id)
        self._out.add(request.request_id)
        return True, None

    def has_pending_push_work(self) -> bool:
        return bool(self._out)

    def update_connector_output(self, connector_output: Any) -> None:
        self._out -= (connector_output.finished_sending or set()) | (connector_output.finished_recving or set())

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        work = self._get_connector_metadata()
        assert isinstance(work, _Work)
        self._waiting += [(self._random.randint(1, 6), name, load) for name, load in work.loads.items()]
        self._waiting += [(self._random.randint(1, 6), name, None) for name in work.kept]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        waiting, self._waiting = self._waiting, []
        for steps, name, load in waiting:
            if steps > 1:
                self._waiting.append((steps - 1, name, load))
            elif load is None:
                results.finished_sending.add(name)
            else:
                SlowConnector.fill(*load)
                results.finished_recving.add(name)
        return results

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def unregister_kv_caches(self) -> None: ...

    def restore_kv_caches(self) -> None: ...

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True
