"""A connector that loads garbage within the step and says so when the step is over: vLLM's ``ExampleConnector``, which
damages what it has loaded.

Threading: as vLLM's.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata


class FailingConnector(ExampleConnector):
    """Every load fails, after the model has computed with it."""

    def start_load_kv(self, forward_context: Any, **fields: Any) -> None:
        """Load, then damage the blocks that were loaded."""
        super().start_load_kv(forward_context, **fields)
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleConnectorMetadata)
        if forward_context.attn_metadata is None:
            return
        blocks = {
            int(slot) // self._block_size
            for request in metadata.requests
            if not request.is_store
            for slot in request.slot_mapping[:: self._block_size]
        }
        self._failed = blocks
        for layer in forward_context.no_compile_layers.values():
            if getattr(layer, "kv_cache", None) is not None and blocks:
                layer.kv_cache[sorted(blocks)] *= -3.0

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Say which blocks were damaged, once."""
        failed, self._failed = getattr(self, "_failed", set()), set()
        return failed
