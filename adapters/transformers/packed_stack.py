# SPDX-License-Identifier: Apache-2.0
"""Represents stacked experts in 4 or 8 bits as one parameter, which has the shape and dtype of plain weights, and
contains their codes and scales.

PEFT, fully_shard, DTensor and the loader of transformers use few operations on a frozen parameter. Those work here on
codes and scales. All others would need the decoded weights and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sluice.adapters.torch import Format
from sluice.errors import Unsupported

_aten = torch.ops.aten
_ALIKE = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.empty_like.default,
    _aten.contiguous.default,
)
_ADDS = ("aten::add", "aten::add_", "aten::sub_")
REMEDY = 'only Sluice computes with them: load with experts_implementation="sluice", or without sluice.keep_quantised'


class PackedStack(torch.Tensor):
    """Has the weights of E experts.

    codes       [E, out, bytes] uint8 and
    scales      [E, ...], for each expert as in sluice/weights.h
    form        their format
    transposed  whether the tensor's shape is [E, in, out] instead of [E, out, in]
    """

    codes: torch.Tensor
    scales: torch.Tensor
    form: Format
    transposed: bool

    @staticmethod
    def __new__(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        form: Format,
        transposed: bool,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
    ) -> PackedStack:
        """Makes the tensor. shape: the tensor's shape, if it is not the stack's own."""
        if shape is None:
            count, rows, columns = codes.shape[0], codes.shape[1], codes.shape[2] * 8 // form.bits
            shape = (count, columns, rows) if transposed else (count, rows, columns)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device, requires_grad=False)

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        form: Format,
        transposed: bool,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
    ) -> None:
        self.codes, self.scales, self.form, self.transposed = codes, scales, form, transposed

    def like(
        self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None, shape: Any = None
    ) -> PackedStack:
        """Returns a stack of other codes and scales in the same form."""
        return PackedStack(codes, scales, self.form, self.transposed, dtype or self.dtype, shape)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], **how: Any) -> PackedStack:
        """Returns a stack with `function` applied to codes and to scales."""
        return self.like(function(self.codes), function(self.scales), **how)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedStack({list(self.shape)} in {self.form.name}, shown as {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PackedStack, (self.codes, self.scales, self.form, self.transposed, self.dtype, tuple(self.shape))

    # ---- FSDP2: a group of one rank gathers the first tensor alone, so both are gathered as one ----

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], Any]:
        """Returns bytes [E, ...] of codes and scales. Each part ends at a multiple of 4 bytes, for f32 scales."""
        parts: list[torch.Tensor] = []
        for part in (self.codes.flatten(1), self.scales.flatten(1).view(torch.uint8)):
            parts += [part, part.new_zeros(part.shape[0], -part.shape[1] % 4)]
        return (torch.cat(parts, 1),), self.dtype

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor], metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """Returns views into the gathered bytes."""
        (data,) = outputs
        if out is not None:  # its memory was freed, and is filled again in place
            return None
        sizes = [math.prod(each.shape[1:]) * each.element_size() for each in (self.codes, self.scales)]
        begin = sizes[0] + -sizes[0] % 4
        codes = data[:, : sizes[0]].unflatten(1, self.codes.shape[1:])
        scales = data[:, begin : begin + sizes[1]].view(self.scales.dtype).unflatten(1, self.scales.shape[1:])
        return self.like(codes, scales, metadata if param_dtype is None else param_dtype), (data,)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self = args[0][0] if isinstance(args[0], (tuple, list)) else args[0]
        if isinstance(self, PackedStack):
            found = _of_both(self, function, args, kwargs)
            if found is not None:
                return found
        stack = next((each for each in args if isinstance(each, PackedStack)), self)
        what = f"{stack.form.name} experts {list(stack.shape)}" if isinstance(stack, PackedStack) else "packed experts"
        if function._schema.name in _ADDS:
            raise Unsupported(
                f"{function._schema.name} on {what}: a sum does not fit their format, so no adapter can be merged into "
                "them: keep the adapter next to them, or merge into a checkpoint with `sluice merge`"
            )
        raise Unsupported(f"{function._schema.name} on {what}: {REMEDY}")


def _of_both(self: PackedStack, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs the operation on codes and on scales; None: it is not supported."""
    shape = tuple(self.shape)
    if function in _ALIKE:
        kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
        return self.map(lambda part: function(part, **kwargs), shape=shape)
    if function is _aten.split.Tensor and (len(args) < 3 or args[2] == 0):
        return [self.like(*pair) for pair in zip(self.codes.split(args[1]), self.scales.split(args[1]))]
    if function is _aten.slice.Tensor and (len(args) < 2 or args[1] == 0):
        return self.map(lambda part: function(part, *args[1:]))
    if function in (_aten.new_zeros.default, _aten.new_empty.default) and tuple(args[1][1:]) == shape[1:]:
        return self.map(lambda part: part.new_zeros((args[1][0], *part.shape[1:]), device=kwargs.get("device")))
    if function is _aten.copy_.default and isinstance(args[1], PackedStack):
        self.codes.copy_(args[1].codes)
        self.scales.copy_(args[1].scales)
        return self
    if function in (_aten.view.default, _aten._unsafe_view.default, _aten.as_strided.default):
        wanted = tuple(args[1])
        if wanted in ((-1,), (self.numel(),)):
            return self.map(lambda part: part, shape=(self.numel(),))
        own = self.map(lambda part: part)
        return own if wanted == tuple(own.shape) else None
    if function is _aten._to_copy.default:
        how = {key: kwargs[key] for key in ("device", "non_blocking") if kwargs.get(key) is not None}
        return self.map(lambda part: part.to(copy=True, **how), dtype=kwargs.get("dtype"))
    if function is _aten.is_pinned.default:
        return False
    if function is _aten.equal.default and isinstance(args[1], PackedStack):
        return torch.equal(self.codes, args[1].codes) and torch.equal(self.scales, args[1].scales)
    if function is _aten.cat.default and (len(args) < 2 or args[1] == 0):
        if all(isinstance(each, PackedStack) and each.form == self.form for each in args[0]):
            return self.like(*(torch.cat([getattr(each, name) for each in args[0]]) for name in ("codes", "scales")))
    if function.namespace == "_c10d_functional":  # all_gather_into_tensor, wait_tensor
        return self.map(lambda part: function(part, *args[1:]))
    return None


def local(parameter: Any) -> Any:
    """Returns the local part of a parameter that may be a DTensor."""
    return getattr(parameter, "_local_tensor", parameter)


def is_packed(tensor: Any) -> bool:
    return isinstance(tensor, PackedStack)


def form_of(tensors: Sequence[Any]) -> Format | None:
    """Returns the format of a module's stacked tensors, which is the same for up and down; None: they are plain."""
    return tensors[0].form if is_packed(tensors[0]) else None


def flat(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Returns the tensors for a StackedLayer: codes in place of packed stacks, and their scales last."""
    scales = [each.scales for each in tensors if is_packed(each)]
    return [each.codes if is_packed(each) else each for each in tensors] + scales
