# SPDX-License-Identifier: Apache-2.0
"""Reads and writes an expert's state in addition to its values: gradients, masters and optimizer states.

A keeper consists of parts, one for each kind of content. Adapters of hosts add parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

Content = dict[str, Any]  # tensors and numbers by name
States = MutableMapping[torch.Tensor, dict[str, Any]]  # the `state` of a torch optimizer


class Piece(NamedTuple):
    """Describes one expert's piece of a parameter: all of it, or one of its equal parts if it is stacked over experts.

    is_interleaved  the parts are every count-th column, as in PEFT's B [out, r * E]; otherwise they are rows
    """

    parameter: nn.Parameter
    index: int = 0
    count: int = 1
    is_interleaved: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same piece of a tensor of the parameter's shape, as a view; of a DTensor, of its local part."""
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if self.count == 1:
            return local
        if self.is_interleaved:
            return local.view(local.shape[0], -1, self.count)[:, :, self.index]
        return local.view(self.count, -1)[self.index]

    @property
    def is_whole(self) -> bool:
        """Returns whether the parameter belongs to this expert alone."""
        return self.count == 1


class Keeper:
    """Reads and writes the state of a piece in addition to its value. By default no backward changes the state, and
    nothing is an obstacle."""

    def obstacle(self, parameters: Sequence[nn.Parameter]) -> str:
        """Returns why the state of these parameters cannot be moved now; "": it can."""
        return ""

    def bytes_of(self, piece: Piece) -> int:
        """Returns the bytes of `read`'s result."""
        raise NotImplementedError

    def read(self, piece: Piece) -> Content:
        """Copies all. Collective over the ranks that hold parts of the piece."""
        raise NotImplementedError

    def still(self, piece: Piece) -> Content:
        """Returns the part of `read` that stays the same from one update to the next: all but gradients. Collective as
        `read`."""
        return self.read(piece)

    def late_forms(self, piece: Piece) -> dict[str, torch.dtype]:
        """Returns the names and dtypes of the gradients that may exist before an update."""
        return {}

    def late(self, piece: Piece) -> Content:
        """Returns the gradients that exist, even if they are an obstacle to `read`: copies, or the host's own tensors.
        Collective as `read`."""
        return {}

    def write(self, piece: Piece, content: Content) -> None:
        """Writes into the host's own tensors if they exist."""
        raise NotImplementedError


class Together(Keeper):
    """Combines several parts, whose contents have different names."""

    def __init__(self, *parts: Keeper) -> None:
        self._parts = parts

    def obstacle(self, parameters: Sequence[nn.Parameter]) -> str:
        return next(filter(None, (part.obstacle(parameters) for part in self._parts)), "")

    def bytes_of(self, piece: Piece) -> int:
        return sum(part.bytes_of(piece) for part in self._parts)

    def read(self, piece: Piece) -> Content:
        return _merged(part.read(piece) for part in self._parts)

    def still(self, piece: Piece) -> Content:
        return _merged(part.still(piece) for part in self._parts)

    def late_forms(self, piece: Piece) -> dict[str, torch.dtype]:
        return _merged(part.late_forms(piece) for part in self._parts)

    def late(self, piece: Piece) -> Content:
        return _merged(part.late(piece) for part in self._parts)

    def write(self, piece: Piece, content: Content) -> None:
        for part in self._parts:
            part.write(piece, content)


class Gradient(Keeper):
    """Keeps the gradient in this attribute of a parameter."""

    def __init__(self, attribute: str = "grad") -> None:
        self._attribute = attribute

    def bytes_of(self, piece: Piece) -> int:
        return sum(map(bytes_of, self.late(piece).values()))

    def read(self, piece: Piece) -> Content:
        return {name: grad.clone() for name, grad in self.late(piece).items()}

    def still(self, piece: Piece) -> Content:
        return {}

    def late_forms(self, piece: Piece) -> dict[str, torch.dtype]:
        if not hasattr(piece.parameter, self._attribute) or not piece.parameter.requires_grad:
            return {}
        grad = getattr(piece.parameter, self._attribute)
        return {self._attribute: piece.parameter.dtype if grad is None else grad.dtype}

    def late(self, piece: Piece) -> Content:
        grad = getattr(piece.parameter, self._attribute, None)
        return {} if grad is None else {self._attribute: piece.of(grad).detach()}

    def write(self, piece: Piece, content: Content) -> None:
        grad, there = content.get(self._attribute), getattr(piece.parameter, self._attribute, None)
        if grad is not None and there is None:
            there = torch.zeros_like(piece.parameter)
            setattr(piece.parameter, self._attribute, there)
        if grad is not None:
            own = piece.of(there)
            own.copy_(grad.view(own.shape))
        elif there is not None and piece.is_whole:
            setattr(piece.parameter, self._attribute, None)
        elif there is not None:
            piece.of(there).zero_()  # it has the gradients of other experts too


class State(Keeper):
    """Keeps the state of a torch optimizer, by parameter or by the tensor that replaces the parameter there."""

    _PREFIX = "state "

    def __init__(self, kept_of: Callable[[nn.Parameter], tuple[States, torch.Tensor]]) -> None:
        """kept_of: returns the optimizer's `state`, and its key for a parameter."""
        self._kept_of = kept_of

    def bytes_of(self, piece: Piece) -> int:
        return sum(bytes_of(value) for value in self._views(piece).values() if isinstance(value, torch.Tensor))

    def read(self, piece: Piece) -> Content:
        return {
            self._PREFIX + key: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for key, value in self._views(piece).items()
        }

    def write(self, piece: Piece, content: Content) -> None:
        kept = of_prefix(content, self._PREFIX)
        states, key = self._kept_of(piece.parameter)
        there = states.get(key, {})
        if not piece.is_whole:
            for name, value in kept.items():
                own = piece.of(there[name])
                own.copy_(value.view(own.shape))
        elif not kept:
            states.pop(key, None)
        elif any(hasattr(value, "to_local") for value in there.values()):
            for name, value in kept.items():
                _local(there[name]).copy_(value)
        else:
            states[key] = kept

    def _views(self, piece: Piece) -> Content:
        """Returns views of the piece. If a tensor belongs to several experts, its step count is left out: the count is
        the same on all ranks, because all take every step."""
        states, key = self._kept_of(piece.parameter)
        kept = states.get(key, {})
        if piece.is_whole:
            return {name: _local(value) for name, value in kept.items()}
        shape = piece.parameter.shape
        return {name: piece.of(value) for name, value in kept.items() if getattr(value, "shape", None) == shape}


class Masters(Keeper):
    """Keeps the masters of 16-bit parameters, which the optimizer updates."""

    def __init__(self, pairs: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        self._masters = {id(parameter): master for parameter, master in pairs}

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns the master; the parameter itself if it has none."""
        return self._masters.get(id(parameter), parameter)

    def holds(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Returns whether each parameter has a master."""
        return all(id(parameter) in self._masters for parameter in parameters)

    def bytes_of(self, piece: Piece) -> int:
        master = self._masters.get(id(piece.parameter))
        return 0 if master is None else bytes_of(piece.of(master))

    def read(self, piece: Piece) -> Content:
        master = self._masters.get(id(piece.parameter))
        return {} if master is None else {"master": piece.of(master).detach().clone()}

    def write(self, piece: Piece, content: Content) -> None:
        master = self._masters.get(id(piece.parameter))
        if master is not None and "master" in content:
            piece.of(master.data).copy_(content["master"])


def plain(optimizer: torch.optim.Optimizer) -> Keeper:
    """Returns the keeper of a torch optimizer whose `state` is by parameter."""
    return Together(Gradient(), State(lambda parameter: (optimizer.state, parameter)))


def mastered(masters: Masters, states: States) -> Keeper:
    """Returns the keeper of an optimizer whose `state` is by master."""
    return Together(Gradient(), masters, State(lambda parameter: (states, masters.of(parameter))))


def of_prefix(content: Mapping[str, Any], prefix: str) -> Content:
    """Returns the entries whose names begin with `prefix`, by the rest of their names."""
    return {name[len(prefix) :]: value for name, value in content.items() if name.startswith(prefix)}


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _merged(contents: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for content in contents for name, value in content.items()}


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value
