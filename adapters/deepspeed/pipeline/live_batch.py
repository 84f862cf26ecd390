# SPDX-License-Identifier: Apache-2.0
"""A batch of a stage in which layers at its cuts are on their way: which layers run for each micro-batch, and what
becomes of the gradients of those that come here (docs/pipeline.md, "A layer that moves in a batch")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.deepspeed.pipeline import stage_module
from sluice.adapters.torch import LayerMove
from torch import nn

Gradients = list[Any]  # a tensor or None for each parameter


class Cut:
    """A cut at which this stage gives a layer to its neighbour, or gets one, in one batch. function: what the stage
    calls for it."""

    def __init__(self, layer: int, source: int, target: int, stage: int, function: Any) -> None:
        self.layer, self.function = layer, function
        self.is_lower = stage == max(source, target)
        self.comes = stage == target
        self.has_sum = False  # gradients of the other stage, where it comes here; else they have set out
        self.ran: dict[int, bool] = {}  # by micro-batch
        self.rules = LayerMove(self.is_lower, target > source)
        self._held: dict[int, Gradients] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the order of both ends; those that are trained."""
        own = self.function.parameters() if isinstance(self.function, nn.Module) else ()
        return [parameter for parameter in own if parameter.requires_grad]

    @property
    def ran_where_it_goes(self) -> bool:
        """Whether a micro-batch of this batch has run the layer on its new stage."""
        return any(ran == self.comes for ran in self.ran.values())

    def hold(self, micro_batch: int) -> None:
        """After a backward that ran the layer, which comes here: what it gave stays apart until the sum is here."""
        if self.has_sum:
            return
        self._held[micro_batch] = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def fold(self) -> None:
        """The sum of the other gradients is where it belongs: what was held follows, in the order of micro-batches."""
        for micro_batch in sorted(self._held):
            for parameter, gradient in zip(self.parameters, self._held[micro_batch]):
                if gradient is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient
        self._held = {}


class Travel(NamedTuple):
    """What moves beside a batch, as the batch asks for it. parameters: whether those of a layer that comes have come;
    gradients: the same of what its old stage has summed, which then lies in the parameters; send: gradients of a layer
    that leaves are final."""

    parameters: Callable[[Cut], bool]
    gradients: Callable[[Cut], bool]
    send: Callable[[Cut], None]


class LiveBatch:
    """Asked by the stage around each op of one batch."""

    def __init__(self, module: Any, cuts: Sequence[Cut], travel: Travel) -> None:
        self._module, self._travel = module, travel
        self._above = next((cut for cut in cuts if cut.is_lower), None)
        self._below = next((cut for cut in cuts if not cut.is_lower), None)
        self._cuts = [cut for cut in (self._above, self._below) if cut is not None]
        gone = {cut.layer for cut in self._cuts}
        self._owned = list(module.forward_funcs)
        self._first = module._local_start
        self._stays = [n for n in stage_module.layers_of(module) if n not in gone]
        self._staying = [stage_module.function_of(module, n) for n in self._stays]
        for cut in self._cuts:
            if cut.comes and isinstance(cut.function, nn.Module):
                cut.function.train(module.training)

    def before_forward(self, micro_batch: int, word: int) -> int:
        """word: of what the stage was given. The word of what it hands on."""
        self._hear()
        first, functions = self._stays[0], list(self._staying)
        for cut in self._cuts:
            cut.ran[micro_batch] = cut.rules.runs(micro_batch, word if cut.is_lower else 0)
            self._send(cut)
            if cut.ran[micro_batch]:
                functions.insert(0 if cut.is_lower else len(functions), cut.function)
                first -= int(cut.is_lower)
        stage_module.run_with(self._module, first, functions)
        below = self._below
        return 0 if below is None else below.rules.activation_word(below.ran[micro_batch])

    def before_backward(self, word: int) -> None:
        """word: of the gradient that the stage was given."""
        self._hear()
        if self._below is not None:
            self._below.rules.heard(word)

    def after_backward(self, micro_batch: int) -> int:
        """The word of the gradient that the stage hands on."""
        for cut in self._cuts:
            if cut.ran[micro_batch]:
                cut.rules.ended()
                if cut.comes:
                    cut.hold(micro_batch)
            self._send(cut)
        return 0 if self._above is None else self._above.rules.gradient_word()

    def end(self) -> None:
        """The module runs what it owns again. May be called again."""
        stage_module.run_with(self._module, self._first, self._owned)

    def _send(self, cut: Cut) -> None:
        if not cut.has_sum and cut.rules.is_final:
            cut.has_sum = True
            self._travel.send(cut)

    def _hear(self) -> None:
        for cut in self._cuts:
            if not cut.comes:
                continue
            if not cut.rules.has and self._travel.parameters(cut):
                cut.rules.arrived()
            if cut.rules.has and not cut.has_sum and self._travel.gradients(cut):
                cut.has_sum = True


def load_gradients(cut: Cut, room: Sequence[torch.Tensor], is_there: torch.Tensor) -> None:
    """Of a layer that leaves: gradients so far, into what travels at the commit."""
    for number, (parameter, place) in enumerate(zip(cut.parameters, room)):
        is_there[number] = parameter.grad is not None
        if parameter.grad is not None:
            place.copy_(parameter.grad)


def take_gradients(cut: Cut, room: Sequence[torch.Tensor], is_there: torch.Tensor) -> None:
    """Of a layer that comes: what arrived, which is the parameters' from here on, and what was held on top."""
    for parameter, place, there in zip(cut.parameters, room, is_there.tolist()):
        parameter.grad = place if there else None
    cut.fold()
