"""The lock that movers hold while they start or end a third-party library's part, or register memory with it.

Threading: tiers open on a thread each, and not every library takes two such calls at once. Hold it around the call
alone, never around I/O: storage that hangs would keep every other tier closed.
"""

from __future__ import annotations

import threading
from typing import Final

LIBRARIES: Final = threading.RLock()
