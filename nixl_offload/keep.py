"""Keeps objects alive for ever: memory and files that I/O may still use, and objects that a forked child inherits.

Threading: any thread.
"""

from __future__ import annotations

import ctypes
import os
import weakref

_kept_in_children: weakref.WeakSet[object] = weakref.WeakSet()


def keep_forever(what: object) -> None:
    """Never free ``what``, not even at interpreter exit: threads of libraries outlive the modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def keep_in_children(what: object) -> None:
    """Never free ``what``, nor the objects it refers to, in a process that is forked from this one.

    For libraries that do not survive a fork. Closing them in the child could crash it, wait for ever for a lock of one
    of the parent's threads, or change the parent's files.
    """
    _kept_in_children.add(what)


def _after_fork() -> None:
    for what in list(_kept_in_children):
        keep_forever(what)


os.register_at_fork(after_in_child=_after_fork)
