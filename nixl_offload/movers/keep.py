"""Memory and files that I/O may still be at when their owner has to end."""

from __future__ import annotations

import ctypes


def keep_forever(what: object) -> None:
    """Never free ``what``, not even when the interpreter ends: threads of libraries outlive its modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))
