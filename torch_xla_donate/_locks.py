"""Locks of the process. A forked child can use them."""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def make_lock() -> threading.RLock:
    """A `threading.RLock` that is free in a forked child, unless the thread that forked holds it.

    A fork copies only the thread that calls it. A lock that another thread holds would stay locked in the child for
    ever. The fork does not wait for that thread, because it may hold the lock for minutes, such as while it compiles.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_locks() -> None:
    for lock in _locks:
        if not lock._is_owned():  # type: ignore[attr-defined]
            lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_free_locks)
