"""Proves, over a real server and each real mover of objects: an engine loads the objects of another bit for bit; damage
to objects in the bucket brings no other bytes into a KV block; and answers that come late reach no memory in use.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_offload.chunk.header import HEADER_BYTES
from nixl_offload.config.schema import S3Config
from nixl_offload.errors import NixlOffloadError
from nixl_offload.movers.base import Mover
from nixl_offload.movers.select import make_object_mover
from nixl_offload.tiers.shared.naming import shard_name
from nixl_offload.types import Outcome
from tests.unit.engine_rig import NUM_BLOCKS, Clock, Rig, rigs, until
from tests.unit.link_rig import NAMESPACE_NAME, Watched, objects

from .proxy import FaultProxy, Hold, Stall
from .servers import RcloneServer

OK, FAILED, CORRUPT = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT
SOURCE, TARGET = [1, 2, 3, 4], [5, 6, 7, 8]
MOVERS = ["obj", "obstore"]
Make = Callable[..., Rig]


@pytest.fixture
def mover(rclone: RcloneServer, prefix: str, s3_environment: None) -> Callable[..., Mover]:
    def build(name: str, endpoint: str | None = None) -> Mover:
        fields = {"connections": 8, "request_timeout": "5s"}
        tier = S3Config.model_validate(rclone.tier(prefix, endpoint=endpoint, **fields))
        try:
            return make_object_mover(name, tier)
        except NixlOffloadError as error:
            pytest.skip(str(error))

    return build


make = pytest.fixture(rigs)


@pytest.mark.parametrize("verify", ["checksum", "header"])
@pytest.mark.parametrize("name", MOVERS)
def test_a_bucket_gives_back_what_was_stored_or_nothing(
    make: Make, mover: Callable[..., Mover], rclone: RcloneServer, prefix: str, name: str, verify: str
) -> None:
    """Stored by one engine and loaded by another, whole and in part; then damaged in every way."""
    first = make("packed_blocks", link=objects(), mover=mover(name))
    names = [f"{prefix}/{shard_name(NAMESPACE_NAME, first.key(n), 0)}" for n in range(3)]
    rclone.make_directories(str(Path(names[0]).parent), *(str(Path(each).parent) for each in names))
    wanted = first.bytes_of(SOURCE)
    assert first.store(0, [first.chunk(n, SOURCE) for n in range(2)]) == (OK, OK)
    assert first.store(1, [first.chunk(2, SOURCE[2:], first=2)]) == (OK,)
    assert {rclone.path(each).stat().st_size for each in names} == {first.layout.slot_bytes(0)}
    rig = make("packed_blocks", link=objects(), mover=mover(name), seed=2, verify=verify, staging_slots=2)
    block = rig.layout.groups[0].block_bytes
    rig.wipe(0xEE)
    assert rig.load(0, [rig.chunk(0, TARGET), rig.chunk(2, [20, 21], first=2)]) == (OK, OK)
    assert rig.bytes_of([*TARGET, 20, 21]) == wanted + wanted[2 * block :]
    assert rig.load(1, [rig.chunk(1, TARGET[:1], first=1), rig.chunk(2, TARGET)]) == (OK, CORRUPT)
    assert rig.bytes_of(TARGET[:1]) == wanted[block : 2 * block]

    whole, job = rclone.path(names[0]).read_bytes(), 10
    rig.wipe(0xEE)
    for cut in (0, 100, HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 2 * block, len(whole) - 1):
        # The slot that a cut read is to fill may hold the very bytes: what is cut off is right then.
        rclone.write(names[0], whole)
        assert rig.load(job, [rig.chunk(1, TARGET)]) == (OK,)
        rclone.truncate(names[0], cut)
        rig.wipe(0xEE)
        (outcome,) = rig.load(job + 1, [rig.chunk(0, TARGET)])
        assert outcome in {FAILED, CORRUPT} or rig.bytes_of(TARGET) == wanted, cut
        job += 2
    rig.wipe(0xEE)
    rclone.delete(names[0])
    assert rig.load(job, [rig.chunk(0, TARGET)]) == (FAILED,)
    assert rig.link.trouble == "none"
    shutil.copyfile(rclone.path(names[1]), rclone.path(names[0]))
    rclone.forget()
    assert rig.load(job + 1, [rig.chunk(0, TARGET)]) == (CORRUPT,)
    rclone.write(names[0], whole)
    rclone.flip(names[0], HEADER_BYTES + 5 if verify == "checksum" else 50)
    assert rig.load(job + 2, [rig.chunk(0, TARGET)]) == (CORRUPT,)
    assert set(rig.bytes_of(range(NUM_BLOCKS))) == {0xEE}
    rclone.write(names[0], whole + bytes(5000))
    if rig.load(job + 3, [rig.chunk(0, TARGET)]) == (OK,):
        assert rig.bytes_of(TARGET) == wanted
    assert first.store(2, [first.chunk(0, SOURCE)]) == (OK,)
    assert rclone.path(names[0]).stat().st_size == len(whole)


@pytest.mark.parametrize("fault", [Hold(at="answer"), Stall(at=0.5)])
@pytest.mark.parametrize("name", MOVERS)
def test_late_answers_reach_no_memory_that_is_in_use(
    make: Make, mover: Callable[..., Mover], rclone: RcloneServer, name: str, fault: Any
) -> None:
    """GETs are held back at the server until their loads were given up; what is loaded beside them arrives. Their slots
    stay with the mover, which watches itself that none is handed out again; when the bytes come at last, no KV block
    changes.
    """
    clock = Clock()
    with FaultProxy(rclone.port) as proxy:
        watched = Watched(mover(name, proxy.endpoint))
        rig = make("packed_blocks", link=objects(), mover=watched, clock=clock, staging_slots=6)
        wanted = {n: rig.bytes_of(range(4 * n, 4 * n + 4)) for n in range(4)}
        for n in range(4):
            assert rig.store(n, [rig.chunk(n, range(4 * n, 4 * n + 4))]) == (OK,)
        held = [shard_name(NAMESPACE_NAME, rig.key(n), 0) for n in range(2)]
        rule = proxy.inject(fault, operation="GET", key="|".join(held))
        rig.engine.submit_load(10, [rig.chunk(n, range(20 + 4 * n, 24 + 4 * n)) for n in range(3)])
        until(lambda: rig.bytes_of(range(28, 32)) == wanted[2])
        rule.wait(2)
        clock.ahead_s += 31
        assert rig.collect(10).outcomes == (FAILED, FAILED, OK)
        rig.wipe(0xEE)
        for job in range(11, 19):
            assert rig.load(job, [rig.chunk(2 + job % 2, range(32, 36))]) == (OK,)
            assert rig.bytes_of(range(32, 36)) == wanted[2 + job % 2]
        assert len(watched.owned) == 2
        rule.release()
        until(lambda: not watched.owned)
        assert set(rig.bytes_of(range(20, 28))) == {0xEE}
        assert rig.load(20, [rig.chunk(n, range(20 + 4 * n, 24 + 4 * n)) for n in range(2)]) == (OK, OK)
        assert rig.bytes_of(range(20, 28)) == wanted[0] + wanted[1]
        assert watched.overlaps == 0
        rig.close()
