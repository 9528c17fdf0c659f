"""What must never be freed: memory and files that I/O may still be at, and what a forked process has inherited.

Threading: any thread.
"""

from __future__ import annotations

import ctypes
import os
import weakref

_kept_in_children: weakref.WeakSet[object] = weakref.WeakSet()


def keep_forever(what: object) -> None:
    """Never free ``what``, not even when the interpreter ends: threads of libraries outlive its modules."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def keep_in_children(what: object) -> None:
    """Never free ``what``, and so what it holds, in a process that is forked from this one.

    For libraries that do not survive a fork: to end them there crashes the child, has it wait for ever for a lock that
    was held by a thread of the parent, or changes files that are the parent's.
    """
    _kept_in_children.add(what)


def _after_fork() -> None:
    for what in list(_kept_in_children):
        keep_forever(what)


os.register_at_fork(after_in_child=_after_fork)
