"""Calls one function in a process that plays the device: where a test steps an engine itself.

Threading: the process's only thread. The request comes on stdin, the answer goes to stdout, both as JSON; a traceback
goes to the log.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> int:
    """Answer the request."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    function = getattr(importlib.import_module(request["module"]), request["function"])
    json.dump(function(**request["arguments"]), answers)
    answers.flush()
    return 0
