# SPDX-License-Identifier: Apache-2.0
"""Moves layers between stages automatically: "pipeline": {"plan": "adaptive"}.

While a batch runs, each rank measures the seconds and bytes of its layers (layer_clock.py). The ranks exchange these
numbers in the messages that end a batch, without an additional collective or message, and make the same decision from
them (sluice.planning.layer_moves). Under a budget they also decide which layers are recomputed
(sluice.planning.layer_kinds); recomputation is switched between batches. If a move pays, layers move as `move_layers`
moves them: in steps, each during one of the next batches, or before the next batch, whichever costs less time.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from sluice import trace
from sluice.adapters.deepspeed.optimizer import optimizer_parts
from sluice.adapters.deepspeed.pipeline import moving_layers, stage_module, stage_plan
from sluice.adapters.deepspeed.pipeline.layer_clock import HeldBytes, LayerClock
from sluice.adapters.deepspeed.pipeline.live_layers import LiveLayers
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.adapters.torch import Pipeline
from sluice.errors import InvalidState
from sluice.planning.layer_kinds import Costs, KindDecider, Pipe, Way
from sluice.planning.layer_moves import LayerDecider, LayerLook, LearnedRates, Trained, busiest_bytes_of, moved_bytes_of

_FIRST_LINK = 1e8  # bytes per second, until a drain has been measured
# A rank's note begins with: seconds of the newest move; seconds of it in which layers were sent; micro-batches that may
# be in flight; whether a micro-batch of this batch was measured (else the rest is from an earlier batch). Then follow,
# for each layer of the stage and one micro-batch: seconds of forward, backward and recomputation; bytes of outputs;
# bytes on any stage; bytes saved for the backward; the optimizer's groups in which the layer trains something, as bits;
# one of _ANY_TIME, _BETWEEN and _NEVER: when the layer can move.
_MOVE, _TRAVEL, _IN_FLIGHT, _IS_NEW, _HEAD = range(5)
_OF_LAYER, _MOST_GROUPS = 8, 50
_FORWARD, _BACKWARD, _AGAIN, _OUTPUT, _SIZE, _HELD, _GROUPS, _WHEN = range(_OF_LAYER)
_ANY_TIME, _BETWEEN, _NEVER = range(3)


class StageWatch:
    """Watches one pipeline engine and moves its layers. Does not keep the engine alive."""

    def __init__(self, wait_s: float | None, live: LiveLayers, budget: int | None = None) -> None:
        self._wait_s, self._live, self._budget = wait_s, live, budget
        self._steps: list[tuple[int, ...]] = []  # next partitions; the move to the first is in progress
        self._sizes: list[int] = []
        self._rates = LearnedRates(_FIRST_LINK)
        self._note = array("d")
        self._clock: LayerClock | None = None  # of the current layers of this stage
        self._parts: tuple[int, ...] = ()  # the partition of the newest measurement
        self._reruns: frozenset[int] = frozenset()  # the recomputed layers of that measurement
        self._micro_batches = 0
        self._decider: LayerDecider | KindDecider | None = None
        self._kept: dict[int, float] = {}  # bytes that a micro-batch saves in a layer without recomputation
        self._refused = self._why_drained = ""  # why layers stay; why the newest move was between two batches
        self._without_groups: frozenset[int] | None = None  # layers with MoE layers that some stage cannot run
        self._num_moves = self._num_steps = 0  # completed moves, and batches during which layers moved
        self._was_drain = False  # whether the newest move was between two batches
        self._moved_bytes = 0  # of the busiest stage in the newest move
        self._move_s = self._travel_s = 0.0
        self.newest: LayerLook | None = None

    def before_batch(self, engine: Any, pipeline: Pipeline, micro_batches: int) -> None:
        """Called between batches. Evaluates the previous batch, and moves layers if that pays. A move is collective
        over all ranks."""
        before, self._micro_batches = self._micro_batches, micro_batches
        if (self._refused and self._budget is None) or not before or self._goes_on(engine) or self._live.is_under_way:
            return
        try:
            notes = pipeline.notes()
        except InvalidState:  # on all ranks: the previous batch has failed
            return
        self._note_rates(max(note[_MOVE] for note in notes), max(note[_TRAVEL] for note in notes))
        parts = stage_module.parts_of(engine.module)
        if self._parts != parts or (self._decider is not None and self._decider.parts != parts):
            self._decider = None  # the user has moved layers
            return
        found = _of_layers(engine.module, notes)
        if not all(any(note[_HEAD + _FORWARD :: _OF_LAYER]) for note in notes):
            return  # a stage has not measured a micro-batch yet
        if self._decider is not None and not all(note[_IS_NEW] for note in notes):
            return  # the decider has these numbers already
        needs_all = optimizer_parts.of_engine(engine).needs_all_groups
        when = [round(value) for value in found[_WHEN]]
        between = frozenset(layer for layer, value in enumerate(when) if value == _BETWEEN)
        if between and self._without_groups is None:
            self._without_groups = moving_layers.without_groups(engine, self._wait_s)
        between -= self._without_groups or frozenset()
        stays = frozenset(layer for layer, value in enumerate(when) if value != _ANY_TIME) - between
        trained = Trained([_groups(bits) for bits in found[_GROUPS]], needs_all, stays, between)
        look = self._decided(engine, notes, before, found, trained)
        if look is not None and not self._apply(engine, look) and self._budget is not None:
            # The move was refused, and the decider keeps the layers here from now on. The next measurement may be many
            # batches away: choose recomputation from this one.
            again = self._decided(engine, notes, before, found, trained)
            assert again is not None and again.parts == parts
            self._apply(engine, again)

    def _apply(self, engine: Any, look: LayerLook) -> bool:
        """Puts a decision into effect. False: its move was refused on all ranks."""
        self.newest = look
        if self._budget is not None:
            stage_module.set_recomputed(engine.module, look.recomputed)
        return look.parts == stage_module.parts_of(engine.module) or self._move(engine, look)

    def _decided(
        self, engine: Any, notes: Sequence[Any], micro_batches: int, found: Sequence[list[float]], trained: Trained
    ) -> LayerLook | None:
        """Returns the decision after a batch. None: some numbers are still missing."""
        sizes, parts = [int(size) for size in found[_SIZE]], self._parts
        self._sizes = sizes
        costs, pipe = None, None
        if self._budget is not None:
            costs, pipe = self._costs(engine, found), self._pipe(engine.module, notes, micro_batches)
            if costs is None or pipe is None:
                return None
        if self._decider is None and pipe is not None:
            self._decider = KindDecider(Way(parts, stage_module.recomputed_of(engine.module)), pipe, _FIRST_LINK)
            if self._refused:
                self._decider.pin(parts)
        elif self._decider is None:
            self._decider = LayerDecider(parts, sizes, _FIRST_LINK, micro_batches)
        self._decider.set_rates(self._rates.rates)
        moves_live = not self._live.why_never(engine.module)
        if isinstance(self._decider, KindDecider):
            assert costs is not None and pipe is not None
            self._decider.set_pipe(pipe)
            return self._decider.after_batch(costs, trained, moves_live)
        seconds = [forward + backward for forward, backward in zip(found[_FORWARD], found[_BACKWARD])]
        return self._decider.after_batch(seconds, trained, moves_live)

    def _note_rates(self, seconds: float, travel_s: float) -> None:
        """Updates the rates by the newest move. seconds: of the slowest rank; 0: there was no move. travel_s: of these,
        in transfers."""
        if seconds > 0:
            note = self._rates.drained if self._was_drain else self._rates.stepped
            note(self._moved_bytes, seconds, travel_s)

    def _pipe(self, module: Any, notes: Sequence[Sequence[float]], micro_batches: int) -> Pipe | None:
        """Returns the pipe. None: micro-batches in flight are known only after the second batch."""
        in_flight = [0] * (len(self._parts) - 1)
        for rank, note in enumerate(notes):
            stage = module._topo.get_coord(rank).pipe
            in_flight[stage] = max(in_flight[stage], min(int(note[_IN_FLIGHT]), micro_batches))
        assert self._budget is not None
        return Pipe(self._budget, in_flight, micro_batches) if all(in_flight) else None

    def _costs(self, engine: Any, found: Sequence[list[float]]) -> Costs | None:
        """Returns the costs of layers. A batch measures a layer's saved bytes either with or without recomputation; the
        bytes without it are remembered from earlier batches."""
        module, held = engine.module, found[_HELD]
        if not all(held):
            return None
        reruns = stage_module.recomputed_of(module)
        for layer, size in enumerate(held):
            if layer not in reruns:
                self._kept[layer] = size
        host = stage_plan.host_recomputes(engine)
        count = range(len(held))
        inputs = [0.0, *found[_OUTPUT]]
        kept = [max(self._kept.get(n, held[n]), held[n]) for n in count]
        times = list(zip(found[_FORWARD], found[_BACKWARD], found[_AGAIN]))
        return Costs(
            seconds=[forward + backward - again for forward, backward, again in times],
            again=[again or (forward if backward else 0.0) for forward, backward, again in times],
            resident=[int(size) for size in found[_SIZE]],
            kept=[int(size) for size in kept],
            rerun=[int(min(held[n] if n in reruns else inputs[n], kept[n])) for n in count],
            output=[0] * len(held),  # inputs and outputs are counted with the layers that save them
            may_rerun=[not host and not stage_module.why_not_switched(module, n) for n in count],
        )

    @contextmanager
    def measured(self, engine: Any, pipeline: Pipeline) -> Iterator[Measured]:
        """Measures the layers of this stage during a batch. Yields the object that wraps the stage's ops."""
        module = engine.module
        layers = stage_module.layers_of(module)
        parts = stage_module.parts_of(module)
        reruns = stage_module.recomputed_of(module)
        are_same = (self._parts, self._reruns) == (parts, reruns)
        if self._clock is None or not are_same:
            self._clock = LayerClock(layers)
        self._parts, self._reruns = parts, reruns
        optimizer = optimizer_parts.of_engine(engine)
        before, self._note = self._note, array("d", (self._move_s, self._travel_s, pipeline.stats()["in_flight"], 0.0))
        for at, layer in enumerate(layers):
            groups = moving_layers.groups_of(module, layer, optimizer)
            bits = float(sum(1 << group for group in groups if group < _MOST_GROUPS))
            size = float(optimizer.bytes_of(stage_module.parameters_of(module, layer)))
            held = before[_HEAD + _OF_LAYER * at + _HELD] if are_same else 0.0
            self._note.extend((0.0, 0.0, 0.0, 0.0, size, held, bits, float(_when_moved(engine, layer))))
        asked = None if self._budget is None else HeldBytes(self._note, module.parameters())
        self._move_s = self._travel_s = 0.0
        self._clock.begin()
        pipeline.set_note(self._note)
        try:
            yield Measured(module, self._clock, self._note, asked)
        finally:
            if asked is not None:
                asked.close()

    def report(self) -> dict[str, Any]:
        """Returns numbers for `sluice.stats`."""
        newest = {} if self.newest is None else self.newest._asdict()
        counts = {"moves": self._num_moves, "batches_moving": self._num_steps, **self._rates.rates._asdict()}
        reasons = {"refused": self._refused, "why_drained": self._why_drained}
        return {**counts, **{name: why for name, why in reasons.items() if why}, **newest}

    def _goes_on(self, engine: Any) -> bool:
        """Returns whether layers arrived during the previous batch. Starts the next step, if there is one. The time of
        a step is known one batch later."""
        if not self._steps or self._live.is_under_way:
            return False
        arrived, *to_come = self._steps
        self._steps = []
        if arrived != stage_module.parts_of(engine.module):  # the batch has failed
            return False
        # A price counts the time until the layers have arrived as time of the batch, not of the commit.
        travel_s = self._live.late_bytes / self._rates.rates.link
        self._note_move(self._live.exposed_s, travel_s, self._moved_bytes, was_drain=False)
        self._num_steps += 1
        self._num_moves += not to_come
        if to_come and not self._sets_out(engine, to_come):
            self._drain(engine, to_come[-1])
        return True

    def _note_move(self, seconds: float, travel_s: float, moved_bytes: int, was_drain: bool) -> None:
        self._move_s, self._travel_s, self._moved_bytes, self._was_drain = seconds, travel_s, moved_bytes, was_drain

    def _move(self, engine: Any, look: LayerLook) -> bool:
        """Starts the move or completes it. False: it was refused on all ranks."""
        self._why_drained = self._live.why_never(engine.module) or look.why_drained
        return (bool(look.steps) and self._sets_out(engine, look.steps)) or self._drain(engine, look.parts)

    def _drain(self, engine: Any, parts: tuple[int, ...]) -> bool:
        """Moves layers before the next batch. False: the move was refused on all ranks."""
        begun, begin_ns = time.perf_counter(), time.monotonic_ns()
        before = stage_module.parts_of(engine.module)
        try:
            moved = moving_layers.move(engine, parts, self._wait_s)
        except UnsupportedError as error:  # on all ranks; nothing has moved
            if isinstance(self._decider, KindDecider):
                self._decider.pin(before)
            if not self._refused and dist.get_rank() == 0:
                print(f"[sluice] WARNING: layers stay on their stages: {error.message}", file=sys.stdout, flush=True)
            self._refused = error.message
            return False
        self._num_moves += 1
        moved_bytes = busiest_bytes_of(before, parts, self._sizes)
        self._note_move(time.perf_counter() - begun, moved.travel_s, moved_bytes, was_drain=True)
        # The mean over ranks, as an estimate for this rank.
        left = moved_bytes_of(before, parts, self._sizes) // dist.get_world_size()
        trace.keep_move("layers", "the pipeline", begin_ns, len(moved.moves), left, 0, self._move_s)
        return True

    def _sets_out(self, engine: Any, steps: Sequence[tuple[int, ...]]) -> bool:
        """Starts the first step. Returns whether its layers move during the next batch, the same on all ranks."""
        before = stage_module.parts_of(engine.module)
        try:
            self._live.begin(engine, steps[0], self._wait_s)
        except UnsupportedError as error:  # a move between batches follows, which succeeds or reports its own reason
            self._why_drained = error.message
            return False
        self._steps, self._moved_bytes = list(steps), busiest_bytes_of(before, steps[0], self._sizes)
        return True


class Measured:
    """Wraps the ops of one batch and measures some of them."""

    def __init__(self, module: Any, clock: LayerClock, note: array[float], held: HeldBytes | None) -> None:
        self._module, self._clock, self._note, self._held = module, clock, note, held
        self._places = {n: _HEAD + _OF_LAYER * at for at, n in enumerate(stage_module.layers_of(module))}
        self._write()

    def forward(self, micro_batch: int) -> AbstractContextManager[None]:
        return self._clock.forward(self._module, micro_batch, self._around if self._held else None)

    @contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        with self._clock.backward(self._module, micro_batch):
            yield
        self._write()

    @contextmanager
    def weight_grad(self, micro_batch: int) -> Iterator[None]:
        with self._clock.weight_grad(micro_batch):
            yield
        self._write()

    def _write(self) -> None:
        """Writes the measurements to the note, which is sent after the last op."""
        self._note[_IS_NEW] = float(self._clock.has_measured)
        for layer, took in self._clock.took().items():
            place = self._places[layer]
            self._note[place : place + len(took)] = array("d", took)

    def _around(self, layer: int, begins: bool) -> None:
        assert self._held is not None
        (self._held.begin if begins else self._held.end)(self._places[layer] + _HELD)


def _when_moved(engine: Any, layer: int) -> int:
    """Returns when a layer of this stage can move."""
    module = engine.module
    if not stage_module.has_experts(module, layer):
        return _NEVER if stage_module.why_stays(module, layer) else _ANY_TIME
    function = stage_module.function_of(module, layer)
    why = stage_module.why_pinned(module, layer) or engine.sluice.experts.why_not(engine.sluice, layer, function)
    return _NEVER if why else _BETWEEN


def _groups(bits: float) -> frozenset[int]:
    return frozenset(group for group in range(_MOST_GROUPS) if round(bits) >> group & 1)


def _of_layers(module: Any, notes: Sequence[Sequence[float]]) -> tuple[list[float], ...]:
    """Returns the fields of all notes by layer: means over the layer's replicas, with the same bits on all ranks."""
    parts = stage_module.parts_of(module)
    found = tuple([0.0] * parts[-1] for _ in range(_OF_LAYER))
    share = (len(parts) - 1) / len(notes)
    for rank, note in enumerate(notes):
        first = parts[module._topo.get_coord(rank).pipe]
        for at in range((len(note) - _HEAD) // _OF_LAYER):
            for which, values in enumerate(found):
                values[first + at] += share * note[_HEAD + _OF_LAYER * at + which]
    return found
