# SPDX-License-Identifier: Apache-2.0
"""Makes the C structs of one pass. A layer reuses them from pass to pass, as most of their fields do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._library import load
from .descriptors import Descriptors
from .lora import FactorFrame
from .placement import Placement

SAVED_COUNT = 5


class Frame:
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
