"""What gc plans: the oldest go, nothing young does, limits are kept and hardly more is deleted than they ask for."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from nixl_offload.tiers.inspect import ChunkInfo, ShardInfo
from nixl_offload.tiers.shared.sweep import GRACE_S, Ages, make_plan
from nixl_offload.types import Key

NOW_S = 1_800_000_000.0


def chunk(age_s: float, size_bytes: int = 100, objects: int = 1) -> ChunkInfo:
    shards = (ShardInfo(n, f"n{n}", 0 if n else size_bytes, 0, NOW_S - age_s) for n in range(objects))
    return ChunkInfo(Key(bytes(36)), tuple(shards))


def counted(chunks: list[ChunkInfo]) -> Ages:
    ages = Ages(NOW_S)
    for item in chunks:
        ages.add(item)
    return ages


_AGES = st.floats(min_value=-100, max_value=3e7) | st.integers(0, 2000).map(float)
_CHUNKS = st.lists(st.builds(chunk, _AGES, st.integers(0, 1000), st.integers(1, 4)), max_size=60)


def width_s(item: ChunkInfo) -> float:
    """Return the width of its age bucket."""
    return 0.001 * max(0.0, NOW_S - item.modified_s) + 1.0


@given(_CHUNKS, st.none() | st.integers(0, 20_000), st.none() | st.floats(0, 1e7))
def test_whatever_is_there_the_limits_are_kept(
    chunks: list[ChunkInfo], max_bytes: int | None, older_than_s: float | None
) -> None:
    """Limits hold to within one age bucket."""
    plan = make_plan(counted(chunks), max_bytes=max_bytes, older_than_s=older_than_s)
    taken = [(item, plan.takes(item)) for item in chunks]
    gone, kept = [item for item, goes in taken if goes], [item for item, goes in taken if not goes]
    assert all(item.modified_s < NOW_S - GRACE_S for item in gone)
    old_enough = [item for item in kept if item.modified_s < NOW_S - GRACE_S]
    if older_than_s is not None:
        assert all(item.modified_s >= NOW_S - older_than_s for item in old_enough)
    kept_bytes = sum(item.size_bytes for item in kept)
    if max_bytes is not None:
        left = [item for item in old_enough if item.size_bytes and item.modified_s < NOW_S - GRACE_S - width_s(item)]
        assert kept_bytes <= max_bytes or not left
    expired = [item for item in gone if older_than_s is not None and item.modified_s < NOW_S - older_than_s]
    by_size = [item for item in gone if item not in expired]
    if by_size:
        assert max_bytes is not None
        youngest = max(by_size, key=lambda item: item.modified_s)
        assert youngest.modified_s - width_s(youngest) <= min((item.modified_s for item in kept), default=math.inf)
        in_last = [item for item in gone if item.modified_s >= youngest.modified_s - 2 * width_s(youngest)]
        assert max_bytes - kept_bytes <= sum(item.size_bytes for item in in_last), "hardly more goes than must"
