"""The C structs of one pass, kept by a layer from pass to pass: most of what they say does not change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..._library import load
from .descriptors import Descriptors

if TYPE_CHECKING:
    from .layer import MoeLayer

SAVED_COUNT = 5


class Frame:
    def __init__(self, layer: MoeLayer) -> None:
        library = load()
        ffi = library.ffi
        self.tensors = Descriptors(5, layer.context.placement)
        self.forward_args = library.new("moe_forward_args")
        self.backward_args = library.new("moe_backward_args")
        self.step = ffi.new("sluice_step_t **")
        self.saved = ffi.new("void *[]", SAVED_COUNT)
        self.saved_bytes = ffi.new("uint64_t[]", SAVED_COUNT)
        self.params, self.params_struct = self._members(layer)
        self.grads, self.grads_struct = self._members(layer)
        self.callbacks = ffi.new("sluice_expert_callbacks_t *")
        self.callbacks.struct_size = ffi.sizeof(self.callbacks[0])
        self.run_handle: Any = None  # keeps the callbacks' `user` alive
        self.stack_key: Any = None  # what `params` describes, of a layer with stacked parameters

    @staticmethod
    def _members(layer: MoeLayer) -> tuple[Descriptors, Any]:
        ffi = load().ffi
        experts = layer.num_local_experts
        items = Descriptors(experts * len(layer.members), layer.context.placement)
        struct = ffi.new("sluice_expert_tensors_t *")
        struct.struct_size = ffi.sizeof(struct[0])
        for number, name in enumerate(layer.members):
            setattr(struct, name, items.pointer(number * experts))
        return items, struct
