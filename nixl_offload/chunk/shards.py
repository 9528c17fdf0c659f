"""How a chunk is cut into shards by its KV heads, and which rank of a tensor-parallel engine holds which of them.

The cut depends on the model and the chunk alone, so engines of different sizes store the same shards. A rank holds
whole shards, and only consecutive ones; where there are more ranks than KV heads, or where KV is not divided (MLA),
several ranks hold the same: they are replicas, and one of them writes for all.

Threading: immutable values and pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final, Literal, NamedTuple

from nixl_offload.types import Key

MOST_SHARDS: Final = 8
"""The most that ``auto`` cuts a chunk into: as many as a usual server has GPUs."""
LEAST_SHARD_BYTES: Final = 1 << 20
"""The least that ``auto`` makes of a shard: below it a file or an object costs more than its bytes."""

Shards = Literal["auto"] | int
"""What the config says, where chunks are to be cut: ``Config.shards``."""


class Shard(NamedTuple):
    """What tells a shard from the others of its chunk."""

    number: int
    """In its name."""
    digest: bytes
    """In its header: 32 bytes, of the namespace and the number."""


@dataclass(frozen=True, slots=True)
class GroupShards:
    """How the chunks of one KV-cache group are cut, and held by ``tp`` ranks. Make one with ``hold``."""

    shards: int
    """Of each chunk."""
    per_rank: int
    """How many each rank holds."""
    replicas: int
    """How many ranks hold the same shards; above 1 each holds one."""

    def held_by(self, rank: int) -> range:
        """Return the shards that a rank holds."""
        first = rank // self.replicas * self.per_rank
        return range(first, first + self.per_rank)

    def writes(self, rank: int, key: Key) -> bool:
        """Whether a rank writes its shards of a key where its replicas would write the same: every key has one writer
        among them, evenly spread.
        """
        return int.from_bytes(key[:4], "big") % self.replicas == rank % self.replicas


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What all ranks of an engine hold, group by group, in the order of the groups that are offloaded."""

    groups: tuple[GroupShards, ...]

    def layout_groups(self, group: int) -> range:
        """Return the positions in a rank's ``KVLayout.groups`` of its shards of a group: those of the groups before it
        come first.
        """
        first = sum(each.per_rank for each in self.groups[:group])
        return range(first, first + self.groups[group].per_rank)

    def numbers(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the shards that a rank holds, by position in ``KVLayout.groups``."""
        return tuple(number for group in self.groups for number in group.held_by(rank))


def cut(wanted: Shards, heads: Collection[int], chunk_bytes: int) -> int:
    """Return into how many shards the chunks of a group are cut.

    ``heads``: the KV heads that its layers have on all ranks together; 1 where KV is not divided (MLA).
    ``chunk_bytes``: of a whole chunk, over all ranks, replicas once. A number that does not divide the heads is reduced
    to what it has in common with them.
    """
    common = gcd(*heads)
    if isinstance(wanted, int):
        return gcd(wanted, common)
    shards = 1
    while shards < MOST_SHARDS and common % (2 * shards) == 0 and chunk_bytes >= 2 * shards * LEAST_SHARD_BYTES:
        shards *= 2
    return shards


def hold(shards: int, heads: Collection[int], tp: int) -> GroupShards | None:
    """Return how ``tp`` ranks hold the chunks of a group; None: some rank would hold a part of a shard."""
    if tp <= shards and shards % tp == 0:
        return GroupShards(shards, shards // tp, 1)
    if set(heads) == {shards} and tp % shards == 0:
        return GroupShards(shards, 1, tp // shards)
    return None


def make_plan(wanted: Shards, heads: Sequence[Collection[int]], chunk_bytes: Sequence[int], tp: int) -> ShardPlan | str:
    """Return the plan of an engine, or why there is none, as a clause. ``heads``, ``chunk_bytes``: as for ``cut``, by
    group.
    """
    groups = []
    for number, (of_layers, size_bytes) in enumerate(zip(heads, chunk_bytes, strict=True)):
        shards = cut(wanted, of_layers, size_bytes)
        held = hold(shards, of_layers, tp)
        if held is None:
            total = gcd(*of_layers)
            works = set(of_layers) == {total} and (total % tp == 0 or tp % total == 0)
            return (
                f"`shards: {wanted}` cuts the {max(of_layers)} KV heads of group {number} into {shards}, which tensor "
                f"parallelism {tp} cannot share out; {f'`shards: {total}` would do' if works else 'no number would do'}"
            )
        groups.append(held)
    return ShardPlan(tuple(groups))
