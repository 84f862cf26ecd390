"""A pipeline whose layers change their stage by themselves: "pipeline": {"plan": "adaptive"}.

While a batch runs, each rank measures the forwards of its layers. Before the next batch one sum over all ranks tells
everybody what each layer took, and all decide alike (sluice.planning.layer_moves). Where moving pays, layers move, as
`move_layers` moves them, before the batch begins.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.deepspeed import moving_layers, stage_module
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.planning.layer_moves import LayerDecider, LayerLook
from torch import nn
from torch.nn.modules import module as every_module

_BACKWARD = 2.0  # of a layer, over its forward
_FIRST_LINK = 1e8  # bytes a second, until a first move was measured


class StageWatch:
    """One engine with a pipeline, which it does not keep alive."""

    def __init__(self, wait_s: float | None) -> None:
        self._wait_s = wait_s
        self._seconds: dict[int, float] = {}  # of the batch before, by layer that lies here
        self._micro_batches = 0
        self._decider: LayerDecider | None = None
        self._refused = ""
        self._num_moves = 0  # times that layers have moved
        self._link = _FIRST_LINK
        self.newest: LayerLook | None = None

    def before_batch(self, engine: Any, micro_batches: int) -> None:
        """Between batches: looks at the one before, and moves layers where that pays. Collective over all ranks."""
        if self._refused or not self._micro_batches:
            self._micro_batches = micro_batches
            return
        module = engine.module
        seconds = [value / self._micro_batches for value in self._shared(module, self._seconds)]
        if self._decider is None:
            sizes = [int(size) for size in self._shared(module, _sizes(module))]
            self._decider = LayerDecider(stage_module.parts_of(module), sizes, self._link, micro_batches)
        self.newest = self._decider.after_batch(seconds)
        self._micro_batches = micro_batches
        if self.newest.verdict == "pays":
            self._move(engine, self.newest)

    @contextmanager
    def measured(self, engine: Any) -> Iterator[None]:
        """Forwards of layers that lie here are measured meanwhile; a layer that runs again counts again."""
        module, begun = engine.module, dict[int, float]()
        functions = {id(stage_module.function_of(module, n)): n for n in stage_module.layers_of(module)}
        self._seconds = seconds = dict.fromkeys(functions.values(), 0.0)

        def before(layer: nn.Module, _: Any) -> None:
            if id(layer) in functions:
                begun[id(layer)] = time.perf_counter()

        def after(layer: nn.Module, _: Any, __: Any) -> None:
            if id(layer) in functions and id(layer) in begun:
                took = time.perf_counter() - begun.pop(id(layer))
                seconds[functions[id(layer)]] += took * (1 + _BACKWARD)

        hooks = [
            every_module.register_module_forward_pre_hook(before),
            every_module.register_module_forward_hook(after),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def report(self) -> dict[str, Any]:
        """For `sluice.stats`."""
        newest = {} if self.newest is None else self.newest._asdict()
        return {"moves": self._num_moves, **({"refused": self._refused} if self._refused else {}), **newest}

    def _shared(self, module: Any, own: dict[int, float]) -> list[float]:
        """By layer, the mean over the replicas that have it, the same bits on all ranks."""
        values = torch.zeros(module._num_layers, dtype=torch.float64)
        for layer, value in own.items():
            values[layer] = value
        dist.all_reduce(values)
        return [value * module.num_stages / dist.get_world_size() for value in values.tolist()]

    def _move(self, engine: Any, look: LayerLook) -> None:
        begun = time.perf_counter()
        try:
            moving_layers.move(engine, look.parts, self._wait_s)
        except UnsupportedError as error:  # on all ranks alike, and nothing has moved
            self._refused = error.message
            if dist.get_rank() == 0:
                print(f"[sluice] WARNING: layers stay on their stages: {error.message}", file=sys.stdout, flush=True)
            return
        self._num_moves += 1
        took = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        assert self._decider is not None
        self._decider.set_link(look.moved_bytes / max(float(took), 1e-6))


def _sizes(module: Any) -> dict[int, float]:
    """Bytes of a layer's parameters, and as many again for gradients and for two moments."""
    return {
        layer: 4.0 * sum(p.numel() * p.element_size() for p in stage_module.parameters_of(module, layer))
        for layer in stage_module.layers_of(module)
    }
