# SPDX-License-Identifier: Apache-2.0
"""Rank-side: context managers that replace torch's collectives."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

_PREFIXES = ("all_", "broadcast", "gather", "irecv", "isend", "recv", "reduce", "scatter", "send")


@contextlib.contextmanager
def replaced_collectives(replacement: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replaces each collective within the block. replacement: gives a function for a name and torch's function."""
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
    """Records calls of collectives in `sent`, and sends nothing."""
    with replaced_collectives(lambda name, _: lambda *_a, **_k: sent.append(name)):
        yield
