"""Which client ``open_store`` takes, and what it says where one is not installed."""

from __future__ import annotations

import logging
import sys

import pytest

from nixl_offload.config.schema import S3Config
from nixl_offload.errors import NotSupportedError
from nixl_offload.stores.s3 import S3Address, answer_error
from nixl_offload.stores.select import open_store

TIER = S3Config.model_validate({"kind": "s3", "bucket": "kv-cache", "endpoint": "http://127.0.0.1:1"})


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Have the imports of our modules, and so of the libraries, fail."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, f"nixl_offload.stores.{module}", raising=False)


def test_auto_takes_the_fastest() -> None:
    """obstore, as measured in decision 0009; either by name."""
    for client, name in (("auto", "obstore"), ("obstore", "obstore"), ("boto3", "boto3")):
        store = open_store(TIER, client)  # type: ignore[arg-type]
        assert store.name == name
        store.close()


def test_without_obstore_auto_takes_boto3_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At INFO; asked for by name it is an error that says what to install."""
    without(monkeypatch, "obstore")
    with caplog.at_level(logging.INFO):
        store = open_store(TIER)
    assert store.name == "boto3"
    assert "pip install obstore boto3" in caplog.text
    store.close()
    with pytest.raises(NotSupportedError, match=r"pip install obstore boto3"):
        open_store(TIER, "obstore")


def test_without_boto3_obstore_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only boto3 by name is an error then."""
    without(monkeypatch, "boto3")
    store = open_store(TIER)
    assert store.name == "obstore"
    store.close()
    with pytest.raises(NotSupportedError, match=r"pip install obstore boto3"):
        open_store(TIER, "boto3")


def test_without_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no S3, and the message says what to install."""
    without(monkeypatch, "obstore", "boto3")
    with pytest.raises(NotSupportedError, match=r"pip install obstore boto3"):
        open_store(TIER)


def test_what_a_server_says_cannot_steer_a_terminal() -> None:
    told = str(answer_error("GET x", S3Address.of(TIER), 400, "Bad\x9b2J", "said\x1b]0;so\n"))
    assert told.isprintable()
    assert "Bad?2J: said?]0;so?" in told
