"""``nixl-offload gc`` over a petabyte: real code over a part of it, counted, then scaled.

Both are linear in objects (``collect`` is run at two sizes, and the report shows both). What a request takes is assumed
(``bucket.LATENCY_S``), and so is what obstore adds per listed name; other processor time is measured.
Threading: the threads of gc, which end before a function returns.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Final

from benchmarks.scale.bucket import LATENCY_S, STANDARD, Bucket, Prices
from benchmarks.scale.shapes import Shape
from nixl_offload.cli.gc.collection import _DELETES, Collection
from nixl_offload.cli.gc.listing import LISTS
from nixl_offload.stores.obstore import LIST_PAGE
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.tiers.shared.sweep import make_plan
from nixl_offload.types import Key

PETABYTE: Final = 10**15
CLIENT_S: Final = 1 / 76_000
"""Assumed processor time of obstore per listed name: it listed 76,000 a second from a server on the same machine."""
HOUR_S: Final = 3600.0


@dataclass(frozen=True)
class Collected:
    """One run of gc over a part of a bucket."""

    objects: int
    deleted: int
    lists: int
    deletes: int
    processor_us_per_listed: float

    def scaled(self, objects: float, deleted: float, *, parallel: bool) -> dict[str, float]:
        """Hours and requests for ``objects``, of which ``deleted`` go. ``parallel``: as gc works now, else one
        request after the other, as it did.
        """
        lists, deletes = 2 * objects / LIST_PAGE, deleted / LIST_PAGE
        processor_s = 2 * objects * (self.processor_us_per_listed / 1e6 + CLIENT_S)
        waiting_s = lists * LATENCY_S["list"] / (LISTS if parallel else 1)
        deleting_s = deletes * LATENCY_S["delete"] / (_DELETES if parallel else 1)
        seconds = max(processor_s, waiting_s, deleting_s) if parallel else processor_s + waiting_s + deleting_s
        return {"hours": seconds / HOUR_S, "lists": lists, "deletes": deletes, "dollars": cost(lists)}


def cost(lists: float, prices: Prices = STANDARD) -> float:
    return prices.of({"list": lists})


def filled(shape: Shape, chunks: int, age_s: float = 100_000.0) -> Bucket:
    """A bucket with one namespace of ``chunks`` chunks, stored evenly over the last ``age_s`` of its clock."""
    bucket = Bucket(lambda: age_s, partitions=0)
    name = shape.namespace().name
    for number in range(chunks):
        key = Key(hashlib.sha256(str(number).encode()).digest() + bytes(4))
        for rank in range(shape.ranks):
            bucket.objects[shard_name(name, key, rank)] = (shape.shard_bytes, age_s * number / chunks)
    return bucket


def collect(shape: Shape, chunks: int, part: float = 0.1) -> Collected:
    """Let gc delete the oldest ``part`` of a bucket."""
    bucket = filled(shape, chunks)
    objects, now_s = len(bucket.objects), 100_000.0
    bucket._sorted()
    began_s = time.process_time()
    run = Collection(bucket, namespace=None, tenant=None)
    ages = run.count()
    plan = make_plan(ages, now_s=now_s, max_bytes=round(ages.total.size_bytes * (1 - part)), older_than_s=None)
    run.delete(plan, now_s)
    took_s = time.process_time() - began_s
    assert not run.failures, run.failures
    assert run.deleted.objects == objects - len(bucket.objects)
    return Collected(
        objects, run.deleted.objects, bucket.requests["list"], bucket.requests["delete"], took_s * 1e6 / (2 * objects)
    )
