# SPDX-License-Identifier: Apache-2.0
"""Runs one Mixture-of-Experts layer: writes its configuration for the library, and makes its passes.

A pass is a call into the library on the calling thread. It is collective if the group has several ranks. A rank with an
error therefore still makes the call and reports the error in it, so that the other ranks fail too and do not wait.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ... import routing, trace
from ..._library import load
from ...errors import InvalidArgument, InvalidState, OverCapacity, SluiceError, Unsupported
from ._native import generation, interruptible
from .accumulate import CHOICES, Sums, existing_grads
from .context import Context, release
from .experts import CallbackExperts, callbacks
from .function import run_layer, watcher
from .gradient_pool import default_limit, empty_gradient
from .layer_config import MoeConfig, fill_config, member_names
from .layer_plan import LayerPlan
from .lora import Lora, without_tensors
from .lora import check as check_lora
from .options import again_by_chunk
from .passes import SAVED_COUNT, Frame, Pass, is_repeated, save_callback

_INVALID = -1
_OVERWRITE = 0
_ACCUMULATE = 1
_BACKWARD_BOTH = 3
_REPORTED = ("num_forwards", "num_routes", "num_dropped", "most_rows", "most_expert")
_NOTHING = torch.empty(0, device="cpu")  # passed where no gradient is needed


class Placement(NamedTuple):
    """Has the rank that owns each expert, the expert's slot there, and the epoch of the placement."""

    expert_rank: tuple[int, ...]
    expert_slot: tuple[int, ...]
    epoch: int


class MoeLayer:
    """Computes a layer. Call it with tokens [T, M], expert ids [T, K], route weights [T, K] f32 and parameters.

    parameters: per local expert a dict of `members` (w1 [H, M], w2 [M, H], gated also w3, bias also b1, b2, b3), of any
    strides, one of them 1. Left out with callback experts.
    leaves_out_frozen: True: backward computes gradients of parameters that require one; False: of all, or of none.
    """

    leaves_out_frozen = False

    def __init__(self, context: Context, config: MoeConfig, experts: CallbackExperts | None = None) -> None:
        """experts: modules that are called in place of the library's own experts."""
        library = load()
        self.context, self.config, self.experts = context, config, experts
        self.model_width, self.dtype, self.layer_id = config.model_width, config.dtype, config.layer_id
        self.num_experts, self.top_k = config.num_experts, config.top_k
        # The width of slot T_M, to which modules write their outputs.
        self.hidden_width = config.hidden_width if experts is None else config.model_width
        again = [] if experts is None or config.policy is None else again_by_chunk(config.policy[1])
        self.runs_experts_again = any(again)
        if self.runs_experts_again and not all(again):
            raise Unsupported("experts that run as modules are recomputed in every chunk or in none")
        self.accumulate = config.accumulate or CHOICES[0]
        if self.accumulate not in CHOICES:
            raise InvalidArgument(f"accumulate {self.accumulate!r} is unknown: use one of {', '.join(CHOICES)}")
        # Bytes that may be kept for later gradients. 0 under a budget unless requested: the budget does not count them.
        self.gradient_pool = config.gradient_pool
        if self.gradient_pool is None:
            self.gradient_pool = 0 if context.is_budgeted else default_limit()
        self.plan: LayerPlan | None = None  # set by use_plan
        self.received_rows: int | None = None  # in the last forward, while a trace is kept
        self._has_told_fallback = False
        self.is_packed = config.weight_format != "plain"
        self.members = (
            () if experts is not None else member_names(config.gated, config.bias, config.interleaved, self.is_packed)
        )
        self._collective = context.ep_group.world_size > 1
        self.turn: Any = contextlib.nullcontext()  # held in a backward; see CastingLayer
        given = library.new("moe_config")
        kept = fill_config(given, config)
        given.callback_experts = int(experts is not None)
        owners, slots = self._list("expert_rank", config.expert_rank), self._list("expert_slot", config.expert_slot)
        given.expert_rank, given.expert_slot = owners, slots
        priced_width = config.hidden_width if experts is None else 4 * config.model_width
        out = library.ffi.new("sluice_moe_t **")
        with context.lock:  # another thread may be in a forward of another layer of this context
            context.tune_for(config.model_width, priced_width, given.dtype)
            library.check(library.lib.sluice_moe_create(context.handle, given, out))
        del kept, owners, slots  # copied
        self._handle = out[0]
        self._finalizer = weakref.finalize(self, release, library.lib.sluice_moe_destroy, out[0], generation())
        self._finalizer.atexit = False
        context.adopt(self)
        self._count_experts()
        if experts is not None and len(experts.modules) != self.num_local_experts:
            self.close()
            raise InvalidArgument(f"{len(experts.modules)} modules for {self.num_local_experts} local experts")

    def _count_experts(self) -> None:
        """Sets what depends on the number of experts on this rank."""
        self.num_local_experts: int = load().lib.sluice_moe_num_local_experts(self._handle)
        self._frames: list[Frame] = []
        # The library's arrays are ordered by member, torch's list of inputs by expert.
        experts_range = range(self.num_local_experts)
        self._places = [n * len(experts_range) + e for e in experts_range for n in range(len(self.members))]
        self._names = [f"{name} of local expert {e}" for e in experts_range for name in self.members]

    def _list(self, name: str, numbers: Sequence[int] | None) -> Any:
        """Returns a C array of one number for each expert; None: NULL."""
        ffi = load().ffi
        if numbers is None:
            return ffi.NULL
        if len(numbers) != self.num_experts:
            raise InvalidArgument(f"{name} names {len(numbers)} experts, the layer has {self.num_experts}")
        return ffi.new("int32_t[]", [int(number) for number in numbers])

    @property
    def handle(self) -> Any:
        if not self.context.alive or not self._finalizer.alive:
            self.context.handle  # noqa: B018  (raises the error with the reason)
            raise InvalidState("this layer has been closed")
        return self._handle

    def smallest_budget(self, num_tokens: int) -> int:
        """Returns the smallest memory_budget of the context under which forwards of `num_tokens` tokens have a plan."""
        library = load()
        out = library.ffi.new("uint64_t *")
        library.check(library.lib.sluice_moe_smallest_budget(self.handle, num_tokens, out))
        return int(out[0])

    def use_plan(self, plan: LayerPlan | None) -> None:
        """Runs passes under the plan from now on; None: without a plan. Every rank must use an equal plan, else the
        next forward raises Mismatch on all of them. Not while forwards under another plan wait for their backward. Not
        collective.

        The first plan of the context's layers frees memory that passes without a plan have left.
        """
        library = load()
        handle = library.ffi.NULL if plan is None else plan.handle
        library.check(library.lib.sluice_moe_use_plan(self.handle, handle))
        self.plan = plan

    def placement(self) -> Placement:
        """Returns the current placement of the layer's experts."""
        library = load()
        ffi = library.ffi
        ranks, slots = (ffi.new("int32_t[]", self.num_experts) for _ in range(2))
        epoch = ffi.new("uint64_t *")
        library.check(library.lib.sluice_moe_get_placement(self.handle, ranks, slots, epoch))
        return Placement(tuple(ranks), tuple(slots), int(epoch[0]))

    def loads(self) -> tuple[list[int], list[int]]:
        """Returns rows of all forwards so far: this rank's tokens by expert, and the rows received by each rank. The
        latter come from headers, end with the training forward before the newest one, and are equal on all ranks.
        Nothing is sent.
        """
        library = load()
        rows, ranks = (library.ffi.new("int64_t[]", n) for n in (self.num_experts, self.context.ep_group.world_size))
        library.check(library.lib.sluice_moe_get_loads(self.handle, rows, ranks, library.ffi.NULL))
        return list(rows), list(ranks)

    def replace_experts(self, expert_rank: Sequence[int], expert_slot: Sequence[int], epoch: int | None = None) -> None:
        """Places expert e on rank expert_rank[e] of the group, from the next call on, in slot expert_slot[e] there: its
        index among the parameters that are passed. The caller moves parameters and states. Call it between steps:
        InvalidState while a forward waits for its backward, or its graph is retained. epoch: above the present one;
        None: the next.

        Collective. If the ranks give different lists, Mismatch names ranks and entry. After an error nothing has
        changed. If the experts are modules, each rank keeps its number of experts (else Unsupported).
        """
        library = load()
        placement = library.new("expert_placement")
        before = self.placement()
        error: SluiceError | None = None
        try:
            lists = self._list("expert_rank", expert_rank), self._list("expert_slot", expert_slot)
            if self.experts is not None and sorted(expert_rank) != sorted(before.expert_rank):
                raise Unsupported("a placement must keep the number of experts on each rank if experts are modules")
            placement.expert_rank, placement.expert_slot = lists
            placement.epoch = before.epoch + 1 if epoch is None else epoch
        except SluiceError as wrong:
            error = wrong  # the call below has no lists, so that the other ranks fail too
        status = self._call(library.lib.sluice_moe_replace_experts, self.handle, placement)
        if error is not None:
            raise error
        library.check(status)
        self._count_experts()

    def take_capacity_report(self) -> dict[str, int]:
        """Counts routes of all forwards since the last call, launches of a CUDA graph included, and the routes that
        were dropped for the capacity (`num_dropped`). `most_rows` is the capacity that drops none. On CUDA it waits for
        the stream. Not collective. InvalidArgument if an id named no expert."""
        library = load()
        report = library.new("capacity_report")
        stream = self.context.placement.stream()
        try:
            library.check(library.lib.sluice_moe_take_capacity_report(self.handle, stream, report))
        except OverCapacity:
            pass  # the report has the numbers
        return {name: int(getattr(report, name)) for name in _REPORTED}

    def close(self) -> None:
        self._finalizer()

    def __call__(
        self,
        tokens: torch.Tensor,
        expert_ids: torch.Tensor,
        route_weights: torch.Tensor,
        params: Sequence[dict[str, torch.Tensor]] | None = None,
        lora: Lora | None = None,
    ) -> torch.Tensor:
        """Returns the layer's output [T, M]. Collective over the group. lora: adapters (lora.py), for a layer with
        lora_rank; their factors get gradients, and the weights get none."""
        try:
            watched_by = watcher()
            if watched_by is not None:
                raise Unsupported(f"{watched_by} cannot trace the C library that computes this layer")
            flat, counts = self._flatten(params)
            if lora is not None:
                check_lora(lora, self.config.lora_rank, self.num_local_experts)
                flat = [*flat, *lora.factors.values()]
            if tokens.dim() == 2 and tokens.stride(1) != 1:
                tokens = tokens.contiguous()
        except Exception as error:
            self.refuse(error)
            raise
        if lora is None:
            return run_layer(self, tokens, expert_ids, route_weights, flat, counts)
        return run_layer(self, tokens, expert_ids, route_weights, flat, counts, without_tensors(lora))

    def _flatten(self, params: Sequence[dict[str, torch.Tensor]] | None) -> tuple[list[torch.Tensor], list[int]]:
        """Returns all parameters, expert by expert, in autograd's order, and how many each expert has."""
        if self.experts is not None:
            own = self.experts.parameters()
            return [tensor for tensors in own for tensor in tensors], [len(tensors) for tensors in own]
        self._check_count(params)
        missing = [name for expert in params for name in self.members if name not in expert]
        if missing:
            raise InvalidArgument(f"an expert lacks {missing[0]}; this layer's members are {', '.join(self.members)}")
        return [expert[name] for expert in params for name in self.members], [len(self.members)] * len(params)

    def _check_count(self, params: Sequence[Any] | None) -> None:
        if params is None or len(params) != self.num_local_experts:
            count = "no" if params is None else len(params)
            raise InvalidArgument(f"{count} parameter sets for {self.num_local_experts} local experts")

    # ---- passes, called by function.py ----

    def sums_for(self, ctx: Any, work: Pass, reads: Sequence[torch.Tensor]) -> Sums | None:
        """Returns the existing gradients to which the next backward adds; None: the backward makes new ones.

        ctx    of the autograd node
        reads  tensors that the backward reads, the parameters last
        """
        return existing_grads(ctx, work, reads)

    def forward_pass(
        self,
        work: Pass,
        tokens: torch.Tensor,
        expert_ids: torch.Tensor,
        route_weights: torch.Tensor,
        flat: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Runs forward; the buffers it saves are in `work.saved` afterwards."""
        library = load()
        ffi, lib = library.ffi, library.lib
        moe, placement = self.handle, self.context.placement
        frame = self._frames.pop() if self._frames else self._new_frame()
        try:
            if tokens.dim() != 2 or tokens.shape[1] != self.model_width:
                raise InvalidArgument(f"tokens have shape {list(tokens.shape)}, not [T, {self.model_width}]")
            out = torch.empty(tokens.shape, dtype=tokens.dtype, device=placement.device)
            args = frame.forward_args
            args.tokens = frame.tensors.fill(0, tokens, "tokens")
            args.expert_ids = frame.tensors.fill(1, expert_ids, "expert_ids")
            args.route_weights = frame.tensors.fill(2, route_weights, "route_weights")
            args.out_tokens = frame.tensors.fill(3, out, "the output")
            user = ffi.new_handle(work)
            self._fill_experts(frame, args, work, work.own(flat))
            self._fill_factors(frame, work, flat)
            args.save = save_callback()
            args.save_user = user
            args.save_is_counted = int(not placement.is_cuda)
            args.needs_backward = int(work.record)
            args.repeats = int(is_repeated())
        except Exception as error:
            self.refuse(error)
            raise
        frame.step[0] = ffi.NULL
        out_step = frame.step if work.record else ffi.NULL
        status = self._call(lib.sluice_moe_forward, moe, args, placement.stream(), out_step)
        placement.keep(work.saved)
        if status == 0 and work.record and trace.recording():
            self._note_rows(frame.step[0])
        lib.sluice_step_drop(frame.step[0])  # backward rebuilds it from the saved buffers
        if self.context.is_budgeted and work.record and status == 0 and self.context.has_fallen_back():
            self._tell_fallback()
        error = self._error(status, work)
        self._frames.append(frame)
        if error is not None:
            raise error from work.cause()
        return out

    def backward_pass(
        self,
        work: Pass,
        tokens: torch.Tensor,
        route_weights: torch.Tensor,
        flat: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        grad_out: torch.Tensor,
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Returns gradients of tokens, route weights and each of `flat`; None if not needed or in `work.sums`."""
        library = load()
        ffi, lib = library.ffi, library.lib
        moe, placement = self.handle, self.context.placement
        frame = self._frames.pop() if self._frames else self._new_frame()
        work.error = None
        try:
            if grad_out.stride(1) != 1:
                grad_out = grad_out.contiguous()
            device = placement.device
            grad_tokens = torch.empty(tokens.shape, dtype=tokens.dtype, device=device) if needs[0] else None
            grad_weights = torch.empty(route_weights.shape, dtype=torch.float32, device=device) if needs[1] else None
            args = frame.backward_args
            args.tokens = frame.tensors.fill(0, tokens, "tokens")
            args.route_weights = frame.tensors.fill(1, route_weights, "route_weights")
            args.grad_out = frame.tensors.fill(2, grad_out, "the output's gradient")
            args.grad_tokens = ffi.NULL if grad_tokens is None else frame.tensors.fill(3, grad_tokens, "a gradient")
            args.grad_route_weights = (
                ffi.NULL if grad_weights is None else frame.tensors.fill(4, grad_weights, "a gradient")
            )
            self._fill_experts(frame, args, work, work.own(flat))
            self._fill_factors(frame, work, flat)
            grads = self._fill_all_grads(frame, args, work, flat, needs[2:])
            args.grad_mode = _OVERWRITE if work.sums is None else _ACCUMULATE
            args.parts = _BACKWARD_BOTH
            args.may_reuse_saved = int(not _graph_is_kept())
            kept = [placement.bring(which, buffer) for which, buffer in enumerate(saved)]
            for index in range(SAVED_COUNT):
                buffer = kept[index] if index < len(kept) else _NOTHING
                frame.saved[index] = ffi.cast("void *", buffer.data_ptr())
                frame.saved_bytes[index] = buffer.numel()
            library.check(lib.sluice_step_restore(moe, frame.saved, frame.saved_bytes, frame.step))
            if routing.active:
                routing.note(self, frame.step[0], library)
        except Exception as error:
            self.refuse(error, backward=True)
            raise
        if work.sums is not None:
            increment_version(work.sums.owners)  # a node that saved one of them sees that it has changed
        status = self._call(lib.sluice_moe_backward, moe, frame.step[0], args, placement.stream())
        placement.keep(kept)
        lib.sluice_step_drop(frame.step[0])
        error = self._error(status, work)
        self._frames.append(frame)
        if error is not None:
            raise error from work.cause()
        if work.experts is not None:
            grads = self._callback_grads(work, needs[2:])
        if work.sums is not None:
            self.context.passes_in_place += 1
            return [grad_tokens, grad_weights, *(work.sums.stand_ins or [None] * len(flat))]
        wanted = [grad if need else None for grad, need in zip(grads, needs[2:])]
        return [grad_tokens, grad_weights, *wanted]

    def _new_frame(self) -> Frame:
        return Frame(self.context.placement, self.num_local_experts, self.members, self.config.lora_rank > 0)

    def _fill_factors(self, frame: Frame, work: Pass, flat: Sequence[torch.Tensor]) -> None:
        if frame.factors is not None:
            frame.factors.fill(frame.params_struct, work.lora, work.factors(flat))

    def _fill_experts(self, frame: Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor]) -> None:
        ffi = load().ffi
        if work.experts is None:
            frame.params.fill_all(flat, self._places, self._names)
            args.params = frame.params_struct
            return
        frame.run_handle = ffi.new_handle(work.experts)
        frame.callbacks.user = frame.run_handle
        frame.callbacks.forward, frame.callbacks.backward = callbacks()
        args.callbacks = frame.callbacks

    def _fill_grads(
        self, frame: Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Describes the gradients that the pass writes or adds to; none with callback experts or if not needed."""
        args.grad_params = load().ffi.NULL
        if work.experts is not None:
            work.experts.begin_backward(work.by_expert(needs))
            return []
        if not any(needs):
            return [_NOTHING] * len(flat)
        # Existing gradients to add to, or fresh memory, which torch may keep as `.grad` without a copy.
        grads = [self._empty(tensor) for tensor in flat] if work.sums is None else work.sums.into
        frame.grads.fill_all(grads, self._places, self._names)
        args.grad_params = frame.grads_struct
        return grads

    def _fill_all_grads(
        self, frame: Frame, args: Any, work: Pass, flat: Sequence[torch.Tensor], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Calls _fill_grads, and adds gradients of factors, which are contiguous for factors of any strides."""
        if frame.factors is None:
            return self._fill_grads(frame, args, work, flat, needs)
        struct, own = frame.grads_struct, work.own(needs)
        for number, name in enumerate(self.members):
            setattr(struct, name, frame.grads.pointer(number * self.num_local_experts) if any(own) else load().ffi.NULL)
        grads = self._fill_grads(frame, args, work, work.own(flat), own)
        into = [
            torch.empty(factor.shape, dtype=factor.dtype, device=factor.device) if need else None
            for factor, need in zip(work.factors(flat), work.factors(needs))
        ]
        frame.factors.fill_grads(struct, () if work.lora is None else tuple(work.lora.factors), into)
        if any(needs):
            args.grad_params = struct
        return [*grads, *into]

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return empty_gradient(like, self.gradient_pool)

    def _callback_grads(self, work: Pass, needs: Sequence[bool]) -> list[torch.Tensor]:
        given = iter([grad for grads in work.experts.take_grads() for grad in grads])
        return [next(given) if need else _NOTHING for need in needs]

    def _tell_fallback(self) -> None:
        """Warns once, on the group's first rank, that chunks do not fit, which makes passes slower."""
        is_new, self._has_told_fallback = not self._has_told_fallback, True
        if is_new and self.context.ep_group.rank == 0:
            warnings.warn(
                f"sluice: layer {self.layer_id}: routing gives a rank more rows than memory_budget keeps, so chunks "
                "that do not fit are sent and computed again in backward, which is slower and has the same results. "
                "A larger memory_budget or a more even routing avoids it; num_fallback_chunks of sluice.stats "
                "counts them",
                stacklevel=2,
            )

    def _note_rows(self, step: Any) -> None:
        library = load()
        rows = library.ffi.new("int64_t[]", max(1, self.num_local_experts))
        if library.lib.sluice_step_info(step, library.ffi.NULL, rows) == 0:
            self.received_rows = sum(rows)
            self.context.layer_facts[str(self.layer_id)] = trace.facts_of(self)

    def _call(self, function: Any, *arguments: Any) -> int:
        context = self.context
        context.calls += 1
        try:
            if not self._collective:
                return function(*arguments)
            with interruptible():
                return function(*arguments)
        finally:
            context.calls -= 1

    def _error(self, status: int, work: Pass) -> SluiceError | None:
        """Returns the error for a status. An interrupt inside a callback is raised as it is."""
        if status == 0:
            return None
        error = load().last_error(status)
        group = self.context.ep_group
        if self._collective and group.ranks != tuple(range(group.world_size)) and "rank " in error.message:
            error.message += f" (ranks are indices into the group of global ranks {', '.join(map(str, group.ranks))})"
        cause = work.cause()
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        return error

    def refuse(self, error: Exception, backward: bool = False) -> None:
        """Notifies the other ranks that this one cannot run the pass; the caller then raises `error`."""
        if not self._collective or not self.context.alive:
            return
        library = load()
        ffi, lib = library.ffi, library.lib
        text = ffi.new("char[]", str(error).encode()[:900])
        args = library.new("moe_backward_args" if backward else "moe_forward_args")
        args.local_status = error.status if isinstance(error, SluiceError) else _INVALID
        args.local_message = text
        stream = self.context.placement.stream()
        if backward:
            self._call(lib.sluice_moe_backward, self.handle, ffi.NULL, args, stream)
        else:
            self._call(lib.sluice_moe_forward, self.handle, args, stream, ffi.new("sluice_step_t **"))


def _graph_is_kept() -> bool:
    """Returns whether this backward retains the graph, so that another one may read the saved buffers again."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())
