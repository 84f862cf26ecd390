# SPDX-License-Identifier: Apache-2.0
"""Runs a step of the library's optimizer over torch tensors, passed by address; tensors with gaps are copied."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._library import load
from .descriptors import config_dtype


class Entry(NamedTuple):
    """Describes a parameter of the step with the number `step`; moments are f32. Of DTensors the local shard is used.

    master: the parameter in f32, laid out as `param`. The step starts from it, and `param` becomes it, rounded.
    Moments are None if they lie in a file; grad is None if nothing is updated. is_filled: False if a file is read and
    the parameter stays as it is.
    """

    step: int
    param: torch.Tensor
    grad: torch.Tensor | None
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    master: torch.Tensor | None = None
    is_filled: bool = True


class OptimizerStep:
    """Has the arguments of one step, and keeps them alive while the library reads them."""

    def __init__(self, handle: Any) -> None:
        self._library, self._handle = load(), handle
        self._groups: list[Any] = []
        self._kept: list[Any] = []
        self._shapes: list[torch.Size] = []
        self.norm = 0.0  # of the gradients, as the last run returned it
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (tensor with gaps, dense copy that is updated)

    def add_group(self, numbers: Mapping[str, Any], entries: Sequence[Entry], comm: Any = None) -> None:
        """Adds a parameter group of torch's Adam, with its `numbers`; `bias_correction` is on by default.

        comm: of the ranks over which the group's gradients are summed, if these are not all ranks of the step.
        """
        library = self._library
        items = library.ffi.new("sluice_optimizer_tensor_t[]", max(len(entries), 1))
        for index, entry in enumerate(entries):
            self._describe(items[index], entry)
        group = library.new("optimizer_group")
        group.tensors, group.num_tensors = items, len(entries)
        group.lr, group.epsilon, group.weight_decay = float(numbers["lr"]), numbers["eps"], numbers["weight_decay"]
        group.beta1, group.beta2 = (float(beta) for beta in numbers["betas"])
        group.decoupled = bool(numbers["decoupled_weight_decay"])
        group.bias_correction = bool(numbers.get("bias_correction", True))
        group.maximize = bool(numbers["maximize"])
        if comm is not None:
            group.comm = comm
        self._groups.append(group)
        self._kept.append((items, entries))

    def _describe(self, item: Any, entry: Entry) -> None:
        ffi = self._library.ffi
        if self._is_plain(entry):
            param, grad, (void, floats) = entry.param, entry.grad, _pointers()
            self._shapes.append(param.shape)
            item.count, item.step, item.param_dtype = param.numel(), entry.step, config_dtype(param.dtype)
            item.grad_dtype, item.grad = config_dtype(grad.dtype), ffi.cast(void, grad.data_ptr())
            item.param = ffi.cast(void, param.data_ptr())
            item.exp_avg = ffi.cast(floats, entry.exp_avg.data_ptr())
            item.exp_avg_sq = ffi.cast(floats, entry.exp_avg_sq.data_ptr())
            return
        param = _local(entry.param)
        strides = _dense_strides(param)
        self._shapes.append(param.shape)
        item.count, item.step, item.param_dtype = param.numel(), entry.step, config_dtype(param.dtype)
        if entry.is_filled:
            item.param = ffi.cast("void *", self._dense(param, strides, True).data_ptr())
        if entry.grad is not None:
            laid = _laid_as(entry.param, entry.grad)
            self._kept.append(laid)
            grad = self._dense(_local(laid), strides, False)
            item.grad_dtype, item.grad = config_dtype(grad.dtype), ffi.cast("void *", grad.data_ptr())
        for name in ("master", "exp_avg", "exp_avg_sq"):
            state = getattr(entry, name)
            if state is not None:
                setattr(item, name, ffi.cast("float *", self._dense(_local(state), strides, True).data_ptr()))

    @staticmethod
    def _is_plain(entry: Entry) -> bool:
        """Returns whether there is no master and all tensors are contiguous, as for most parameters."""
        _, param, grad, mean, square, master, is_filled = entry
        if not is_filled or master is not None or grad is None or mean is None or square is None:
            return False
        if type(param) not in _PLAIN or type(grad) not in _PLAIN:
            return False
        return param.is_contiguous() and grad.is_contiguous() and mean.is_contiguous() and square.is_contiguous()

    def _dense(self, tensor: torch.Tensor, strides: tuple[int, ...], is_written: bool) -> torch.Tensor:
        """Returns the tensor if it has these dense strides; else a copy that has them."""
        if tensor.stride() == strides or tensor.numel() <= 1:
            return tensor
        copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
        self._kept.append(copy)
        if is_written:
            self._copies.append((tensor, copy))
        return copy

    def run(
        self,
        loss_scale: float = 1.0,
        check_finite: bool = True,
        max_norm: float = 0.0,
        comm: Any = None,
        file: Any = None,
    ) -> bool:
        """Runs the step. False: it was skipped, since check_finite found an infinite or NaN gradient.

        max_norm: clips by the norm over all groups; 0: no clipping. comm: of the ranks that step together, whose
        gradients are summed during the updates; collective over it. file: has the masters and moments.
        """
        library = self._library
        args, result = library.new("optimizer_step_args"), library.new("optimizer_step_result")
        groups = self._list()
        args.groups, args.num_groups = groups, len(self._groups)
        args.loss_scale, args.check_finite, args.max_norm = loss_scale, check_finite, max_norm
        if comm is not None:
            args.comm = comm
        if file is not None:
            args.file = file
        library.check(library.lib.sluice_optimizer_step(self._handle, args, result))
        self.norm = result.norm
        if result.skipped:
            return False
        self._bring_back()
        return True

    def create_file(self, config: Any) -> Any:
        """Creates a file, filled from the entries."""
        library = self._library
        out, _kept = library.ffi.new("sluice_optimizer_file_t **"), self._say_shapes(config)
        library.check(library.lib.sluice_optimizer_file_create(config, self._list(), len(self._groups), out))
        return out[0]

    def open_file(self, config: Any) -> Any:
        """Opens an existing file, which must have the entries' shapes and dtypes."""
        library = self._library
        out, _kept = library.ffi.new("sluice_optimizer_file_t **"), (self._say_shapes(config), groups := self._list())
        config.groups, config.num_groups = groups, len(self._groups)
        library.check(library.lib.sluice_optimizer_file_open(config, out))
        return out[0]

    def _say_shapes(self, config: Any) -> Any:
        """Writes the shapes into the config. The caller keeps the result as long as the config."""
        new, dims = self._library.ffi.new, [size for shape in self._shapes for size in shape]
        kept = new("int32_t[]", [len(shape) for shape in self._shapes] or 1), new("int64_t[]", dims or 1)
        config.num_dims, config.dims = kept
        return kept

    def load_file(self, file: Any) -> None:
        """Fills parameters, and those states that entries have, from the file."""
        library = self._library
        library.check(library.lib.sluice_optimizer_file_load(file, self._list(), len(self._groups)))
        self._bring_back()

    def _list(self) -> Any:
        return self._library.ffi.new("sluice_optimizer_group_t *[]", self._groups or 1)

    def _bring_back(self) -> None:
        if not self._copies:
            return
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)


_PLAIN = (torch.nn.Parameter, torch.Tensor)


@functools.cache
def _pointers() -> tuple[Any, Any]:
    """Returns the types of pointers to void and to float; parsing a type takes as long as describing a tensor."""
    ffi = load().ffi
    return ffi.typeof("void *"), ffi.typeof("float *")


def _local(tensor: Any) -> torch.Tensor:
    """Returns the local shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _laid_as(param: Any, grad: Any) -> Any:
    """Returns the gradient with the placements of its parameter. Autograd may give it others: replicated if the
    parameter is sharded, or partial. Then the call is collective over the mesh, as in torch's own optimizers."""
    if not hasattr(param, "placements") or grad.placements == param.placements:
        return grad
    return grad.redistribute(param.device_mesh, param.placements)


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides of a dense tensor of this shape, with its dimensions in the tensor's order."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def new_handle(is_exact: bool = True) -> Any:
    """Returns an optimizer of the library, which is released with the returned object."""
    library = load()
    config = library.new("optimizer_config")
    config.arithmetic = library.lib.SLUICE_OPTIMIZER_EXACT if is_exact else library.lib.SLUICE_OPTIMIZER_ROUNDED
    out = library.ffi.new("sluice_optimizer_t **")
    library.check(library.lib.sluice_optimizer_create(config, out))
    return library.ffi.gc(out[0], library.lib.sluice_optimizer_destroy)
