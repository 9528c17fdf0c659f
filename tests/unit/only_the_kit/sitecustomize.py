"""Where this is on PYTHONPATH, every Python takes the modules that ``BLOCKED_MODULES`` names for not installed.

See ``tests/unit/test_gpu_script.py``: it plays a machine that has nothing but its own and the kit for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Blocker:
    names = frozenset(os.environ.get("BLOCKED_MODULES", "").split())

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}: it is not in the kit", name=name)
        return None


sys.meta_path.insert(0, _Blocker())
