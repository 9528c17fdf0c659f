"""Proves that a mover's thread makes calls in order, hands on what they raise, and holds up no end of the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nixl_offload.movers.launcher import Launcher

HANGS = """
import threading
from nixl_offload.movers.launcher import Launcher
launcher = Launcher("hangs")
launcher.submit(threading.Event().wait)
launcher.end(wait=False)
"""


def test_calls_are_made_in_order_and_what_they_raise_is_told() -> None:
    launcher, made = Launcher("calls"), list[int]()
    for number in range(50):
        launcher.submit(made.append, number)
    refused = launcher.submit(int, "no number")
    assert launcher.submit(len, made).result(10) == 50
    assert made == sorted(made)
    with pytest.raises(ValueError, match="no number"):
        refused.result()
    launcher.end(wait=True)


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    """As a file's opening does where the storage behind it is gone."""
    subprocess.run([sys.executable, "-c", HANGS], timeout=30, check=True)
