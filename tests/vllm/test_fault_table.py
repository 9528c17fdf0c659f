"""Proves over a running vLLM that damage to stored files never shows: each answer is that of a vLLM without us.

After every case: tokens and logprobs are those of an engine without a connector, the engine lives, what was damaged is
stored anew and loadable, and the directory holds no more than its capacity.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.units import parse_size
from tests.vllm.damage import (
    CHUNK_BYTES,
    ENGINE_OPTIONS,
    PROMPT_CHUNKS,
    Reference,
    TierFiles,
    chunk_prompts,
    loads_refused,
    until,
)
from tests.vllm.harness import BLOCK_TOKENS, CHUNK_TOKENS, Engine, Workshop, file_tier

CAPACITY = "96MiB"
PROMPTS = chunk_prompts(2, seed=101)
FRESH = iter(chunk_prompts(60, seed=102))
"""Prompts that nobody has seen: each makes the engine store."""
STORED = len(PROMPTS) * PROMPT_CHUNKS
BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
BLOCK_BYTES = CHUNK_BYTES // BLOCKS

HEADER_FIELDS = {
    "magic": 0,
    "version": 8,
    "header_bytes": 10,
    "algorithm": 12,
    "flags": 14,
    "namespace": 16,
    "group": 48,
    "blocks_per_chunk": 52,
    "first_valid_block": 54,
    "block_bytes": 56,
    "payload_bytes": 64,
    "created": 72,
    "key_bytes": 80,
    "reserved": 82,
    "key": 88,
    "end_of_key": 151,
    "reserved_after_key": 170,
    "first_block_checksum": 192,
    "last_block_checksum": 192 + 8 * BLOCKS - 1,
    "after_the_table": 192 + 8 * BLOCKS,
    "end_of_reserved": 4087,
    "header_checksum": 4088,
    "end_of_header": 4095,
}
PAYLOAD = {
    "first_byte": 0,
    "end_of_first_block": BLOCK_BYTES - 1,
    "middle": CHUNK_BYTES // 2,
    "last_block": CHUNK_BYTES - BLOCK_BYTES,
    "last_byte": CHUNK_BYTES - 1,
}


@pytest.fixture(scope="module")
def files(workshop: Workshop) -> TierFiles:
    """The directory that all engines here use."""
    return TierFiles(workshop.scratch / "kv")


class Served:
    """The engine with the connector; ``restart`` replaces it."""

    def __init__(self, workshop: Workshop, base: Path) -> None:
        self._workshop = workshop
        self._base = base
        self.engine = self._start()

    def stop(self) -> None:
        """Stop the engine cleanly: an engine that died fails here."""
        self.engine.stop()

    def start(self) -> Engine:
        """Start another on the same directory."""
        self.engine.close()
        self.engine = self._start()
        return self.engine

    def _start(self) -> Engine:
        return self._workshop.start_engine(connector=file_tier(self._base, capacity=CAPACITY), **ENGINE_OPTIONS)


@pytest.fixture(scope="module")
def served(workshop: Workshop, files: TierFiles, reference: Reference) -> Iterator[Served]:
    """An engine that has stored ``PROMPTS``."""
    made = Served(workshop, files.base)
    reference.check_healed(made.engine, PROMPTS)
    yield made
    made.stop()


@pytest.fixture
def engine(served: Served, files: TierFiles) -> Iterator[Engine]:
    """The running engine. Every test leaves ``PROMPTS`` stored and loadable."""
    yield served.engine
    assert files.real_bytes() <= parse_size(CAPACITY)


def damaged_and_healed(engine: Engine, reference: Reference, damage: Callable[[], None], *, chunks: int) -> None:
    """Damage; assert right answers, that it was noticed, and that exactly ``chunks`` chunks were stored anew."""
    refused, stored_bytes = loads_refused(engine), engine.stored_bytes()
    damage()
    reference.check_healed(engine, PROMPTS)
    assert loads_refused(engine) > refused
    assert engine.stored_bytes() - stored_bytes == chunks * CHUNK_BYTES


@pytest.mark.parametrize("first", range(0, len(HEADER_FIELDS), STORED))
def test_a_flipped_byte_in_a_header(first: int, engine: Engine, files: TierFiles, reference: Reference) -> None:
    """Every field, reserved bytes too: the chunk is refused and stored anew.

    As many fields at once as there are chunks, one in each: a chunk that was not refused would not be stored anew.
    """
    fields = list(HEADER_FIELDS.values())[first : first + STORED]

    def damage() -> None:
        for chunk, at in zip(files.chunks(STORED), fields, strict=False):
            files.flip(files.slab, chunk.offset + at)

    damaged_and_healed(engine, reference, damage, chunks=len(fields))


@pytest.mark.parametrize("place", PAYLOAD)
def test_a_flipped_byte_in_a_payload(place: str, engine: Engine, files: TierFiles, reference: Reference) -> None:
    """In any block, at its beginning or end: the chunk is refused and stored anew."""
    chunks = files.chunks(STORED)
    chunk = chunks[list(PAYLOAD).index(place) % len(chunks)]
    at = chunk.offset + HEADER_BYTES + PAYLOAD[place]
    damaged_and_healed(engine, reference, lambda: files.flip(files.slab, at, 0x80), chunks=1)


def test_flipped_bytes_anywhere_in_the_slab(engine: Engine, files: TierFiles, reference: Reference) -> None:
    """Random bytes, of stored chunks, unused slots and the space between: answers are right, damage is made good."""
    chance = random.Random(7)
    size = files.slab.stat().st_size
    for _ in range(4):
        for _ in range(9):
            files.flip(files.slab, chance.randrange(size), 1 << chance.randrange(8))
        reference.check_healed(engine, PROMPTS)


@pytest.mark.parametrize("part", ["slots", "headers", "payloads"])
def test_swapped(part: str, engine: Engine, files: TierFiles, reference: Reference) -> None:
    """Two slots of one size exchanged whole, or only their headers, or only what they hold: both chunks are refused."""
    one, other = (chunk.offset for chunk in (files.chunks(STORED)[index] for index in (1, 6)))
    begin = HEADER_BYTES if part == "payloads" else 0
    length_bytes = {"slots": HEADER_BYTES + CHUNK_BYTES, "headers": HEADER_BYTES, "payloads": CHUNK_BYTES}[part]
    damaged_and_healed(engine, reference, lambda: files.exchange(one + begin, other + begin, length_bytes), chunks=2)


@pytest.mark.parametrize(
    ("chunk", "keep_bytes"),
    [(0, 0), (0, HEADER_BYTES), (3, HEADER_BYTES + CHUNK_BYTES // 2 + 11), (7, HEADER_BYTES + CHUNK_BYTES - 1)],
    ids=["to_nothing", "to_a_header", "within_a_payload", "by_one_byte"],
)
def test_truncated(chunk: int, keep_bytes: int, engine: Engine, files: TierFiles, reference: Reference) -> None:
    """What was cut off is refused, never made up of what the memory held before; it is stored anew."""
    chunks = files.chunks(STORED)
    size = chunks[chunk].offset + keep_bytes
    lost = sum(each.offset + HEADER_BYTES + CHUNK_BYTES > size for each in chunks)
    assert lost >= 1
    reference.check_healed(engine, PROMPTS)
    os.truncate(files.slab, size)
    reference.check_healed(engine, PROMPTS)
    files.chunks(STORED)


@pytest.mark.parametrize("content", ["zeros", "noise"])
def test_overwritten(content: str, engine: Engine, files: TierFiles, reference: Reference) -> None:
    """The whole slab holds something else: every chunk is refused and stored anew."""
    size = files.slab.stat().st_size

    def overwrite() -> None:
        data = bytes(size) if content == "zeros" else random.Random(8).randbytes(size)
        with files.slab.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data, 0)
            os.fsync(file.fileno())

    damaged_and_healed(engine, reference, overwrite, chunks=STORED)


@pytest.mark.parametrize("what", ["slab", "index", "namespace", "directory", "replaced"])
def test_deleted(what: str, engine: Engine, files: TierFiles, reference: Reference, served: Served) -> None:
    """A file, a directory, or all of it vanishes under a running engine: answers stay right. A lost index is made anew
    at once; of the others nothing is, before the engine is restarted. What the new files hold is loadable.
    """
    slab = files.slab
    if what == "replaced":
        slab.with_name("other").write_bytes(random.Random(9).randbytes(slab.stat().st_size))
        slab.with_name("other").replace(slab)
    elif what in ("slab", "index"):
        {"slab": slab, "index": files.index}[what].unlink()
    else:
        shutil.rmtree({"namespace": files.directory, "directory": files.base}[what])
    seen = [next(FRESH)]

    def is_made_anew() -> bool:
        time.sleep(0.3)  # after seconds, and each look takes another prompt
        seen.append(next(FRESH))
        before = engine.stored_bytes()
        reference.check(engine, [*PROMPTS, seen[-1]])
        assert engine.settle()
        return engine.stored_bytes() > before and files.index.exists()

    if what == "index":
        until(is_made_anew, "storing again")
    reference.check(engine, [*PROMPTS, *seen])
    reference.check(engine, [*PROMPTS, *seen])
    served.stop()
    reference.check_healed(served.start(), [*PROMPTS, seen[-1]])


@pytest.mark.parametrize("name", ["index.sqlite", "manifest.json", "lock"])
def test_flipped_bytes_in_the_small_files(name: str, served: Served, files: TierFiles, reference: Reference) -> None:
    """Flipped while no engine runs, at telling and at random places: the next engine starts, and answers right."""
    chance = random.Random(name)
    for telling in (0, 18, 100, None):
        served.stop()
        path = files.base / name if name == "lock" else files.directory / name
        size = path.stat().st_size
        for position in [chance.randrange(size) for _ in range(4)] if telling is None else [telling % size]:
            files.flip(path, position, 1 << chance.randrange(8))
        reference.check_healed(served.start(), PROMPTS)
        files.chunks(STORED)
        assert files.real_bytes() <= parse_size(CAPACITY)


def test_truncated_or_deleted_index(served: Served, files: TierFiles, reference: Reference) -> None:
    """Without its index, or with half of it, an engine starts with fewer chunks and makes the rest anew."""
    for size in (0, 100, 4096, 6000, None):
        served.stop()
        if size is None:
            files.index.unlink()
        else:
            os.truncate(files.index, size)
        reference.check_healed(served.start(), PROMPTS)
        files.chunks(STORED)


def test_an_index_of_yesterday(served: Served, files: TierFiles, reference: Reference, workshop: Workshop) -> None:
    """An old index names slots that hold other chunks by now: they are refused, and answers are right."""
    served.stop()
    old = shutil.copytree(files.directory, workshop.scratch / "old")
    engine = served.start()
    assert engine.reset_prefix_cache(connector=True)
    others = [next(FRESH), next(FRESH)]
    reference.check_healed(engine, others)
    served.stop()
    files.directory.joinpath("index.sqlite-journal").unlink(missing_ok=True)
    shutil.copy(old / "index.sqlite", files.index)
    engine = served.start()
    reference.check(engine, PROMPTS)
    assert loads_refused(engine) > 0, "the old index found nothing to be wrong about"
    reference.check_healed(engine, [*PROMPTS, *others])
