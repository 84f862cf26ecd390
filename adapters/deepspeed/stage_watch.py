"""A pipeline whose layers change their stage by themselves: "pipeline": {"plan": "adaptive"}.

While a batch runs, each rank measures the forwards of its layers. What it has measured rides with the end of the batch,
which ranks tell each other in any case: no collective and no message more. So all know the same and decide alike
(sluice.planning.layer_moves). Where moving pays, layers move as `move_layers` moves them: during the next batch where
they can, else before it.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from sluice import trace
from sluice.adapters.deepspeed import moving_layers, stage_module
from sluice.adapters.deepspeed.live_layers import LiveLayers, why_no_live_parts
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.adapters.torch import Pipeline
from sluice.errors import InvalidState
from sluice.planning.layer_moves import LayerDecider, LayerLook
from torch import nn
from torch.nn.modules import module as every_module

_BACKWARD = 2.0  # of a layer, over its forward
_FIRST_LINK = 1e8  # bytes a second, until a first move was measured


class StageWatch:
    """One engine with a pipeline, which it does not keep alive."""

    def __init__(self, wait_s: float | None, live: LiveLayers) -> None:
        self._wait_s, self._live = wait_s, live
        self._arriving: LayerLook | None = None  # what is on its way by this watch, until it has arrived
        # Of this rank: seconds that the move in front of the batch took, then of each layer that lies here its seconds
        # in the batch, and its bytes.
        self._note = array("d")
        self._parts: tuple[int, ...] = ()  # when it was measured
        self._micro_batches = 0
        self._decider: LayerDecider | None = None
        self._refused = ""
        self._num_moves = 0  # times that layers have moved
        self._moved_bytes = 0  # by the newest move, whose time is not known yet
        self._move_s = 0.0
        self.newest: LayerLook | None = None

    def before_batch(self, engine: Any, pipeline: Pipeline, micro_batches: int) -> None:
        """Between batches: looks at the one before, and moves layers where that pays. Collective over all ranks where
        it moves any."""
        before, self._micro_batches = self._micro_batches, micro_batches
        if self._refused or not before or self._has_moved_meanwhile(engine) or self._live.is_under_way:
            return
        try:
            notes = pipeline.notes()
        except InvalidState:  # on all ranks alike: the batch before has failed
            return
        parts = stage_module.parts_of(engine.module)
        if self._parts != parts or (self._decider is not None and self._decider.parts != parts):
            self._decider = None  # somebody has moved layers by hand
            return
        seconds, sizes = _of_layers(engine.module, notes)
        if self._decider is None:
            self._decider = LayerDecider(parts, [int(size) for size in sizes], _FIRST_LINK, micro_batches)
        if self._moved_bytes:
            self._decider.set_link(self._moved_bytes / max(*(note[0] for note in notes), 1e-6))
            self._moved_bytes = 0
        self.newest = self._decider.after_batch([value / before for value in seconds])
        if self.newest.verdict == "pays":
            self._move(engine, self.newest)

    @contextmanager
    def measured(self, engine: Any, pipeline: Pipeline) -> Iterator[None]:
        """Forwards of layers that lie here are measured meanwhile; a layer that runs again counts again."""
        module, begun = engine.module, dict[int, float]()
        layers = list(stage_module.layers_of(module))
        self._parts = stage_module.parts_of(module)
        places = {id(stage_module.function_of(module, n)): 1 + 2 * at for at, n in enumerate(layers)}
        note = self._note = array("d", [self._move_s])
        for layer in layers:
            note.extend((0.0, _size(module, layer)))
        self._move_s = 0.0
        pipeline.set_note(note)

        def before(layer: nn.Module, _: Any) -> None:
            if id(layer) in places:
                begun[id(layer)] = time.perf_counter()

        def after(layer: nn.Module, _: Any, __: Any) -> None:
            if id(layer) in places and id(layer) in begun:
                took = time.perf_counter() - begun.pop(id(layer))
                note[places[id(layer)]] += took * (1 + _BACKWARD)

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

    def _has_moved_meanwhile(self, engine: Any) -> bool:
        """Whether layers arrived during the batch before, of which nobody knows then how long they took."""
        look = self._arriving
        if look is None or self._live.is_under_way:
            return False
        self._arriving = None
        if look.parts != stage_module.parts_of(engine.module):
            return False
        self._count(look, self._live.exposed_s)
        return True

    def _count(self, look: LayerLook, seconds: float) -> None:
        self._num_moves += 1
        self._moved_bytes, self._move_s = look.moved_bytes, seconds

    def _move(self, engine: Any, look: LayerLook) -> None:
        begun, begin_ns = time.perf_counter(), time.monotonic_ns()
        if self._sets_out(engine, look):
            return
        try:
            moved = moving_layers.move(engine, look.parts, self._wait_s)
        except UnsupportedError as error:  # on all ranks alike, and nothing has moved
            self._refused = error.message
            if dist.get_rank() == 0:
                print(f"[sluice] WARNING: layers stay on their stages: {error.message}", file=sys.stdout, flush=True)
            return
        self._count(look, time.perf_counter() - begun)
        left = look.moved_bytes // dist.get_world_size()  # of this rank, as if each had given as much
        trace.keep_move("layers", "the pipeline", begin_ns, len(moved), left, 0, self._move_s)

    def _sets_out(self, engine: Any, look: LayerLook) -> bool:
        """Whether the layers go during the next batch. Alike on all ranks."""
        if why_no_live_parts(engine.module, look.parts):
            return False
        try:
            self._live.begin(engine, look.parts, self._wait_s)
        except UnsupportedError:  # which moving between batches will say, or do
            return False
        self._arriving = look
        return True


def _size(module: Any, layer: int) -> float:
    """Bytes of a layer's parameters, and as many again for gradients and for two moments."""
    return 4.0 * sum(p.numel() * p.element_size() for p in stage_module.parameters_of(module, layer))


def _of_layers(module: Any, notes: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Seconds and bytes by layer: means over the replicas that have it, the same bits on all ranks."""
    parts = stage_module.parts_of(module)
    seconds, sizes = [0.0] * parts[-1], [0.0] * parts[-1]
    share = (len(parts) - 1) / len(notes)
    for rank, note in enumerate(notes):
        first = parts[module._topo.get_coord(rank).pipe]
        for at in range((len(note) - 1) // 2):
            seconds[first + at] += share * note[1 + 2 * at]
            sizes[first + at] += share * note[2 + 2 * at]
    return seconds, sizes
