# SPDX-License-Identifier: Apache-2.0
"""Sends the tensors and plain values of a part of a model between ranks, by name.

Both ends have the description of each shipment before the first tensor is sent. All bits stay the same.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sluice.adapters.torch.rendezvous import Joined, join
from sluice.errors import PeerLost, Unsupported

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


def exchange(shipments: Sequence[Shipment], arriving: Sequence[Content], wait_s: float) -> float:
    """Exchanges shipments. Returns the seconds in which this rank sent and received. Ranks are global. arriving:
    `places` of the shipments to this rank, in their order; filled.

    Collective over the sources and targets, with shipments in the same order. Tensors are contiguous and in host
    memory. wait_s: for connections, and for each tensor. PeerLost, TimedOut and PeerRefused name another rank that has
    ended, hangs or has failed. The ranks have a process group for this alone: a rank that fails closes it, so that no
    other waits for its tensors, and the group in which the host trains stays usable.
    """
    ranks = tuple(sorted({rank for each in shipments for rank in (each.source, each.target)}))
    if dist.get_rank() not in ranks:
        return 0.0
    joined, _ = join(ranks, lambda: None, timedelta(seconds=wait_s))
    begun = time.perf_counter()
    try:
        _transfer(shipments, iter(arriving), joined, ranks, wait_s)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # requests in its frames would keep the connections open
        raise
    finally:
        joined.leave()
    return time.perf_counter() - begun


def _transfer(
    shipments: Sequence[Shipment], landing: Iterator[Content], joined: Joined, ranks: Sequence[int], wait_s: float
) -> None:
    own, work = dist.get_rank(), []
    for source, target, content, _ in shipments:
        if own in (source, target):
            peer = target if source == own else source
            values = (content or {}) if source == own else next(landing)
            tensors = [value for value in values.values() if isinstance(value, torch.Tensor) and value.numel()]
            work += [(_begin(joined, source == own, each, ranks.index(peer), peer), peer) for each in tensors]
    for request, peer in work:
        try:
            request.wait(timedelta(seconds=wait_s))
        except Exception as error:
            raise PeerLost(f"a transfer with rank {peer} has not ended: {error}", peer=peer) from error


def _begin(joined: Joined, sends: bool, tensor: torch.Tensor, place: int, peer: int) -> Any:
    try:
        return (joined.group.send if sends else joined.group.recv)([_bytes_of(tensor)], place, 0)
    except RuntimeError as error:  # a rank that has failed has closed the connection
        raise PeerLost(f"a transfer with rank {peer} cannot begin: {error}", peer=peer) from error


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
