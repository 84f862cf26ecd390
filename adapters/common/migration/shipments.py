# SPDX-License-Identifier: Apache-2.0
"""Sends the tensors and plain values of a part of a model between ranks, by name.

Both ends have the description of each shipment before the first tensor is sent. All bits stay the same.
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
    """Describes a member of a shipment: a tensor of this shape and dtype, or a plain value. Can be sent as JSON."""

    name: str
    shape: list[int] | None
    dtype: str
    value: Any


class Shipment(NamedTuple):
    """Defines a message from one rank to another. content: set at the source; described: set at the target."""

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
            raise Unsupported(f"'{name}' is a {type(value).__name__}: only tensors and plain values can be sent")
    return found


def places(shipment: Shipment) -> Content:
    """Allocates the content of an arriving shipment. Its tensors are not initialised."""
    return {
        name: value if shape is None else torch.empty(shape, dtype=getattr(torch, dtype))
        for name, shape, dtype, value in shipment.described
    }


def without_gaps(content: Content) -> Content:
    """Returns the content with contiguous tensors, as it is sent."""
    tensors = {name: value for name, value in content.items() if isinstance(value, torch.Tensor)}
    return {**content, **{name: value.detach().contiguous() for name, value in tensors.items()}}


def exchange(shipments: Sequence[Shipment], arriving: Sequence[Content], group: Any = None) -> None:
    """Exchanges shipments. arriving: `places` of the shipments to this rank, in their order; filled. Ranks are global.

    Source and target of each shipment call it, with shipments in the same order. group: None means the default group;
    nothing else may use it meanwhile. Tensors are contiguous and in host memory. Only transfers can fail here.
    """
    own, work, landing = dist.get_rank(), [], iter(arriving)
    for source, target, content, _ in shipments:
        if own not in (source, target):
            continue
        transfer, peer = (dist.isend, target) if source == own else (dist.irecv, source)
        for value in ((content or {}) if source == own else next(landing)).values():
            if isinstance(value, torch.Tensor) and value.numel():
                work.append(transfer(_bytes_of(value), peer, group=group))
    for request in work:
        request.wait()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
