"""How a chunk is cut into shards, each a range of KV heads in a range of layers, and which rank holds which shards.

The cut depends only on the model, the chunk and the config, so engines of different sizes store the same shards. A
rank holds whole shards: those of its own heads in its own pipeline stage. If there are more ranks than KV heads, or KV
is not divided (MLA), several ranks of a stage hold the same shards. They are replicas: one writes each chunk for all.
"Shards" are counted per chunk, "head ranges" per range of layers.

A chunk that cannot be cut has one shard for each rank (``uncut_plan``).

Threading: immutable values and pure functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import compress, count
from math import gcd
from typing import Final, Literal, NamedTuple

from nixl_offload.errors import NotSupportedError
from nixl_offload.types import Key

HeadCut = Literal["distinct"] | int
"""How many head ranges the config asks for: ``ShardCut.heads``."""


class Shard(NamedTuple):
    """Identifies a shard within its chunk."""

    number: int
    """Part of its name."""
    digest: bytes
    """Part of its header: 32 bytes, a digest of the namespace and the number."""


@dataclass(frozen=True, slots=True)
class GroupShards:
    """How the chunks of one KV-cache group are cut, and which ranks of a stage hold which head ranges."""

    head_ranges: int
    """Head ranges in each range of layers."""
    per_rank: int
    """Head ranges that each rank holds, in each range of layers of its stage."""
    replicas: int
    """How many ranks of a stage hold the same shards. If above 1, ``per_rank`` is 1."""
    ranges: tuple[int, ...] = (0,)
    """Numbers of the ranges in which the group has layers."""

    @property
    def ranks(self) -> int:
        """Number of ranks in a stage."""
        return self.head_ranges // self.per_rank * self.replicas

    def held_by(self, rank: int) -> range:
        """Return the head ranges that a rank holds. ``rank``: its number within its stage."""
        first = rank // self.replicas * self.per_rank
        return range(first, first + self.per_rank)

    def writes(self, rank: int, key: Key) -> bool:
        """True if this rank writes the key for its replicas. Each key has one writer; keys are spread evenly.

        ``rank``: its number within the engine or within its stage.
        """
        return int.from_bytes(key[:4], "big") % self.replicas == rank % self.replicas


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How the layers of a model are cut into ranges, and which of them each pipeline stage holds. Default: one each."""

    begins: tuple[int, ...] = (0,)
    """The first layer of each range."""
    stages: tuple[range, ...] = (range(1),)
    """The ranges that each stage holds."""


ONE_RANGE: Final = LayerCut()
_NOT_DISTINCT: Final = "with tensor parallelism {tp} ranks do not have one KV head each in all layers of group {number}"


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Which shards all ranks of an engine hold, by offloaded group.

    A shard's number is its range of layers times ``per_range``, plus its head range.
    """

    groups: tuple[GroupShards, ...]
    layers: LayerCut = ONE_RANGE
    is_cut: bool = True
    """False: a shard is all that one rank has, in its own memory order; only engines of the same size share it."""

    @property
    def ranks(self) -> int:
        """Number of ranks in the engine."""
        return len(self.layers.stages) * self.groups[0].ranks

    @property
    def shards(self) -> int:
        """How many shard numbers there are."""
        return len(self.layers.begins) * self.per_range

    def ranges(self, rank: int, group: int) -> tuple[int, ...]:
        """Return the ranges of layers in which a rank holds shards of a group."""
        stage = self.layers.stages[rank // self.groups[group].ranks]
        return tuple(number for number in self.groups[group].ranges if number in stage)

    def held(self, rank: int, group: int) -> tuple[int, ...]:
        """Return the numbers of the shards of a group that a rank holds."""
        heads = self.groups[group].held_by(rank % self.groups[group].ranks)
        return tuple(number * self.per_range + each for number in self.ranges(rank, group) for each in heads)

    def shards_of(self, rank: int) -> list[tuple[int, int]]:
        """Return group (its position in ``KVLayout.groups``) and number of each shard that a rank holds."""
        return [(group, number) for group in range(len(self.groups)) for number in self.held(rank, group)]

    @property
    def per_range(self) -> int:
        """How many shard numbers each range of layers has: the most head ranges of any group."""
        return max(group.head_ranges for group in self.groups)


def uncut_plan(ranks: int, groups: int) -> ShardPlan:
    """Return the plan of chunks that are not cut: each rank holds one shard of each group, with the rank's number. A
    shard is empty if its rank has no layer of the group.
    """
    return ShardPlan((GroupShards(ranks, 1, 1),) * groups, is_cut=False)


def cut_layers(wanted: Sequence[tuple[int, int]], stages: Sequence[tuple[int, int]]) -> LayerCut | None:
    """Cut layers at the starts of the stages ``wanted``; None if one of ``stages`` starts inside a range. Both list,
    in order, each stage's first layer and the one after its last.
    """
    begins = sorted({begin for begin, end in wanted if begin < end})
    held = []
    for begin, end in stages:
        if begin < end and begin not in begins:
            return None
        held.append(range(bisect_left(begins, begin), bisect_left(begins, end)))
    return LayerCut(tuple(begins), tuple(held))


def make_plan(
    wanted: HeadCut,
    heads: Sequence[Collection[int]],
    has_layers: Sequence[Sequence[bool]],
    tp: int,
    layers: LayerCut = ONE_RANGE,
) -> ShardPlan:
    """Return the plan of an engine with ``tp`` ranks in each stage.

    Raises NotSupportedError if a rank would hold only part of a shard; its message is a clause.
    ``heads``: by group, the KV head counts of its layers on all ranks together; 1 if KV is not divided (MLA). A
    number ``wanted`` is reduced to its gcd with these. ``has_layers``: by group and range of layers.
    """
    groups = []
    for number, (of_layers, has) in enumerate(zip(heads, has_layers, strict=True)):
        total, has_ranges = gcd(*of_layers), tuple(compress(count(), has))
        head_ranges = total if wanted == "distinct" else gcd(wanted, total)
        is_alike = set(of_layers) == {total}
        if tp <= head_ranges and head_ranges % tp == 0:
            held = GroupShards(head_ranges, head_ranges // tp, 1, has_ranges)
        elif is_alike and head_ranges == total and tp % total == 0:
            held = GroupShards(head_ranges, 1, tp // head_ranges, has_ranges)
        elif wanted == "distinct":
            raise NotSupportedError(_NOT_DISTINCT.format(tp=tp, number=number))
        else:
            works = is_alike and (total % tp == 0 or tp % total == 0)
            raise NotSupportedError(
                f"`shards: {wanted}` cuts the {max(of_layers)} KV heads of group {number} into {head_ranges}, which "
                f"tensor parallelism {tp} cannot share out; "
                f"{f'`shards: {total}` would do' if works else 'no number would do'}"
            )
        if wanted == "distinct" and held.per_rank > 1:
            raise NotSupportedError(_NOT_DISTINCT.format(tp=tp, number=number))
        groups.append(held)
    return ShardPlan(tuple(groups), layers)
