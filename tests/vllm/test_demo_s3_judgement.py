"""Proves that the demo of shared tiers can fail: what goes wrong in either half, or at the server, is said.

No engine runs here: results are made up. The real demo runs by ``make demo-s3``. The server and the pass-through that
counts are real.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest

from examples.demo.handover import FULL_CHUNK_TOKENS
from examples.demo_s3.report import as_json, as_table
from examples.demo_s3.run import DemoS3Result, problems
from examples.s3_server import BUCKET, RcloneServer
from examples.s3_traffic import CountingProxy, Traffic
from tests.vllm.test_demo_judgement import CHUNK_BYTES, GOOD, PROMPT_BYTES, changed_handover

CHUNKS = 2 * PROMPT_BYTES // CHUNK_BYTES
S3 = dataclasses.replace(GOOD, place="S3")
RESULT = DemoS3Result(
    device="cpu",
    vllm="0",
    parameters=100_000_000,
    bucket=S3,
    tree=dataclasses.replace(GOOD, place="a shared directory"),
    first_traffic=Traffic(heads=CHUNKS, puts=CHUNKS + 1, bytes_to_server=3 * PROMPT_BYTES),
    second_traffic=Traffic(heads=10, gets=CHUNKS, bytes_from_server=3 * PROMPT_BYTES),
    bucket_bytes=2 * PROMPT_BYTES,
)


def test_a_good_result_has_no_problems() -> None:
    """Table and JSON can be made of it, too, and hits equal what was stored."""
    assert problems(RESULT) == []
    assert as_table(RESULT).row_count == 4
    shown = json.loads(json.dumps(as_json(RESULT)))
    assert shown["ok"] is True
    assert shown["s3"]["passes"]["s3"]["external_hit_tokens"] == shown["s3"]["stored_tokens"] == 2 * FULL_CHUNK_TOKENS
    assert shown["s3"]["traffic"]["engine_2"]["gets"] == CHUNKS


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"bucket": changed_handover(S3, {}, None, 5)}, "that were there already"),
        ({"bucket": changed_handover(S3, {}, list(S3.first.cold), 0)}, "0 of 3584 tokens of prompt 1 from S3"),
        ({"tree": changed_handover(RESULT.tree, {"settled": False}, None, 0)}, "did not come to rest"),
        ({"first_traffic": Traffic(puts=CHUNKS - 1)}, "27 PUTs from the first engine"),
        ({"second_traffic": dataclasses.replace(RESULT.second_traffic, gets=1)}, "1 GETs from the second engine"),
        ({"second_traffic": dataclasses.replace(RESULT.second_traffic, bytes_from_server=1)}, "sent 1 bytes"),
        ({"second_traffic": dataclasses.replace(RESULT.second_traffic, heads=CHUNKS + 2)}, "30 HEADs for 28 chunks"),
        ({"second_traffic": dataclasses.replace(RESULT.second_traffic, puts=1)}, "1 PUTs, and had nothing to store"),
    ],
)
def test_each_problem_is_said(changed: dict[str, Any], sentence: str) -> None:
    """The right sentence comes first, and ``ok`` is false."""
    result = dataclasses.replace(RESULT, **changed)
    assert sentence in problems(result)[0]
    assert as_json(result)["ok"] is False


def test_the_pass_through_counts_what_the_server_gets_and_changes_nothing() -> None:
    """Requests by kind and bytes both ways; signatures hold; listings are no GETs."""
    content = bytes(range(256)) * 4096
    with RcloneServer() as server, CountingProxy(server.port) as proxy:
        with contextlib.closing(server.client(proxy.endpoint)) as client:
            client.put_object(Bucket=BUCKET, Key="a/b", Body=content)
            before = proxy.traffic()
            assert before.puts == 1
            assert len(content) < before.bytes_to_server < len(content) + 5000
            assert client.get_object(Bucket=BUCKET, Key="a/b")["Body"].read() == content
            client.head_object(Bucket=BUCKET, Key="a/b")
            client.list_objects_v2(Bucket=BUCKET)
            client.delete_object(Bucket=BUCKET, Key="a/b")
        seen = proxy.traffic().since(before)
    assert (seen.heads, seen.gets, seen.puts, seen.others) == (1, 1, 0, 2)
    assert len(content) < seen.bytes_from_server < len(content) + 5000
