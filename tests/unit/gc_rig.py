"""The rig of tests of ``nixl-offload gc``: namespaces with real manifests, filled through any store."""

from __future__ import annotations

import time
from dataclasses import replace
from hashlib import sha256

from nixl_offload.identity.namespace import Namespace, make_namespace
from nixl_offload.stores.base import Store
from nixl_offload.tiers.shared.naming import manifest_name, shard_name
from nixl_offload.tiers.shared.tier import write_manifest
from nixl_offload.types import Key
from tests.unit import shared_rig

RANKS = 2
_FIELDS = replace(
    shared_rig.namespace_of(RANKS, sizes=[(4096, 4096)]).fields,
    model="org/model",
    blocks_per_chunk=16,
    ranks=("ab", "cd"),
)


def namespace_of(tenant: str = "default", model: str = "org/model") -> Namespace:
    return make_namespace(replace(_FIELDS, tenant=tenant, model=model))


def key(number: int) -> Key:
    return Key(sha256(str(number).encode()).digest() + bytes(4))


def put(store: Store, name: str, size_bytes: int = 1000) -> None:
    store.write(name, memoryview(bytes(size_bytes)))


def put_chunk(store: Store, namespace: Namespace, number: int, size_bytes: int = 1000) -> list[str]:
    """Write all shards of a chunk; ``size_bytes`` each."""
    names = [shard_name(namespace.name, key(number), rank) for rank in range(RANKS)]
    for name in names:
        put(store, name, size_bytes)
    return names


def put_manifest(store: Store, namespace: Namespace) -> str:
    """Write a manifest as servers do."""
    write_manifest(namespace, time.time, store)
    return manifest_name(namespace.name)
