# SPDX-License-Identifier: Apache-2.0
"""Runs pipelines over torch tensors: a rank's stages are callbacks that run when their inputs have arrived."""

from __future__ import annotations

import functools
import itertools
import json
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from ... import trace
from ..._library import load
from ...errors import InvalidState, SluiceError
from ._native import generation
from .context import release
from .group import EpGroup
from .options import values_of
from .placement import placement_of
from .stage_tensors import SentTensors, received

_OUTPUT, _INPUT_GRAD = 0, 1  # SLUICE_STAGE_*
_PLACEMENTS = {None: -1, "looped": 0, "v": 1}  # SLUICE_PIPELINE_*
_EXTERNAL = -13
_MOST_NOTE = 1024  # SLUICE_PIPELINE_MAX_NOTE
_numbers = itertools.count()  # of pipelines, for traces: all ranks make them in the same order
_UNREPORTED = ("peak_bytes", "planned_bytes", "most_message_bytes")  # of the stats: by byte counts, which no host gives


class Edge(NamedTuple):
    """Has a message between stages for one micro-batch. word: 64 bits of the host, sent with the tensors."""

    tensors: list[torch.Tensor]
    word: int = 0


class Stage(Protocol):
    """Defines a stage's callbacks, on the thread that runs the batch. An exception fails the batch on all ranks."""

    def load(self, micro_batch: int) -> None:
        """Loads data. Called on the first and on the last stage, before the forward, in the order of micro-batches."""
        ...

    def forward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        """Runs a forward. given: None on the first stage. The result goes to the next stage; None on the last one."""
        ...

    def backward(self, micro_batch: int, given: Edge | None) -> Edge | None:
        """Runs a backward. given: gradients of forward's result; None on the last stage. The result: gradients of
        forward's `given`; None on the first stage."""
        ...


class SplitBackwardStage(Stage, Protocol):
    """Defines a stage whose backward leaves weight gradients to a separate op."""

    def weight_grad(self, micro_batch: int) -> None:
        """Computes weight gradients, after the backward of the micro-batch, in the order of micro-batches."""
        ...


@dataclass(frozen=True)
class PipelineConfig:
    """Configures a pipeline. Equal on all of its ranks, except stage, replica and has_experts.

    policy          by its name in docs/pipeline.md
    partition       the layers of each stage, as the host's text; compared between ranks
    stage           this rank's index among the ranks of its replica
    num_virtual     v: virtual stages of each rank; each is a `Stage`
    placement       of virtual stages: "looped" (c on rank c mod p), "v" (down the ranks, then up); None: the policy's
    separate_wgrad  whether weight gradients are separate ops, of stages that are each a `SplitBackwardStage`; None:
                    the policy's
    replica         the index of this rank's replica of the pipeline, of num_replicas. Replicas end batches together
    has_experts     whether this stage's forwards and backwards run collectives with those of the other replicas
    in_flight       L on every stage; None: chosen
    """

    policy: str
    partition: str
    stage: int
    replica: int = 0
    num_replicas: int = 1
    has_experts: bool = False
    in_flight: int | None = None
    num_virtual: int = 1
    placement: str | None = None
    separate_wgrad: bool | None = None


class Pipeline:
    """Runs the stages of one rank of a pipeline, until `close` or until it is garbage.

    group    the ranks of all stages of all replicas, unshared: a communicator carries one pipeline

    The constructor is collective over the group. Tensors are in host memory.
    """

    def __init__(self, config: PipelineConfig, group: EpGroup) -> None:
        self.group = group
        self.calls = 0  # batches running now
        self._number = next(_numbers)
        self._note: Any = None  # (numbers, their exported buffer)
        self._run = _Run(group.world_size // config.num_replicas)
        self._user = load().ffi.new_handle(self._run)
        library = load()
        ffi = library.ffi
        settings = library.new("pipeline_config")
        policy = ffi.new("char[]", config.policy.encode())
        partition = ffi.new("char[]", config.partition.encode())
        experts = ffi.new("int32_t[]", [int(config.has_experts)] * config.num_virtual)
        settings.policy, settings.partition, settings.has_experts = policy, partition, experts
        settings.in_flight, settings.num_virtual = config.in_flight or 0, config.num_virtual
        settings.placement = _PLACEMENTS[config.placement]
        settings.separate_wgrad = -1 if config.separate_wgrad is None else int(config.separate_wgrad)
        settings.num_replicas, settings.replica, settings.stage = config.num_replicas, config.replica, config.stage
        out = ffi.new("sluice_pipeline_t **")
        comm = group.comm_on(placement_of(None)) or ffi.NULL
        self._check(library.lib.sluice_pipeline_create(settings, comm, _callbacks()[0], self._user, out))
        self._run.pipeline = out[0]
        self._generation = generation()
        destroy = library.lib.sluice_pipeline_destroy
        self._finalizer = weakref.finalize(self, release, destroy, out[0], self._generation)
        self._finalizer.atexit = False  # the group's own exit handler does it in the right order
        group.adopt(self)

    @property
    def alive(self) -> bool:
        return self._finalizer.alive and self._generation == generation()

    @property
    def handle(self) -> Any:
        """Returns the library's pointer, or raises an error that says why there is none."""
        if self._generation != generation():
            raise InvalidState("this pipeline was made before a fork: only the parent process may use it")
        if not self._finalizer.alive:
            raise InvalidState("this pipeline has been closed")
        return self._run.pipeline

    def run(self, stages: Stage | Sequence[Stage], num_micro_batches: int, forward_only: bool = False) -> None:
        """Runs a batch. If it fails on one rank, it fails on all. Collective over the group.

        stages   this rank's num_virtual stages in the order of the layers; a single one need not be in a list

        Raises the exception of this rank's stage; the other ranks raise an error with this rank and the message.
        """
        library = load()
        batch = library.new("pipeline_batch")
        batch.num_micro_batches, batch.forward_only = num_micro_batches, int(forward_only)
        handle = self.handle
        self._run.begin(tuple(stages) if isinstance(stages, Sequence) else (stages,))
        self.calls += 1
        try:
            status = library.lib.sluice_pipeline_run_batch(handle, batch)
            error = None if status == 0 else library.last_error(status)
        finally:
            self.calls -= 1
            cause = self._run.end()
        if cause is not None:
            raise cause
        if error is not None:
            raise self._placed(error)
        if not forward_only and trace.keeps_batches():
            predicted = self.timeline(predicted=True) if self.group.rank == 0 else []
            trace.keep_batch(self._number, list(self.group.ranks), self.timeline(), predicted)

    def stats(self) -> dict[str, Any]:
        """Returns times, messages and bytes so far, and the last batch's micro-batches in flight and policy ("" before
        the first batch). Not while a batch runs."""
        library = load()
        out = library.ffi.new("sluice_pipeline_stats_t *")
        out.struct_size = library.ffi.sizeof(out[0])
        library.check(library.lib.sluice_pipeline_get_stats(self.handle, out))
        policy = library.ffi.string(out.policy).decode() if out.policy else ""
        return {name: value for name, value in values_of(out).items() if name not in _UNREPORTED} | {"policy": policy}

    def set_note(self, numbers: array[float]) -> None:
        """Sets numbers that are sent with the end of each batch from now on, at most 1024, of type "d". They are read
        when this rank's last op has ended, so that a stage may write them. Not while a batch runs."""
        library = load()
        address = library.ffi.from_buffer("double[]", numbers)
        library.check(library.lib.sluice_pipeline_set_note(self.handle, address, len(numbers)))
        self._note = numbers, address  # an exported array cannot be resized

    def notes(self) -> list[list[float]]:
        """Returns the notes of each rank of the group in the newest batch, equal on all ranks. InvalidState if that
        batch has failed, or there was none. Not while a batch runs."""
        library, found = load(), []
        out, count = library.ffi.new("double[]", _MOST_NOTE), library.ffi.new("int32_t *")
        for rank in range(self.group.world_size):
            library.check(library.lib.sluice_pipeline_get_note(self.handle, rank, out, _MOST_NOTE, count))
            found.append(list(library.ffi.unpack(out, count[0])))
        return found

    def timeline(self, predicted: bool = False) -> list[dict[str, Any]]:
        """Returns ops of the last batch, in the format of `sluice.timeline.from_trace`: stage as rank, virtual stage as
        layer, micro-batch as chunk. They are this rank's ops as they ran; predicted: the ops of all stages, as
        simulated with the times of that batch. Not while a batch runs."""
        library = load()
        text = library.text(library.lib.sluice_pipeline_timeline_json, self.handle, int(predicted))
        return json.loads(text)["events"]

    def close(self) -> None:
        """Releases the pipeline; its group stays open. Not collective."""
        self._finalizer()

    def _check(self, status: int) -> None:
        if status != 0:
            raise self._placed(load().last_error(status))

    def _placed(self, error: SluiceError) -> SluiceError:
        """Returns the error, with the list of global ranks if ranks in its message are indices in that list."""
        ranks = self.group.ranks
        if ranks != tuple(range(len(ranks))) and "rank " in error.message:
            error.message += f" (ranks are indices into the pipeline of global ranks {', '.join(map(str, ranks))})"
        return error


class _Run:
    """Has the state that the callbacks of one pipeline share."""

    def __init__(self, num_ranks: int) -> None:
        self.pipeline: Any = None
        self.error: BaseException | None = None
        self._num_ranks = num_ranks  # of one replica
        self._stages: Sequence[Any] = ()
        self._sent: dict[tuple[int, int, int], SentTensors] = {}

    def begin(self, stages: Sequence[Stage]) -> None:
        self._stages, self.error = stages, None

    def end(self) -> BaseException | None:
        """Returns a callback's exception, and clears the rest of the state."""
        error, self._stages, self.error = self.error, (), None
        self._sent.clear()
        return error

    def stage(self, call: Any) -> Any:
        """Returns the stage of a call. Both placements put one virtual stage on each rank, then the next."""
        return self._stages[call.virtual_stage // self._num_ranks]

    def input(self, call: Any) -> Edge | None:
        return self._given(call.input, _OUTPUT, call.virtual_stage - 1, call.micro_batch)

    def output_grad(self, call: Any) -> Edge | None:
        return self._given(call.output_grad, _INPUT_GRAD, call.virtual_stage + 1, call.micro_batch)

    def _given(self, arrived: Any, which: int, sender: int, micro_batch: int) -> Edge | None:
        """Returns the message of virtual stage `sender`; if that stage is on this rank, its tensors."""
        if not arrived:
            return None
        if arrived.is_local:
            return Edge(self._sent[which, sender, micro_batch].as_given(), int(arrived.word))
        return Edge(received(self.pipeline, arrived), int(arrived.word))

    def hand_on(self, which: int, call: Any, edge: Edge | None, out: Any) -> None:
        """Passes the result of an op to the library."""
        if edge is None:
            return
        sent = SentTensors(edge.tensors)
        sent.describe_in(out, edge.word)
        self._sent[which, call.virtual_stage, call.micro_batch] = sent

    def released(self, which: int, virtual_stage: int, micro_batch: int) -> None:
        self._sent.pop((which, virtual_stage, micro_batch), None)


@functools.cache
def _callbacks() -> Any:
    """Returns the library's table of callbacks, and the callbacks. They are made once, because the same addresses serve
    every pipeline."""
    ffi = load().ffi

    def caught(kind: Any, error: BaseException, trace: Any) -> None:
        # Python's handler of Ctrl-C may raise before a callback's first line.
        given = trace.tb_frame.f_locals
        ffi.from_handle(given["user"]).error = error
        if "failure" in given:
            tell(given["failure"], error)

    def tell(failure: Any, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}".encode()[: ffi.sizeof(failure.message) - 1]
        ffi.memmove(failure.message, text + b"\0", len(text) + 1)
        failure.peer = -1

    def guarded(user: Any, failure: Any, action: Callable[[_Run], None]) -> int:
        run = ffi.from_handle(user)
        try:
            if run.error is not None:
                raise run.error
            action(run)
            return 0
        except BaseException as error:  # KeyboardInterrupt too: it must not pass through C
            run.error = error
            tell(failure, error)
            return error.status if isinstance(error, SluiceError) else _EXTERNAL

    def callback(signature: str, error: int | None = _EXTERNAL) -> Callable[[Any], Any]:
        return ffi.callback(signature, error=error, onerror=caught)

    @callback("sluice_status_t(void *, const sluice_stage_call_t *, sluice_host_failure_t *)")
    def load_micro_batch(user: Any, call: Any, failure: Any) -> int:
        return guarded(user, failure, lambda run: run.stage(call).load(call.micro_batch))

    results = "sluice_status_t(void *, const sluice_stage_call_t *, sluice_stage_tensors_t *, sluice_host_failure_t *)"

    @callback(results)
    def forward(user: Any, call: Any, out: Any, failure: Any) -> int:
        def action(run: _Run) -> None:
            run.hand_on(_OUTPUT, call, run.stage(call).forward(call.micro_batch, run.input(call)), out)

        return guarded(user, failure, action)

    @callback(results)
    def backward(user: Any, call: Any, out: Any, failure: Any) -> int:
        def action(run: _Run) -> None:
            run.hand_on(_INPUT_GRAD, call, run.stage(call).backward(call.micro_batch, run.output_grad(call)), out)

        return guarded(user, failure, action)

    @callback("sluice_status_t(void *, const sluice_stage_call_t *, sluice_host_failure_t *)")
    def weight_grad(user: Any, call: Any, failure: Any) -> int:
        return guarded(user, failure, lambda run: run.stage(call).weight_grad(call.micro_batch))

    @callback("void(void *, int32_t, int32_t, int32_t)", error=None)
    def released(user: Any, which: int, virtual_stage: int, micro_batch: int) -> None:
        ffi.from_handle(user).released(which, virtual_stage, micro_batch)

    @callback("int32_t(void *)", error=1)
    def is_interrupted(user: Any) -> int:
        # Python's own handler of Ctrl-C runs when this callback begins.
        return int(ffi.from_handle(user).error is not None)

    table = ffi.new("sluice_pipeline_callbacks_t *")
    table.struct_size = ffi.sizeof(table[0])
    table.load, table.forward, table.backward, table.weight_grad = load_micro_batch, forward, backward, weight_grad
    table.release, table.is_interrupted = released, is_interrupted
    return table, load_micro_batch, forward, backward, weight_grad, released, is_interrupted
