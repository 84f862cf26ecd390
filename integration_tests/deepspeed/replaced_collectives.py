# SPDX-License-Identifier: Apache-2.0
"""Rank-side: torch's collectives, each replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

_PREFIXES = ("all_", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")


@contextlib.contextmanager
def replaced_collectives(replacement: Callable[[str, Any], Any]) -> Iterator[None]:
    """replacement: of a name and what torch has for it, what stands there within the block."""
    names = [name for name in dir(dist) if name.startswith(_PREFIXES)]
    originals = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}
    for name, original in originals.items():
        setattr(dist, name, replacement(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextlib.contextmanager
def noted_collectives(sent: list[str]) -> Iterator[None]:
    """Calls are noted in `sent`, and nothing is sent."""
    with replaced_collectives(lambda name, _: lambda *_a, **_k: sent.append(name)):
        yield
