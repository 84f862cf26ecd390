# SPDX-License-Identifier: Apache-2.0
"""Defines the state that a forward shares with its backward, the callback that allocates its saved buffers, and the C
structs of a pass."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..._library import load
from .accumulate import Sums
from .descriptors import Descriptors
from .experts import ExpertRun
from .lora import FactorFrame, Lora
from .placement import Placement


def is_repeated() -> bool:
    """Returns whether autograd is running this forward: activation checkpointing then repeats one that ran before."""
    return bool(torch._C._current_graph_task_id() != -1)


class Pass:
    """Has the state of one call of a layer, from its forward to its backward.

    record  whether a backward may follow
    counts  with callback experts, how many parameters each local expert has in the flat list
    lora    the adapters of this call, whose factors are the last of the flat list; None: it has none
    sums    the existing gradients that a backward adds to, while it runs; None: it makes fresh ones
    """

    def __init__(
        self,
        layer: Any,
        record: bool,
        flat: Sequence[torch.Tensor],
        counts: Sequence[int],
        lora: Lora | None = None,
    ) -> None:
        self.layer = layer
        # Only names and scales: save_for_backward keeps the tensors.
        self.lora = lora
        self.num_factors = 0 if lora is None else len(lora.factors)
        self.record = record
        self.counts = counts
        self.saved: list[torch.Tensor] = []
        self.sums: Sums | None = None
        self.error: BaseException | None = None
        self.experts: ExpertRun | None = None
        if layer.experts is not None:
            parameters = layer.experts.read_for(self.by_expert(flat)) if record else []
            again = record and layer.runs_experts_again
            experts = layer.experts.as_bound() if again else layer.experts
            placement = layer.context.placement
            self.experts = ExpertRun(experts, placement, layer.dtype, layer.model_width, parameters, again)

    def by_expert(self, flat: Sequence[Any]) -> list[list[Any]]:
        """Splits a flat list by expert."""
        items = iter(flat)
        return [[next(items) for _ in range(count)] for count in self.counts]

    def own(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Returns the part of a flat list that belongs to the layer's own parameters."""
        return flat[: len(flat) - self.num_factors] if self.num_factors else flat

    def factors(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Returns the part of a flat list that belongs to factors of adapters."""
        return flat[len(flat) - self.num_factors :]

    def cause(self) -> BaseException | None:
        """Returns the exception that a callback could not raise through C, if there was one."""
        return self.error or (self.experts.error if self.experts is not None else None)


class _Block:
    """Owns memory that counts as the context's, and may outlive the context."""

    def __init__(self, context: Any, which: int, size: int) -> None:
        library = load()
        out = library.ffi.new("void **")
        library.check(library.lib.sluice_context_allocate_saved(context.handle, which, size, out))
        self._context, self._size, self.data = context, size, out[0]

    def __del__(self) -> None:
        data = getattr(self, "data", None)
        if data is None:
            return
        library = load()
        handle = self._context.handle if self._context.alive else library.ffi.NULL
        library.lib.sluice_context_free(handle, data, self._size)


def _buffer(context: Any, which: int, size: int) -> torch.Tensor:
    """Returns bytes of the context for a saved buffer, as a tensor that torch may keep for any time."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    block = _Block(context, which, size)
    raw = (ctypes.c_uint8 * size).from_address(int(load().ffi.cast("uintptr_t", block.data)))
    raw._sluice_block = block  # the tensor keeps `raw`, and `raw` the block
    return torch.frombuffer(raw, dtype=torch.uint8)


@functools.cache
def save_callback() -> Any:
    """Returns the callback that allocates a step's saved buffers as torch's tensors. Made once for all layers."""
    ffi = load().ffi

    @ffi.callback("void *(void *, int32_t, uint64_t)")
    def save(user: Any, which: int, size: int) -> Any:
        work = ffi.from_handle(user)
        try:
            buffer = work.layer.context.placement.saved_bytes(which, size)
            if buffer is None:
                buffer = _buffer(work.layer.context, which, size)
            while len(work.saved) <= which:
                work.saved.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
            work.saved[which] = buffer
            return ffi.cast("void *", buffer.data_ptr())
        except BaseException as error:
            work.error = error
            return ffi.NULL

    return save


SAVED_COUNT = 5


class Frame:
    """Has the C structs of one pass. A layer reuses them, as most of their fields do not change."""

    def __init__(self, placement: Placement, num_experts: int, members: Sequence[str], has_lora: bool = False) -> None:
        """num_experts: local experts; members: of each (MoeLayer.members); has_lora: calls may have adapters."""
        library = load()
        ffi = library.ffi
        self.tensors = Descriptors(5, placement)
        self.forward_args = library.new("moe_forward_args")
        self.backward_args = library.new("moe_backward_args")
        self.step = ffi.new("sluice_step_t **")
        self.saved = ffi.new("void *[]", SAVED_COUNT)
        self.saved_bytes = ffi.new("uint64_t[]", SAVED_COUNT)
        self.params, self.params_struct = _tensors(placement, num_experts, members)
        self.grads, self.grads_struct = _tensors(placement, num_experts, members)
        self.factors = FactorFrame(placement, num_experts) if has_lora else None
        self.callbacks = ffi.new("sluice_expert_callbacks_t *")
        self.callbacks.struct_size = ffi.sizeof(self.callbacks[0])
        self.run_handle: Any = None  # keeps the callbacks' `user` alive
        self.stack_key: Any = None  # the tensors that `params` describes now, in a layer with stacked parameters


def _tensors(placement: Placement, num_experts: int, members: Sequence[str]) -> tuple[Descriptors, Any]:
    """Makes descriptors of all parameters, and the struct that points to them member by member."""
    ffi = load().ffi
    items = Descriptors(num_experts * len(members), placement)
    struct = ffi.new("sluice_expert_tensors_t *")
    struct.struct_size = ffi.sizeof(struct[0])
    for number, name in enumerate(members):
        setattr(struct, name, items.pointer(number * num_experts))
    return items, struct
