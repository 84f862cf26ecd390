# SPDX-License-Identifier: Apache-2.0
"""Sends the tensors and plain values of a part of a model between ranks, by name.

Both ends know the description of each shipment before the first tensor is sent. All bits stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sluice.errors import Unsupported

Content = dict[str, Any]  # tensors and plain values by name
_PLAIN = (int, float, str, bool, type(None))


class Described(NamedTuple):
    """A member of a shipment: a tensor of this shape and dtype, or a plain value. It can be sent as JSON."""

    name: str
    shape: list[int] | None
    dtype: str
    value: Any


class Shipment(NamedTuple):
    """A message from one rank to another. content: given at the source; described: given at the target."""

    source: int
    target: int
    content: Content | None
    described: Sequence[Sequence[Any]]


def describe(content: Content) -> list[Described]:
    """Describes each member. Raises Unsupported for a member that is neither a tensor nor a plain value."""
    found = []
    for name, value in content.items():
        if isinstance(value, torch.Tensor):
            found.append(Described(name, list(value.shape), str(value.dtype).removeprefix("torch."), None))
        elif isinstance(value, _PLAIN):
            found.append(Described(name, None, "", value))
        else:
            raise Unsupported(f"'{name}' is a {type(value).__name__}: only tensors and plain values travel")
    return found


def exchange(shipments: Sequence[Shipment], group: Any = None) -> list[Content]:
    """Exchanges shipments; returns those for this rank, in their order. Ranks are global.

    All ranks at the ends of a shipment call it, with their shipments in the same order. group: None is the default one;
    nothing else uses it meanwhile. Tensors are in host memory.
    """
    own, work, arrived = dist.get_rank(), [], []
    for shipment in shipments:
        if shipment.source == own:
            assert shipment.content is not None
            tensors = [value for value in shipment.content.values() if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                _start(dist.isend, _bytes_of(tensor.detach().contiguous()), shipment.target, group, work)
        elif shipment.target == own:
            arrived.append(_receive(shipment, group, work))
    for request, _ in work:
        request.wait()
    return arrived


def _receive(shipment: Shipment, group: Any, work: list[Any]) -> Content:
    content: Content = {}
    for name, shape, dtype, value in shipment.described:
        if shape is None:
            content[name] = value
            continue
        content[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        _start(dist.irecv, _bytes_of(content[name]), shipment.source, group, work)
    return content


def _start(transfer: Any, flat: torch.Tensor, peer: int, group: Any, work: list[Any]) -> None:
    """Starts a transfer. `work` keeps the tensor alive until the request has ended."""
    if flat.numel():
        work.append((transfer(flat, peer, group=group), flat))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
