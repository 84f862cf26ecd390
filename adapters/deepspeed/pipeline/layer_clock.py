# SPDX-License-Identifier: Apache-2.0
"""Measures the seconds of a micro-batch in each layer of a stage: forward, backward, and recomputation in the backward.

A backward is measured by marks: a hook runs when a gradient reaches the output of a layer, and the layer's backward,
weight gradients included, lasts until the mark of the previous layer. Full backward hooks would wrap outputs in views.
A layer without a mark, since nothing in it or before it is trained, takes no time.

One micro-batch in four is measured, and the others run without marks. Fewer are measured while marks take more than 1 %
of the measured time.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from sluice.adapters.torch import model_blocks
from torch.autograd.graph import saved_tensors_hooks

_MARK_S = 1e-5  # seconds of a mark; a layer has three
_SHARE = 0.01  # share of the measured time that marks may take
_FIRST_EVERY, _MOST_EVERY = 4, 4096  # the first and the largest interval between measured micro-batches


class Took(NamedTuple):
    """Seconds of one micro-batch in one layer. again: recomputation, a part of backward. output: bytes of outputs."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    output: float = 0.0


Around = Callable[[int, bool], None]  # (layer, whether its forward begins; else it has ended)


class LayerClock:
    """The clock of the layers of one stage, over batches. A stage whose layers change needs a new clock."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = frozenset(layers)
        self._last = max(layers)
        self._every, self._count = _FIRST_EVERY, 0
        self._seconds = {layer: [0.0, 0.0, 0.0] for layer in layers}
        self._bytes = dict.fromkeys(layers, 0.0)
        self._measured: dict[int, dict[int, float]] = {}  # by micro-batch in flight: seconds of backwards by layer
        self._num_measured = 0  # in this batch
        self._newest: dict[int, Took] = {}
        self._mark: tuple[int, float] | None = None  # the layer whose backward runs, and its start
        self._into: dict[int, float] = {}
        self._again = 0.0  # seconds of recomputation in that backward

    @property
    def every(self) -> int:
        """Returns the interval between measured micro-batches."""
        return self._every

    @property
    def has_measured(self) -> bool:
        """Returns whether a micro-batch of this batch was measured."""
        return self._num_measured > 0

    def begin(self) -> None:
        """Called before each batch, also after a failed one."""
        self._newest = self.took()
        if self._num_measured:
            self._go_on(sum(sum(seconds[:2]) for seconds in self._seconds.values()), self._num_measured)
        self._num_measured, self._measured = 0, {}
        for seconds in self._seconds.values():
            seconds[:] = 0.0, 0.0, 0.0

    def took(self) -> dict[int, Took]:
        """Returns by layer the mean over this batch's measured micro-batches, complete when their backwards have ended;
        if none was measured, the means of an earlier batch, if any."""
        count = self._num_measured
        if not count:
            return self._newest
        found = self._seconds.items()
        return {layer: Took(*(value / count for value in seconds), self._bytes[layer]) for layer, seconds in found}

    def _go_on(self, seconds: float, count: int) -> None:
        """Adapts how many micro-batches are measured to the cost of marks."""
        share = 3 * len(self._layers) * _MARK_S * count / max(seconds, 1e-9)
        while share / self._every > _SHARE and self._every < _MOST_EVERY:
            self._every *= 2
        while self._every > _FIRST_EVERY and 4 * share / self._every < _SHARE:
            self._every //= 2

    @contextmanager
    def forward(self, module: Any, micro_batch: int, around: Around | None = None) -> Iterator[None]:
        """Wraps the forward of a micro-batch. around: called for each layer if the micro-batch is measured."""
        self._count += 1
        if (self._count - 2) % self._every:  # the first micro-batch of all is slow
            yield
            return
        self._measured[micro_batch] = {}
        with self._wrapped(module, around):
            yield
        self._num_measured += 1

    @contextmanager
    def backward(self, module: Any, micro_batch: int) -> Iterator[None]:
        """Wraps the backward of a micro-batch."""
        if micro_batch not in self._measured:
            yield
            return
        self._into, self._again = self._measured[micro_batch], 0.0
        self._mark = self._last, time.perf_counter()  # the time before the first mark is that of the loss
        model_blocks.on_recompute = self._count_again
        try:
            with self._wrapped(module, None):
                yield
        finally:
            model_blocks.on_recompute = None
            self._reach(self._last)
            self._mark = None

    @contextmanager
    def weight_grad(self, micro_batch: int) -> Iterator[None]:
        """Wraps the separate weight gradients of a micro-batch. Their time is divided in proportion to backwards."""
        backwards = self._measured.get(micro_batch, {})
        begun, whole = time.perf_counter(), sum(backwards.values())
        yield
        if whole > 0:
            took = time.perf_counter() - begun
            for layer, seconds in backwards.items():
                self._seconds[layer][1] += took * seconds / whole

    # ---- around layers ----

    @contextmanager
    def _wrapped(self, module: Any, around: Around | None) -> Iterator[None]:
        """Makes the stage call its layers through this clock. A host may call the layers again in a backward."""
        functions = list(module.forward_funcs)
        first = module._local_start
        module.forward_funcs[:] = [
            self._timed(first + place, function, around) if first + place in self._layers else function
            for place, function in enumerate(functions)
        ]
        try:
            yield
        finally:
            module.forward_funcs[:] = functions

    def _timed(self, layer: int, function: Any, around: Around | None) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            is_again = torch._C._current_graph_task_id() != -1
            if around is not None:
                around(layer, True)
            begun = time.perf_counter()
            outputs = function(*inputs)
            took = time.perf_counter() - begun
            if around is not None:
                around(layer, False)
            if is_again:
                self._count_again(took)
            else:
                self._seconds[layer][0] += took
                self._watch(layer, inputs, outputs)
            return outputs

        return call

    def _watch(self, layer: int, inputs: Any, outputs: Any) -> None:
        """Marks the outputs of a layer, except inputs that it returns, which belong to the previous layer."""
        given = {id(tensor.grad_fn) for tensor in _tensors(inputs) if tensor.grad_fn is not None}
        self._bytes[layer] = 0.0
        for tensor in _tensors(outputs):
            self._bytes[layer] += tensor.nbytes
            if tensor.grad_fn is not None and id(tensor.grad_fn) not in given:
                tensor.grad_fn.register_prehook(lambda _: self._reach(layer))

    def _reach(self, layer: int) -> None:
        """Called when the backward of this layer begins. The backward of the next layer has then ended."""
        if self._mark is None:
            return  # a backward that is not the stage's
        before, since = self._mark
        now = time.perf_counter()
        seconds = self._seconds[before]
        seconds[1] += now - since
        seconds[2] += self._again
        self._into[before] = self._into.get(before, 0.0) + now - since
        self._mark, self._again = (layer, now), 0.0

    def _count_again(self, seconds: float) -> None:
        self._again += seconds


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


class HeldBytes:
    """Measures, in one batch, the bytes that each layer saves for its backward in its first forward. note: receives the
    bytes of a layer, at the layer's place. parameters: are not counted.

    Saved-tensor hooks of autograd see the tensors. A tensor counts once for each layer that saves it, with its whole
    storage. A tensor that two layers share counts for both, so the sum is an upper bound wherever the model is cut.
    """

    def __init__(self, note: array[float], parameters: Iterable[torch.Tensor]) -> None:
        self._note = note
        self._known = {parameter.data_ptr() for parameter in parameters}
        self._sizes: dict[int, int] = {}
        self._asked: set[int] = set()
        self._open: tuple[int, Any] | None = None

    def begin(self, place: int) -> None:
        """Called before a forward of the layer at this place."""
        if place not in self._asked and self._open is None:
            self._asked.add(place)
            hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
            hooks.__enter__()
            self._open, self._sizes = (place, hooks), {}

    def end(self, place: int) -> None:
        """Called after a forward of the layer at this place."""
        if self._open is not None and self._open[0] == place:
            self._note[place] = max(1.0, float(sum(self._sizes.values())))
            self.close()

    def close(self) -> None:
        """Ends a measurement, also after a forward that raised. May be called again."""
        if self._open is not None:
            self._open[1].__exit__()
            self._open = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.data_ptr()
        if where not in self._known and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # saving an output itself would keep its graph alive
