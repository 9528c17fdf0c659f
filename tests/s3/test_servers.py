"""The tests' S3 servers do what they say."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from tests.s3.servers import BUCKET, MotoServer, RcloneServer, S3Server


@pytest.mark.parametrize("kind", [RcloneServer, MotoServer])
def test_a_server_stores_lists_and_forgets_objects(kind: type[S3Server]) -> None:
    with kind() as server, closing(server.client()) as client:
        client.put_object(Bucket=BUCKET, Key="a/b/c", Body=b"bytes")
        assert client.get_object(Bucket=BUCKET, Key="a/b/c")["Body"].read() == b"bytes"
        assert client.head_object(Bucket=BUCKET, Key="a/b/c")["ContentLength"] == 5
        assert [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET)["Contents"]] == ["a/b/c"]
        client.delete_object(Bucket=BUCKET, Key="a/b/c")
        assert _status(client, "a/b/c") == 404
    assert not server.scratch.exists()


def test_rclone_goes_down_and_comes_back_with_its_objects() -> None:
    with RcloneServer() as server, closing(server.client()) as client:
        client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
        endpoint = server.endpoint
        server.stop()
        with pytest.raises(EndpointConnectionError):
            client.head_object(Bucket=BUCKET, Key="k")
        server.start()
        assert server.endpoint == endpoint
        assert client.get_object(Bucket=BUCKET, Key="k")["Body"].read() == b"x"


def test_rclone_refuses_a_wrong_signature() -> None:
    with RcloneServer() as server:
        server.secret_access_key = "not the one it was started with"
        with closing(server.client()) as client:
            assert _status(client, "k") == 403


def test_what_is_done_to_rclones_bucket_behind_its_back_is_seen_at_once() -> None:
    with RcloneServer() as server, closing(server.client()) as client:
        client.put_object(Bucket=BUCKET, Key="d/k", Body=bytes(100))
        assert server.objects("d/") == ["d/k"]
        server.flip("d/k", -1)
        assert client.get_object(Bucket=BUCKET, Key="d/k")["Body"].read() == bytes(99) + b"\x10"
        server.truncate("d/k", 10)
        assert client.get_object(Bucket=BUCKET, Key="d/k")["Body"].read() == bytes(10)
        server.truncate("d/k", 20)
        assert client.head_object(Bucket=BUCKET, Key="d/k")["ContentLength"] == 20
        server.delete("d/k")
        assert _status(client, "d/k") == 404
        server.write("e/k", b"new")
        assert client.get_object(Bucket=BUCKET, Key="e/k")["Body"].read() == b"new"
        client.put_object(Bucket=BUCKET, Key="e/other", Body=b"by the client")
        client.delete_object(Bucket=BUCKET, Key="e/k")
        server.write("f/k", b"beside what the client did")
        server.write("e/k", b"again")
        assert client.head_object(Bucket=BUCKET, Key="f/k")["ContentLength"] == 26
        assert client.get_object(Bucket=BUCKET, Key="e/k")["Body"].read() == b"again"
        server.empty()
        assert _status(client, "e/k") == 404


def _status(client: Any, key: str) -> int:
    with pytest.raises(ClientError) as raised:
        client.head_object(Bucket=BUCKET, Key=key)
    return int(raised.value.response["ResponseMetadata"]["HTTPStatusCode"])
