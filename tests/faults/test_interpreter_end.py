"""A process ends while storage has not answered: what its threads may still be at outlives the interpreter."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from nixl_offload.engine import pump

class Mover:
    def __del__(self):
        print("destroyed", flush=True)

pump.leak((Mover(),))
"""


def test_what_was_left_behind_is_never_destroyed() -> None:
    """NIXL, destroyed with a GET in flight, now and then ended the process by SIGSEGV when the answer came."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, timeout=60)
    assert ended.stdout == ""
