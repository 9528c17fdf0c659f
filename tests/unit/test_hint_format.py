"""What a hint may be: our names in ``kv_transfer_params``; what else comes is refused in words
that say what would be right, and never by an exception.
"""

from __future__ import annotations

from typing import Any

import pytest

from nixl_offload.vllm.hint_format import (
    MAX_RETAIN_S,
    MAX_TOKENS,
    BadHintError,
    Hint,
    hint_of,
)


def test_every_field() -> None:
    raw = {"token_ids": [1, 2], "prefetch": True, "retain_s": 60, "store": False}
    hint = hint_of({"do_remote_decode": True, "nixl_offload": raw})
    assert hint == Hint(token_ids=[1, 2], prefetch=True, retain_s=60, store=False)
    assert hint.names == ["prefetch", "retain", "store"]
    assert Hint(drop_from=7).names == ["drop"]
    assert hint_of({"nixl_offload": {}}) == Hint()
    assert hint_of({"nixl_offload": {"drop_from": 5, "retain_s": 0}}) == Hint(retain_s=0, drop_from=5), "both say drop"


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
    with pytest.raises(BadHintError) as bad:
        hint_of({"nixl_offload": raw})
    assert bad.value.path == "kv_transfer_params.nixl_offload" + where
    assert str(bad.value).startswith(f"{bad.value.path}: ")
    assert len(str(bad.value)) < 200
