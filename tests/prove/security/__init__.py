"""Attacks on chunks in a bucket and a shared directory, by somebody who can write there and lacks the key.

Each forged shard must be a miss and touch no KV block. Those that are worth something are given to a server without
``authenticate``, too, which must be fooled: else the attack is none.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from nixl_offload.chunk.authentication import ChunkKeys
from nixl_offload.chunk.header import MAGIC
from nixl_offload.engine import Chunk
from nixl_offload.movers.base import Mover
from nixl_offload.movers.copy import CopyMover
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Outcome as ChunkOutcome
from tests.prove.cells import Cell, Outcome
from tests.prove.security.attacks import FORGERIES, PAGE, REFUSED, Loot
from tests.prove.security.manifests import try_manifests
from tests.prove.security.memory import MOST_BYTES, peak_bytes
from tests.unit.chain_rig import make_host
from tests.unit.engine_rig import CHUNK_BLOCKS, NAMESPACE, NUM_BLOCKS, SHAPES, Rig
from tests.unit.link_rig import NAMESPACE_NAME, ObjectFiles, objects, tree

TARGET: Final = 5
EMPTY: Final = 0xEE
ROUNDS: Final = 2
"""Of all attacks, on each shape of KV cache."""


def cells(seed: int) -> Iterator[Cell]:
    """Yield a cell for each kind of storage and way into KV blocks, and one of forged manifests."""
    for kind in ("shared_dir", "s3"):
        for way in ("load", "promotion"):
            yield Cell(f"forged/{kind}/{way}", partial(try_forgeries, kind, way, seed, SHAPES, ROUNDS), limit_s=300)
    yield Cell("forged/manifests", partial(try_manifests, seed, 40), limit_s=300)


def try_forgeries(kind: str, way: str, seed: int, shapes: Any, rounds: int) -> Outcome:
    """Attack chunks of KV caches of several shapes. The same arguments try the same."""
    logging.disable(logging.CRITICAL)
    outcome = Outcome(counts={"forgeries": 0, "controls": 0, "replays": 0})
    try:
        for shape in shapes:
            for number in range(rounds):
                words = f"seed {seed}, {kind}, {way}, {shape}, round {number}"
                drawn = random.Random(words)
                with ExitStack() as stack:
                    _attack(stack, Path(f"{kind}-{way}-{shape}-{number}"), kind, way, shape, drawn, words, outcome)
    finally:
        logging.disable(logging.NOTSET)
    outcome.leaks += [
        f"a thread is left: {each.name}" for each in threading.enumerate() if each.name.startswith("nixl-offload")
    ]
    return outcome


class _Servers:
    """Ranks of servers over directories of their own, or over that of the target."""

    def __init__(self, stack: ExitStack, root: Path, kind: str, shape: str) -> None:
        self._stack, self._root, self._kind, self._shape = stack, root, kind, shape
        self._number = 0

    def make(self, keys: ChunkKeys | None, at: str = "", *, rank: int = 0, seed: int = 1, **options: Any) -> Rig:
        """Start one. ``at``: a directory that others have, too."""
        self._number += 1
        place = self._root / (at or f"own-{self._number}")
        place.mkdir(parents=True, exist_ok=True)
        mover: Mover = CopyMover() if self._kind == "shared_dir" else ObjectFiles(place)
        link = tree(place.absolute(), rank=rank) if self._kind == "shared_dir" else objects(rank)
        rig = Rig.make(place, self._shape, mover, link=link, keys=keys, seed=seed, **options)
        self._stack.enter_context(closing(rig))
        rig.place = place  # type: ignore[attr-defined]
        return rig

    def file(self, rig: Rig, number: int, group: int, rank: int = 0) -> Path:
        """Where a shard is stored."""
        name = shard_name(NAMESPACE_NAME, rig.key(number, group), rank)
        place: Path = rig.place  # type: ignore[attr-defined]
        return place / (name if self._kind == "shared_dir" else name.replace("/", "_"))


def _attack(
    stack: ExitStack, root: Path, kind: str, way: str, shape: str, drawn: random.Random, words: str, outcome: Outcome
) -> None:
    group, first = drawn.randrange(len(SHAPES[shape].groups)), drawn.choice([0, 0, 0, 1])
    known, retired, attackers = (drawn.randbytes(32) for _ in range(3))
    servers = _Servers(stack, root, kind, shape)

    jobs = itertools.count(1)

    def stored(rig: Rig, number: int = TARGET, rank: int = 0) -> bytes:
        blocks = range(number, number + CHUNK_BLOCKS - first)
        assert rig.store(next(jobs), [rig.chunk(number, blocks, group=group, first=first)]) == (ChunkOutcome.OK,)
        return servers.file(rig, number, group, rank).read_bytes()

    writer = servers.make(ChunkKeys([known]), "target")
    loot = Loot(
        target=stored(writer),
        other_key=stored(writer, TARGET + 1),
        other_namespace=stored(servers.make(ChunkKeys([known]), namespace=bytes(reversed(NAMESPACE)), seed=2)),
        other_rank=stored(servers.make(ChunkKeys([known]), namespace=bytes([9]) * 32, rank=1, seed=3), rank=1),
        retired=stored(servers.make(ChunkKeys([retired]))),
        unsigned=stored(servers.make(None)),
        attackers_key=attackers,
        random=drawn,
    )
    path = servers.file(writer, TARGET, group)
    wanted = writer.bytes_of(range(TARGET, TARGET + CHUNK_BLOCKS - first), group)
    # As in the middle of a rotation: the key that signs is another one.
    hosts = {
        keys: make_host(writer.location(0).slot_bytes, memory_slots=2) if way == "promotion" else None
        for keys in ("known", "none")
    }
    reader = servers.make(ChunkKeys([drawn.randbytes(32), known]), "target", seed=4, host=hosts["known"])
    fooled = servers.make(None, "target", seed=5, host=hosts["none"])
    stack.callback(lambda: [host.close() for host in hosts.values() if host is not None])

    def load(rig: Rig, begin: int = first) -> tuple[ChunkOutcome, bytes, bool]:
        """Return what became of it, the bytes that came, and whether anything else was touched."""
        rig.wipe(EMPTY)
        blocks = list(range(10, 10 + CHUNK_BLOCKS - begin))
        io = rig.chunk(TARGET, blocks, group=group, first=begin)
        if way == "promotion":
            io = Chunk(io.key, io.location, io.group, io.block_ids, io.first_block, 0)
        (result,) = rig.load(next(jobs), [io])
        others = rig.bytes_of(sorted(set(range(NUM_BLOCKS)) - set(blocks)), group)
        return result, rig.bytes_of(blocks, group), set(others) != {EMPTY}

    def refused(name: str) -> None:
        begin, before_bytes = drawn.randrange(first, CHUNK_BLOCKS), peak_bytes()
        result, found, touched = load(reader, begin)
        if (grown_bytes := peak_bytes() - before_bytes) > MOST_BYTES:
            outcome.wrong.append(f"{words}: {name} made the server ask for {grown_bytes >> 20} MiB")
        if result is ChunkOutcome.OK or set(found) != {EMPTY} or touched:
            outcome.wrong.append(f"{words}: {name} was used, from block {begin} on: {result}")
        host = hosts["known"]
        # A read that failed leaves what it has brought, in a slot that the catalog gives to another chunk.
        kept = host is not None and bytes(host.slot(0, 4096).memory[: len(MAGIC)]) == MAGIC
        if kept and result is ChunkOutcome.CORRUPT:
            outcome.wrong.append(f"{words}: {name} stays in memory")

    for name in drawn.sample([*REFUSED], len(REFUSED)):
        outcome.counts["forgeries"] += 1
        path.write_bytes(REFUSED[name](loot))
        refused(name)
        if name in FORGERIES:
            outcome.counts["controls"] += 1
            result, found, _ = load(fooled)
            if result is not ChunkOutcome.OK or found == wanted:
                outcome.missed.append(f"{words}: {name} fools nobody: {result}")
        if drawn.random() < 0.2:
            path.write_bytes(loot.target)
            if load(reader)[:2] != (ChunkOutcome.OK, wanted):
                outcome.missed.append(f"{words}: after {name} the right shard is not loaded")
    path.write_bytes(loot.target + drawn.randbytes(PAGE))
    result, found, _ = load(reader)
    if found != (wanted if result is ChunkOutcome.OK else bytes([EMPTY]) * len(wanted)):
        outcome.wrong.append(f"{words}: longer: {result} with other bytes")
    # What a server with the key stored here before is served: it was computed of the same tokens.
    writer.wipe(7)
    path.write_bytes(b"")
    if stored(writer)[4096 + first * writer.layout.groups[group].block_bytes :][:8] != bytes([7]) * 8:
        outcome.missed.append(f"{words}: the chunk was not stored anew")
    path.write_bytes(loot.target)
    outcome.counts["replays"] += 1
    if load(reader)[:2] != (ChunkOutcome.OK, wanted):
        outcome.missed.append(f"{words}: what was stored before is not served")
