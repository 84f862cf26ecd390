# SPDX-License-Identifier: Apache-2.0
"""Calls a host's function on a separate thread.

Autocast, grad mode, inference mode, dispatch modes and saved-tensor hooks (of a checkpoint, say) belong to the host's
thread, so that they do not apply to the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_on_thread(ask: Callable[[], T], name: str) -> T:
    """Calls `ask` on a thread of that name; returns its result and raises its exception."""
    found: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            found.append(ask())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return found[0]
