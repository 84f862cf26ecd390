# SPDX-License-Identifier: Apache-2.0
"""Moves runs of layers of a `PipelineModule` to the neighbouring stage while a batch runs, without a drain. Their state
is sent in the background (`sluice/migration.h`), and micro-batches switch to the new stage after it has arrived
(docs/pipeline.md, "Layers that move in a batch").

A move starts between two batches and takes effect at the end of the next training batch, on all ranks or on none. It
takes effect before the update, so that the optimizer sees the gradients on the stage that has the layer. Source: vPipe
(TPDS 2022), section on live migration.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from sluice import trace
from sluice.adapters.common.migration import shipments
from sluice.adapters.common.migration.shipments import Content, Shipment
from sluice.adapters.deepspeed.optimizer import gradient_sums, optimizer_parts
from sluice.adapters.deepspeed.optimizer.gradient_sums import ParameterSums
from sluice.adapters.deepspeed.pipeline import moving_layers, stage_module
from sluice.adapters.deepspeed.pipeline.live_batch import Cut, LiveBatch, Travel, load_gradients, take_gradients
from sluice.adapters.deepspeed.pipeline.moving_layers import Meeting, Move
from sluice.adapters.torch import Arriving, EpGroup, Leaving, Migration
from sluice.config import Options
from sluice.errors import Aborted, InvalidState, PeerLost, SluiceError, TimedOut
from torch import nn

_A_RANK_IS_LOST = (Aborted, PeerLost, TimedOut)
_GRADIENT = " grad"  # suffix of the name of a parameter
_NONE_MOVED = "No layer has moved: run the batch again"


class _Trip(NamedTuple):
    """The layers that move across one cut, as seen by one of its stages."""

    cut: Cut
    contents: dict[int, Content]  # by layer: contents of leaving layers, or buffers for arriving ones
    item: Leaving
    early: int  # how many of the tensors that are sent first a forward needs
    versions: list[tuple[torch.Tensor, int]]  # torch's versions of leaving tensors, which count writes


class _LayerMove(NamedTuple):
    """The move in progress, as seen by this rank."""

    moves: list[Move]
    meeting: Meeting
    parts: list[int]
    trips: list[_Trip]
    failure: str  # why the move could not start on this rank; other ranks learn this in commit
    begin_ns: int
    begin_s: float


class LiveLayers:
    """Moves layers of one engine whose batches the library runs. Does not keep the engine alive."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._group: EpGroup | None = None
        self._migration: Migration | None = None
        self._rate: int | None = None
        self._epoch = 0
        self._voyage: _LayerMove | None = None
        self._buffers: dict[int, int] = {}  # versions of buffers at the start of the newest training batch
        self.num_in_batch = self.num_at_flush = 0  # layers of this stage that moved during a batch, or at its end
        self.num_sums_early = 0  # layers whose gradient sums arrived at this stage during the batch
        self.exposed_s = 0.0  # seconds of this rank that the newest move took in addition to its batch
        self.late_bytes = 0  # bytes that this rank sent in these seconds

    @property
    def is_under_way(self) -> bool:
        """Returns whether a move is in progress."""
        return self._voyage is not None

    def why_busy(self) -> str:
        """Returns why no other move can start now; "": one can."""
        return "" if self._voyage is None else "layers are being moved: they arrive with the next training batch"

    # ---- between batches ----

    def begin(self, engine: Any, parts: Sequence[int], wait_s: float | None, rate: int | None = None) -> list[Move]:
        """Starts a move after which, with the next training batch, stage s has layers parts[s] to before parts[s + 1].

        rate: bytes per second that each rank sends during the batch. Collective over all ranks of the engine, with the
        same arguments. Returns the moves. UnsupportedError or agree.DisagreementError on all ranks: nothing moves.
        """
        begun, begin_ns = time.perf_counter(), time.monotonic_ns()
        module, parts = engine.module, [int(bound) for bound in parts]
        optimizer = optimizer_parts.of_engine(engine)
        refused = self._why_not(module, parts)
        wanted = {"parts": parts, "live": True, "bytes_per_second": rate}
        moves, built = moving_layers.agreed(engine, wanted, refused, optimizer, wait_s)
        if not moves:
            return []
        meeting = Meeting(moves, self._options.timeout if wait_s is None else wait_s)
        going = moving_layers.going(module, moves)
        leaving = [p for layer in going for p in stage_module.parameters_of(module, layer)]
        kept = moving_layers.taken(optimizer, leaving, meeting)
        listed = moving_layers.described(
            module, moves, meeting, lambda layer: _still(moving_layers.content_of(going[layer], kept))
        )

        def trips_of() -> list[_Trip]:
            sums = gradient_sums.of_optimizer(engine.optimizer)
            return [_trip(module, run, {**going, **built}, sums) for run in _runs(module, zip(moves, listed))]

        trips = meeting.do("making room", trips_of)
        failure = self._set_out(trips, rate)
        self._voyage = _LayerMove(moves, meeting, parts, trips, failure, begin_ns, time.perf_counter() - begun)
        return moves

    def _set_out(self, trips: Sequence[_Trip], rate: int | None) -> str:
        if self._group is None:
            timeout = None if self._options.timeout is None else timedelta(seconds=self._options.timeout)
            ranks = range(torch.distributed.get_world_size())
            self._group = EpGroup.unshared(ranks, timeout, self._options.transport)
        if self._migration is None or self._rate != rate:
            if self._migration is not None:
                self._migration.close()
            self._migration, self._rate = Migration(self._group, rate, epoch=self._epoch), rate
        self._epoch += 1
        try:
            self._migration.begin(self._epoch, [trip.item for trip in trips])
        except _A_RANK_IS_LOST:
            raise
        except SluiceError as error:
            return str(error)
        return ""

    def _why_not(self, module: Any, parts: Sequence[int]) -> str:
        """Returns why this rank's layers cannot move in a batch; "": they can, unless `agreed` refuses the move."""
        why = self.why_busy()
        if not why and not stage_module.why_no_partition(module, parts):
            why = why_no_live_parts(module, parts)
        if why or stage_module.why_no_partition(module, parts):  # `agreed` reports the latter
            return why
        why = self.why_never(module)
        if why:
            return why
        going = moving_layers.going(module, moving_layers.moves_of(module, parts))
        return next((why for why in (self._why_still(module, layer) for layer in going) if why), "")

    def why_never(self, module: Any) -> str:
        """Returns why no layers of this engine can ever move in a batch; "": they can. The same on all ranks."""
        if self._options.pipeline is not None and self._options.pipeline.is_apart:
            return "weight gradients are separate ops, which cannot move with a layer: move layers between batches"
        if module.activation_checkpoint_interval > 0:
            return "activation_checkpoint_interval is set, with which the host recomputes layers by their position"
        return ""

    def _why_still(self, module: Any, layer: int) -> str:
        """Returns why this layer cannot move in a batch, since both stages would write its buffers; "": it can."""
        function = stage_module.function_of(module, layer)
        if stage_module.has_experts(module, layer):
            return f"layer {layer} holds a MoE layer, whose ranks meet in each micro-batch: move it between batches"
        for name, buffer in function.named_buffers() if isinstance(function, nn.Module) else ():
            if id(buffer) not in self._buffers:
                return f"layer {layer} has buffers ({name}), and no batch has shown yet that forwards do not write them"
            if self._buffers[id(buffer)] != buffer._version:
                return f"layer {layer} has a buffer that forwards write ({name}), so it has to run on one stage"
        return ""

    def report(self) -> dict[str, Any]:
        """Returns numbers for `sluice.stats`: layers that moved across a cut of this stage during a batch, layers that
        moved at its flush, layers whose gradient sums arrived here during the batch, and seconds of this rank that the
        newest move took in addition to its batch."""
        layers = {"in_batch": self.num_in_batch, "at_flush": self.num_at_flush, "sums_early": self.num_sums_early}
        return {**layers, "exposed_seconds": self.exposed_s}

    def cancel(self, reason: str) -> None:
        """Cancels the move in progress; its layers stay where they were. All ranks must call it. Does not wait."""
        voyage, self._voyage = self._voyage, None
        if voyage is not None and self._migration is not None and not voyage.failure:
            self._migration.abort(reason)

    def close(self) -> None:
        """Cancels the move and closes the group. May be called again."""
        self.cancel("closed")
        if self._migration is not None:
            self._migration.close()
        if self._group is not None:
            self._group.close()
        self._migration = self._group = None

    # ---- a training batch ----

    def batch(self, module: Any) -> LiveBatch | None:
        """Called before the first op of a batch. None: no layers move across a cut of this stage."""
        self._buffers = {id(buffer): buffer._version for buffer in module.buffers()}
        trips = [] if self._voyage is None else self._voyage.trips
        by_cut = {id(trip.cut): trip for trip in trips}
        if not trips:
            return None
        travel = Travel(
            lambda cut: self._is_there(by_cut[id(cut)]),
            lambda cut: self._takes_sum(by_cut[id(cut)]),
            lambda cut: self._send_sum(by_cut[id(cut)]),
        )
        return LiveBatch(module, [trip.cut for trip in trips], travel)

    def _is_there(self, trip: _Trip) -> bool:
        assert self._migration is not None and self._voyage is not None and isinstance(trip.item, Arriving)
        return not self._voyage.failure and self._migration.read_early(trip.item, trip.early)

    def _takes_sum(self, trip: _Trip) -> bool:
        """Takes the gradient sums if they have arrived. Copies them, since commit writes the item's tensors again."""
        assert self._migration is not None and isinstance(trip.item, Arriving)
        if not self._migration.read_late(trip.item, trip.item.late):
            return False
        take_gradients(trip.cut, [each.clone() for each in trip.item.late[:-1]], trip.item.late[-1])
        return True

    def _send_sum(self, trip: _Trip) -> None:
        assert self._migration is not None
        load_gradients(trip.cut, trip.item.late[:-1], trip.item.late[-1])
        self._migration.mark_still(trip.item)

    def commit(self, engine: Any) -> None:
        """Puts the move into effect, after a batch that has ended on all ranks and before the update. Collective over
        all ranks. After an error on one rank no layer has moved on any rank, and the batch must fail: some of its
        gradients are on other ranks."""
        voyage, self._voyage = self._voyage, None
        if voyage is None or self._migration is None:
            return
        begun, module, migration = time.perf_counter(), engine.module, self._migration
        if voyage.failure:
            raise InvalidState(f"the move of layers could not start: {voyage.failure}")
        meeting, refusal, cause = voyage.meeting, None, None
        try:
            for trip in voyage.trips:
                if not trip.cut.comes and not trip.cut.has_sum:
                    load_gradients(trip.cut, trip.item.late[:-1], trip.item.late[-1])
            refusal = _changed(voyage.trips)
        except Exception as error:  # the other ranks learn this in commit
            refusal, cause = f"packing gradients failed: {type(error).__name__}: {error}. {_NONE_MOVED}", error
        try:
            migration.commit(refusal and f"{meeting.name} cannot move: {refusal}")
        except SluiceError as error:
            raise error from cause
        optimizer, sums = optimizer_parts.of_engine(engine), gradient_sums.of_optimizer(engine.optimizer)
        here = [trip for trip in voyage.trips if trip.cut.comes]

        def totals_of() -> dict[Any, torch.Tensor | None]:
            for trip in here:
                if not trip.cut.has_sum:
                    take_gradients(trip.cut, trip.item.late[:-1], trip.item.late[-1])
            totals = {parameter: sums.of(parameter) for parameter in module.parameters()}
            return {**totals, **{p: total for trip in here for p, total in zip(trip.cut.parameters, trip.cut.totals)}}

        totals = meeting.do("loading gradients", totals_of, _NONE_MOVED)
        kept = moving_layers.taken(optimizer, list(module.parameters()), meeting, _NONE_MOVED)
        built = {layer: function for trip in here for layer, function in zip(trip.cut.layers, trip.cut.functions)}
        arrived = {layer: content for trip in here for layer, content in trip.contents.items()}

        def put_sums() -> None:
            known = ((parameter, totals.get(parameter)) for parameter in module.parameters())  # frozen: none
            gradient_sums.of_optimizer(engine.optimizer).put({p: total for p, total in known if total is not None})

        put = moving_layers.put_in_force
        put(engine, voyage.parts, built, arrived, optimizer, kept, meeting, _NONE_MOVED, put_sums)
        self._note(voyage, migration.progress(), time.perf_counter() - begun)

    def _note(self, voyage: _LayerMove, progress: dict[str, Any], commit_s: float) -> None:
        cuts = [trip.cut for trip in voyage.trips]
        in_batch = sum(len(cut.layers) for cut in cuts if cut.ran_where_it_goes)
        self.num_in_batch += in_batch
        self.num_at_flush += sum(len(cut.layers) for cut in cuts) - in_batch
        self.num_sums_early += sum(len(cut.layers) for cut in cuts if cut.comes and cut.has_sum)
        self.exposed_s = commit_s + voyage.begin_s
        sizes = progress["leaving_bytes"], progress["hidden_bytes"]
        self.late_bytes = sizes[0] - sizes[1]
        trace.keep_move("layers", "the pipeline", voyage.begin_ns, len(voyage.moves), *sizes, commit_s)


def why_no_live_parts(module: Any, parts: Sequence[int]) -> str:
    """Returns why layers cannot move to this partition in one batch; "": they can. The same on all ranks."""
    bounds = stage_module.parts_of(module)
    for stage in range(len(bounds) - 1):
        if max(bounds[stage], parts[stage]) > min(bounds[stage + 1], parts[stage + 1]):
            return f"a layer would pass over stage {stage}: during a batch layers move to a neighbouring stage only"
    return ""


def _still(content: Content) -> Content:
    """Returns the part of a content that changes only in updates: all but gradients."""
    return {name: value for name, value in content.items() if not name.endswith(_GRADIENT)}


def _runs(module: Any, moves: Iterable[tuple[Move, Shipment]]) -> list[list[tuple[Move, Shipment]]]:
    """Returns the runs of layers that move across each cut of this stage, in order."""
    own = [pair for pair in moves if module.stage_id in (pair[0].source, pair[0].target)]
    return [list(run) for _, run in itertools.groupby(own, lambda pair: (pair[0].source, pair[0].target))]


def _trip(
    module: Any,
    run: Sequence[tuple[Move, Shipment]],
    functions: dict[int, Any],
    sums: ParameterSums,
) -> _Trip:
    """Returns this stage's end of the moves across a cut. Arriving layers get buffers."""
    layers, (first, shipment) = [move.layer for move, _ in run], run[0]
    cut = Cut(layers, first.source, first.target, module.stage_id, [functions[layer] for layer in layers], sums)
    contents = {move.layer: shipments.places(each) if cut.comes else each.content or {} for move, each in run}
    if cut.comes:
        for layer, function in zip(layers, cut.functions):
            stage_module.fill(function, contents[layer])
    members = [(name, value) for content in contents.values() for name, value in content.items()]
    tensors = [(moving_layers.is_kept(name), value) for name, value in members if isinstance(value, torch.Tensor)]
    needed = [value for is_kept, value in tensors if not is_kept]
    rest = [value for is_kept, value in tensors if is_kept]
    late = [torch.zeros(each.shape, dtype=sums.dtype_of(each)) for each in cut.parameters]
    late.append(torch.zeros(len(late), dtype=torch.uint8))
    peer = shipment.source if cut.comes else shipment.target
    kind = Arriving if cut.comes else Leaving
    own = [] if cut.comes else [(value, value._version) for value in needed + rest]
    return _Trip(cut, contents, kind(first.layer, peer, needed + rest, late), len(needed), own)


def _changed(trips: Sequence[_Trip]) -> str | None:
    for trip in trips:
        if any(tensor._version != version for tensor, version in trip.versions):
            first, last = trip.cut.layers[0], trip.cut.layers[-1]
            named = f"layer {first}" if first == last else f"one of the layers {first} to {last}"
            return f"a tensor of {named} was written while it moved to another stage"
    return None
