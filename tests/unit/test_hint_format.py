"""What a hint may be: our names in ``kv_transfer_params`` and in an envelope; whatever else comes is refused in words
that say what would be right, and never by an exception.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nixl_offload.vllm.hint_format import (
    ACTION_TYPE,
    MAX_ACTIONS,
    MAX_RETAIN_S,
    MAX_TOKENS,
    BadHintError,
    Hint,
    hints_of,
)


def envelope(*payloads: Any, kind: str = ACTION_TYPE, version: str = "1.0") -> Any:
    actions = [SimpleNamespace(action_type=kind, action_version=version, payload=payload) for payload in payloads]
    return SimpleNamespace(actions=actions)


def test_requests_without_hints_for_us() -> None:
    for params in (None, {}, {"do_remote_decode": True}, "text", 7, ["nixl_offload"]):
        assert list(hints_of(params, None)) == []
    assert list(hints_of(None, envelope({"keys": []}, kind="kv.fetch"))) == []
    nonsense: list[Any] = [{"actions": []}, 7, SimpleNamespace(actions=7), SimpleNamespace(actions=[7, None])]
    for each in nonsense:
        assert list(hints_of(None, each)) == [], "of no shape that vLLM's decoder would let through"


def test_every_field_by_either_way() -> None:
    raw = {"token_ids": [1, 2], "prefetch": True, "retain_s": 60, "store": False}
    wanted = Hint(token_ids=[1, 2], prefetch=True, retain_s=60, store=False)
    assert list(hints_of({"nixl_offload": raw}, envelope(raw, {"drop_from": 0}))) == [
        wanted,
        wanted,
        Hint(drop_from=0),
    ]
    assert wanted.names == ["prefetch", "retain", "store"]
    assert Hint(drop_from=7).names == ["drop"]
    assert list(hints_of({"nixl_offload": {}}, envelope({}, version="1.7"))) == [Hint(), Hint()]


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (None, ""),
        (True, ""),
        ([{"prefetch": True}], ""),
        ({"prefech": True}, ""),
        ({7: True}, ""),
        ({"token_ids": []}, ".token_ids"),
        ({"token_ids": "12"}, ".token_ids"),
        ({"token_ids": [0] * (MAX_TOKENS + 1)}, ".token_ids"),
        ({"prefetch": 1}, ".prefetch"),
        ({"prefetch": None}, ".prefetch"),
        ({"store": "no"}, ".store"),
        ({"retain_s": -1}, ".retain_s"),
        ({"retain_s": True}, ".retain_s"),
        ({"retain_s": float("nan")}, ".retain_s"),
        ({"retain_s": float("inf")}, ".retain_s"),
        ({"retain_s": 10**400}, ".retain_s"),
        ({"retain_s": MAX_RETAIN_S + 1}, ".retain_s"),
        ({"retain_s": "60"}, ".retain_s"),
        ({"drop_from": -1}, ".drop_from"),
        ({"drop_from": True}, ".drop_from"),
        ({"drop_from": 1.5}, ".drop_from"),
        ({"drop_from": 0, "retain_s": 5}, ".drop_from"),
        ({"drop_from": 0, "prefetch": True}, ".drop_from"),
    ],
)
def test_bad_hints_are_named_with_what_would_be_right(raw: Any, where: str) -> None:
    """The value is not in the text: it may be a part of a user's prompt."""
    for [bad], path in (
        (list(hints_of({"nixl_offload": raw}, None)), "kv_transfer_params.nixl_offload"),
        (list(hints_of(None, envelope(raw))), "kv_hints.actions.payload"),
    ):
        assert isinstance(bad, BadHintError)
        assert bad.path == path + where
        assert str(bad).startswith(f"{bad.path}: ")
        assert len(str(bad)) < 200


def test_other_versions_and_too_many_actions() -> None:
    [bad] = hints_of(None, envelope({}, version="2.0"))
    assert isinstance(bad, BadHintError)
    found = list(hints_of(None, envelope(*[{}] * (MAX_ACTIONS + 5))))
    assert found[:MAX_ACTIONS] == [Hint()] * MAX_ACTIONS
    assert len(found) == MAX_ACTIONS + 1
    assert isinstance(found[-1], BadHintError)


def test_both_0_and_drop_say_the_same_and_may_go_together() -> None:
    assert list(hints_of({"nixl_offload": {"drop_from": 5, "retain_s": 0}}, None)) == [Hint(retain_s=0, drop_from=5)]
