"""Rank-side, under any host: experts that change places at random, hosts that forget something of them, and bits that
can be compared."""

from __future__ import annotations

import contextlib
import functools
import random
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from sluice.adapters.host import moving

# What promises the bits of the training in which none moves (docs/c-abi.md).
PROMISES_BITS = {"chunking": "tokens", "gemm": "native", "policy": "none", "wgrad_mode": "per_chunk"}


def shuffled(moving: Any, seed: int) -> tuple[list[int], list[int]]:
    """(expert_rank, expert_slot) of some placement that is not the host's own, alike on all ranks."""
    places, numbers = list(zip(*moving.home)), random.Random(seed)
    while places == list(zip(*moving.home)):
        numbers.shuffle(places)
    return [rank for rank, _ in places], [slot for _, slot in places]


@contextlib.contextmanager
def forgetting(what: str, is_left_out: bool = False) -> Iterator[None]:
    """Of an expert that moves everything with this in its name arrives as zeros, or is left out; "": all of it
    arrives."""
    whole = {name: getattr(moving, name) for name in ("content_of", "still_of", "late_of")}

    def forgetful(content_of: Any, expert: Any, keeper: Any) -> Any:
        content = content_of(expert, keeper)
        forgotten = [name for name in content if what and what in name]
        for name in forgotten:
            value = content.pop(name)
            if not is_left_out:
                content[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        return content

    for name, content_of in whole.items():
        setattr(moving, name, functools.partial(forgetful, content_of))
    try:
        yield
    finally:
        for name, content_of in whole.items():
            setattr(moving, name, content_of)


def bits(tensors: dict[str, Any]) -> dict[str, int]:
    """A number for the bits of each tensor, or of what this rank holds of it."""
    found = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().contiguous().view(-1).view(torch.uint8)
        found[name] = zlib.crc32(flat.numpy().tobytes())
    return found


def state_bits(named: dict[str, Any], optimizer: Any) -> dict[str, int]:
    """The same of all tensors that an optimizer of torch keeps of these parameters."""
    kept = {
        f"{name} {key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
    return bits(kept)
