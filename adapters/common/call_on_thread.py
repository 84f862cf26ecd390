# SPDX-License-Identifier: Apache-2.0
"""A host's function is asked on a thread of its own.

Autocast, grad mode, inference mode, dispatch modes and saved-tensor hooks (of a checkpoint, say) that are on around the
first call belong to the host's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def call_on_thread(ask: Callable[[], T], name: str) -> T:
    """What `ask` returns on a thread of that name. What it raises is raised."""
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
