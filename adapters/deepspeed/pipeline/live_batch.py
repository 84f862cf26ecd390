# SPDX-License-Identifier: Apache-2.0
"""Runs a batch of a stage while layers at its cuts move: decides which layers run for each micro-batch, and collects
the gradients of arriving layers (docs/pipeline.md, "Layers that move in a batch")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.deepspeed.optimizer.gradient_sums import ParameterSums
from sluice.adapters.deepspeed.pipeline import stage_module
from sluice.adapters.torch import LayerMove
from torch import nn

Gradients = list[Any]  # a tensor or None for each parameter


class Cut:
    """A cut at which this stage sends a run of layers to its neighbour, or receives one, in one batch. A micro-batch
    runs all layers of the run on the same stage. functions: called by the stage for each layer; sums: of the engine's
    optimizer."""

    def __init__(
        self,
        layers: Sequence[int],
        source: int,
        target: int,
        stage: int,
        functions: Sequence[Any],
        sums: ParameterSums,
    ) -> None:
        self.layers, self.functions, self.sums = tuple(layers), list(functions), sums
        self.is_lower = stage == max(source, target)
        self.comes = stage == target
        self.has_sum = False  # if the layers come here: gradients of the other stage have arrived; else: were sent
        self.ran: dict[int, bool] = {}  # by micro-batch: whether this stage runs the layers
        self.rules = LayerMove(self.is_lower, target > source)
        self.totals: Gradients = []  # sums of arriving layers, after has_sum
        self._held: dict[int, Gradients] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters, in the same order on both stages."""
        modules = [function for function in self.functions if isinstance(function, nn.Module)]
        return [parameter for each in modules for parameter in each.parameters() if parameter.requires_grad]

    @property
    def ran_where_it_goes(self) -> bool:
        """Returns whether a micro-batch of this batch has run the layers on their new stage."""
        return any(ran == self.comes for ran in self.ran.values())

    def hold(self, micro_batch: int) -> None:
        """Called after a backward that ran arriving layers. Holds their gradients until the sum has arrived. `fold`
        adds them, since the optimizer does not have these parameters before the commit."""
        self._held[micro_batch] = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        if self.has_sum:
            self.fold()

    def fold(self) -> None:
        """Called when the sum of the other stage has arrived. Adds the held gradients in the order of micro-batches."""
        for micro_batch in sorted(self._held):
            for index, gradient in enumerate(self._held[micro_batch]):
                if gradient is not None:
                    self.totals[index] = self.sums.add(self.totals[index], gradient)
        self._held = {}


class Travel(NamedTuple):
    """How a batch interacts with the layers that move while it runs.

    parameters  whether the parameters of arriving layers are complete
    gradients   whether the sums of their old stage have arrived; the cut's totals then have them
    send        called when gradients of leaving layers are final
    """

    parameters: Callable[[Cut], bool]
    gradients: Callable[[Cut], bool]
    send: Callable[[Cut], None]


class LiveBatch:
    """Called by the stage before and after each op of one batch."""

    def __init__(self, module: Any, cuts: Sequence[Cut], travel: Travel) -> None:
        self._module, self._travel = module, travel
        self._above = next((cut for cut in cuts if cut.is_lower), None)
        self._below = next((cut for cut in cuts if not cut.is_lower), None)
        self._cuts = [cut for cut in (self._above, self._below) if cut is not None]
        gone = {layer for cut in self._cuts for layer in cut.layers}
        self._owned = list(module.forward_funcs)
        self._first = module._local_start
        # The layers that stay lie between the runs. There are none if the stage gives all its layers to one neighbour.
        self._first_staying = self._first if self._above is None else self._above.layers[-1] + 1
        layers = stage_module.layers_of(module)
        self._staying = [stage_module.function_of(module, n) for n in layers if n not in gone]
        for function in [each for cut in self._cuts if cut.comes for each in cut.functions]:
            if isinstance(function, nn.Module):
                function.train(module.training)

    def before_forward(self, micro_batch: int, word: int) -> int:
        """Selects the layers of a forward. word: of the stage's input. Returns the word of its output."""
        self._hear()
        first, functions = self._first_staying, list(self._staying)
        for cut in self._cuts:
            cut.ran[micro_batch] = cut.rules.runs(micro_batch, word if cut.is_lower else 0)
            self._send(cut)
            if cut.ran[micro_batch]:
                functions = [*cut.functions, *functions] if cut.is_lower else [*functions, *cut.functions]
                first -= len(cut.layers) if cut.is_lower else 0
        stage_module.run_with(self._module, first, functions)
        below = self._below
        return 0 if below is None else below.rules.activation_word(below.ran[micro_batch])

    def before_backward(self, word: int) -> None:
        """Prepares a backward. word: of the gradient that the stage received."""
        self._hear()
        if self._below is not None:
            self._below.rules.heard(word)

    def after_backward(self, micro_batch: int) -> int:
        """Returns the word of the gradient that the stage sends."""
        for cut in self._cuts:
            if cut.ran[micro_batch]:
                cut.rules.ended()
                if cut.comes:
                    cut.hold(micro_batch)
            self._send(cut)
        return 0 if self._above is None else self._above.rules.gradient_word()

    def end(self) -> None:
        """Makes the module run its own layers again. May be called again."""
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
    """Copies the gradients of leaving layers so far to the buffers that are sent."""
    for number, (parameter, place) in enumerate(zip(cut.parameters, room)):
        total = cut.sums.of(parameter)
        is_there[number] = total is not None
        if total is not None:
            place.copy_(total.view(place.shape))


def take_gradients(cut: Cut, room: Sequence[torch.Tensor], is_there: torch.Tensor) -> None:
    """Takes over the received gradients of arriving layers, and adds the held ones. The cut then owns the buffers."""
    cut.totals = [place if there else None for place, there in zip(room, is_there.tolist())]
    cut.fold()
