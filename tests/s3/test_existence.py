"""Existence over a real bucket: HEADs counted at the server, and what a bucket that fails costs a request.

The tier is the real one over the real client; requests are driven as vLLM drives them (see ``tests.unit.shared_rig``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from nixl_offload.catalog import Catalog
from nixl_offload.config import S3Config, parse_config
from nixl_offload.stores.s3 import open_store
from tests.unit.shared_rig import SLOT, Rig, keys_of

from .proxy import Answer, FaultProxy
from .servers import RcloneServer

SHARD = r"/[0-9a-f]{2}/"
MakeRig = Callable[..., Rig]


@pytest.fixture
def proxy(rclone: RcloneServer) -> Iterator[FaultProxy]:
    with FaultProxy(rclone.port) as proxy:
        yield proxy


@pytest.fixture
def make(rclone: RcloneServer, proxy: FaultProxy, prefix: str, s3_environment: None) -> Iterator[MakeRig]:
    """Return a maker of tiers whose requests pass the proxy."""
    rigs: list[Rig] = []

    def build(request_timeout: str = "10s", **arguments: object) -> Rig:
        fields = {**rclone.tier(prefix), "endpoint": proxy.endpoint, "request_timeout": request_timeout}
        (tier,) = parse_config({"tiers": [fields]}).tiers
        assert isinstance(tier, S3Config)
        rigs.append(Rig(open_store(tier), **arguments))  # type: ignore[arg-type]
        return rigs[-1]

    yield build
    proxy.release_all()
    for rig in rigs:
        rig.tier.close(timeout_s=10.0)


def _put(rclone: RcloneServer, prefix: str, rig: Rig, numbers: range) -> None:
    """Let another server have stored chunks, one shard each."""
    for key in keys_of(len(numbers), numbers.start):
        path = rclone.path(f"{prefix}/{rig.names(key)[0]}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(SLOT))
    rclone.forget()


def test_3000_of_4096_are_found_by_64_heads_counted_at_the_server(
    make: MakeRig, rclone: RcloneServer, proxy: FaultProxy, prefix: str
) -> None:
    rig, keys = make(), keys_of(4096)
    _put(rclone, prefix, rig, range(3000))
    rig.settle()
    proxy.forget()
    assert rig.hits("a", keys) == 3000
    rig.settle()
    assert len(proxy.requests("HEAD", SHARD)) <= 64
    assert set(proxy.counts()) <= {"HEAD"}, "and by nothing else"
    for number in range(10):
        assert rig.hits(f"b{number}", keys) == 3000
    assert len(proxy.requests("HEAD", SHARD)) <= 64, "ten more requests cost nothing"


def test_a_bucket_that_asks_to_slow_down_gets_nothing_anew(
    make: MakeRig, rclone: RcloneServer, proxy: FaultProxy, prefix: str
) -> None:
    """Most HEADs are refused, then they are answered again. Requests compute what they were not told of, and none of it
    is stored over what is there.
    """
    rig = make(timeout="1s")
    _put(rclone, prefix, rig, range(640))
    catalog = Catalog([rig.tier], world_size=1, slot_bytes=lambda key: SLOT, store_backlog_bytes=1000 * SLOT)
    for number in range(10):
        request, keys = f"r{number}", keys_of(64, first=64 * number)
        with proxy.inject(Answer(503, "SlowDown"), operation="HEAD", probability=0.6):
            hits = rig.hits(request, keys)
            rig.settle()  # what is out when the clock is put forward counts as late
        rig.ahead_s += 31  # the longest pause is over
        rig.wait_for(lambda: 1 if rig.tier.in_use else None)
        assert catalog.reserve(keys[hits:], rig.now(), request) is None
        rig.tier.forget_request(request)
    assert catalog.counts().unanswered > 0, "what was stored anew before"
    requests = (f"again {number}" for number in count())
    rig.wait_for(lambda: 1 if rig.hits(next(requests), keys_of(64)) == 64 else None)
    ticket = catalog.reserve(keys_of(64, first=700), rig.now(), next(requests))
    assert ticket is not None, "what is new is stored as soon as the bucket answers"
