"""Which tests are to notice a change of which module: those of what it does, and models of what it is part of."""

from __future__ import annotations

from typing import Final


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py" for name in names)


_INDEX_MODEL: Final = "tests/model/test_index_model.py"
_INDEX_CONTRACT: Final = "tests/contract/test_index.py"
_CHUNKS: Final = _unit("format", "header_rows", "late_checksums", "slot_headers")
_ENGINE: Final = (
    *_unit("job_table", "engine", "batches", "grace", "transfer_statistics"),
    "tests/faults/test_engine_faults.py",
)
_CATALOG: Final = _unit("catalog", "write_through", "prefetch", "retention")

GUARDS: Final[dict[str, tuple[str, ...]]] = {
    f"nixl_offload/{module}.py": tests
    for module, tests in {
        "catalog/admission": _unit("admission", "catalog"),
        "catalog/catalog": _CATALOG,
        "catalog/changes": _CATALOG,
        "catalog/estimate": _unit("estimate"),
        "catalog/placing": _unit("placing"),
        "catalog/prefetch": _CATALOG,
        "catalog/retention": _unit("retention"),
        "catalog/tickets": _unit("placing", "catalog"),
        "catalog/write_through": _CATALOG,
        "index/database": _unit("durable", "reopen"),
        "index/durable": _unit("durable", "reopen"),
        "index/index": (*_unit("retention", "reopen"), _INDEX_CONTRACT, _INDEX_MODEL),
        "index/states": (_INDEX_CONTRACT, _INDEX_MODEL),
        "chunk/authentication": _unit("authentication"),
        "chunk/checksum": _unit("checksum", "format", "header_rows"),
        "chunk/checksum_torch": _unit("checksum"),
        "chunk/header": _CHUNKS,
        "chunk/header_rows": _CHUNKS,
        "chunk/heads": _unit("head_shards"),
        "chunk/key_file": _unit("authentication"),
        "chunk/layout": _unit("layout", "head_shards"),
        "chunk/shards": _unit("shards", "head_shards"),
        "engine/batch": _unit("batch"),
        "engine/brought": _unit("brought"),
        "engine/chain": _unit("chain"),
        "engine/jobs": _ENGINE,
        "engine/memory_tier": _unit("memory_engine", "device_sums"),
        "engine/moves": _unit("moves"),
        "engine/pump": _unit("pump"),
        "engine/queued": _unit("queued"),
        "engine/records": _unit("job_table"),
        "engine/shard_chain": _unit("shard_chain"),
        "engine/slot_headers": _unit("slot_headers", "late_checksums"),
        "engine/staging": _unit("staging"),
        "engine/states": _unit("engine_states"),
        "engine/turn": _unit("turn"),
        "engine/waiting": _unit("grace"),
        "identity/excused": (*_unit("settings"), "tests/vllm/test_identity_fields.py"),
        "identity/excused_environment": ("tests/vllm/test_identity_fields.py",),
        "identity/namespace": _unit("namespace", "sharded_namespace"),
        "identity/settings": _unit("settings"),
        "identity/weights": _unit("weights", "weights_cache"),
        "identity/weights_cache": _unit("weights_cache"),
        "identity/weights_files": _unit("weights", "weights_cache"),
    }.items()
}
