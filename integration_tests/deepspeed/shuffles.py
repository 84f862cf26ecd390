# SPDX-License-Identifier: Apache-2.0
"""Rank-side, for all hosts: random placements of experts, hosts that omit some of an expert's state, and checksums of
tensors."""

import contextlib
import functools
import random
import zlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from sluice.adapters.common.migration import moving
from sluice.errors import SluiceError
from torch.distributed.checkpoint import state_dict as checkpoint

# With this configuration, moves do not change the bits of a training (docs/c-abi.md).
PROMISES_BITS = {"chunking": "tokens", "gemm": "native", "policy": "none", "wgrad_mode": "per_chunk"}


def shuffled(moving: Any, seed: int) -> tuple[list[int], list[int]]:
    """Returns (expert_rank, expert_slot) of a random placement other than the host's own, the same on all ranks."""
    places, numbers = list(zip(*moving.home)), random.Random(seed)
    while places == list(zip(*moving.home)):
        numbers.shuffle(places)
    return [rank for rank, _ in places], [slot for _, slot in places]


@contextlib.contextmanager
def forgetting(what: str, is_left_out: bool = False) -> Iterator[None]:
    """Makes state of a moving expert with `what` in its name arrive as zeros, or not at all (is_left_out). "": all
    state arrives."""

    def forgetful(content_of: Any, expert: Any, keeper: Any) -> Any:
        content = content_of(expert, keeper)
        forgotten = [name for name in content if what and what in name]
        for name in forgotten:
            value = content.pop(name)
            if not is_left_out:
                content[name] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        return content

    names = ("content_of", "still_of", "late_of")
    with patch.multiple(moving, **{name: functools.partial(forgetful, getattr(moving, name)) for name in names}):
        yield


def bits(tensors: dict[str, Any]) -> dict[str, int]:
    """Returns a checksum of each tensor, or of this rank's part of a distributed tensor."""
    found = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().contiguous().view(-1).view(torch.uint8)
        found[name] = zlib.crc32(flat.numpy().tobytes())
    return found


def state_bits(named: dict[str, Any], optimizer: Any) -> dict[str, int]:
    """Checksums of all tensors that a torch optimizer keeps for these parameters."""
    kept = {
        f"{name} {key}": value
        for name, parameter in named.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, torch.Tensor)
    }
    return bits(kept)


def said_while_away(ways: dict[str, Any]) -> dict[str, str]:
    """Returns the error of each call in `ways`; "": no error."""
    said = {}
    for name, way in ways.items():
        try:
            way()
            said[name] = ""
        except SluiceError as error:
            said[name] = str(error)
    return said


def ways_of_torch(model: Any, optimizer: Any) -> dict[str, Any]:
    """Returns all of torch's calls that read or load a state dict. The loads use the present state."""
    weights, states = copied(model.state_dict()), copied(optimizer.state_dict())
    return {
        "state_dict": model.state_dict,
        "get_model_state_dict": lambda: checkpoint.get_model_state_dict(model),
        "load_state_dict": lambda: model.load_state_dict(weights),
        "set_model_state_dict": lambda: checkpoint.set_model_state_dict(model, weights),
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(states),
    }


def copied(value: Any) -> Any:
    """Returns a copy of a value that may contain views, which deepcopy refuses."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
