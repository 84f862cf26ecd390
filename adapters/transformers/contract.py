# SPDX-License-Identifier: Apache-2.0
"""Reads an experts module of transformers: its tensors, their layout, and whether C may compute it.

The decorator of transformers sets flags on a module; sizes are taken from the tensors, because modules name them
differently and expert parallelism changes them. Class names and the identity of parameters are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sluice.adapters.common import activations
from sluice.adapters.torch import Lora
from sluice.adapters.torch.lora import Factors
from sluice.adapters.transformers import NAME
from sluice.adapters.transformers.packed_stack import REMEDY, form_of, is_packed
from sluice.errors import InvalidArgument, Unsupported

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = frozenset((bool, int, float, str))
_STATELESS = (torch.nn.SiLU, torch.nn.ReLU)
_NONE: dict[str, Any] = {}
INSTEAD = (
    'under ep_implementation="sluice" parameters of experts are sharded, and PEFT\'s LoRA on their two stacks is the '
    "only adapter that they take: put other adapters on attention alone, or train without expert parallelism (no "
    "ep_size in DistributedConfig)"
)
# transformers' names of kernels for CUDA, which take all experts of a rank in one call.
KERNELS = ("deepgemm", "deepgemm_megamoe", "sonicmoe")
OTHERWISE = 'or set experts_implementation="eager" for this model'


@dataclass(frozen=True)
class Contract:
    """Describes how to call a module's experts.

    unit        the library's unit for the gate; None: the module's own functions are called
    reason      why they are called
    """

    names: tuple[str, ...]  # of the stacked tensors: up, down and their biases
    gated: bool
    bias: bool
    transposed: bool
    interleaved: bool
    unit: activations.Unit | None
    reason: str = ""
    stock: bool = False  # whether the implementation in the model's config computes

    @property
    def fused(self) -> bool:
        """Returns whether the library computes the experts."""
        return self.unit is not None

    def widths(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Returns (model width, hidden width)."""
        down = tensors[1].shape
        return (down[2], down[1]) if self.transposed else (down[1], down[2])

    def views(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the library's members in the stacked tensors: the existing ones of w1, w3, w2, b1, b3, b2."""
        up, down, *biases = tensors
        if self.transposed:
            up, down = (None if tensor is None else tensor.transpose(1, 2) for tensor in (up, down))
        return [*self._halves(up), down, *self._biases(biases)]

    def packed_views(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Returns the members of the result of packed_stack.flat, with s1, s3, s2. No stack is transposed there."""
        up, down, *biases, up_scales, down_scales = tensors
        return [*self._halves(up), down, *self._biases(biases), *self._halves(up_scales), down_scales]

    def _biases(self, biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [*self._halves(biases[0]), biases[1]] if self.bias else []

    def lora(self, factors: Sequence[Factors | None]) -> Lora:
        """Returns adapters on the up and on the down stack, in the library's form."""
        up, down = factors
        found: dict[str, torch.Tensor] = {}
        scales: dict[str, float] = {}
        if up is not None:
            found.update(zip(("la1", "lb1", "lb3"), (up.a, *self._halves(up.b))))
            scales["la1"] = up.scale
        if down is not None:
            found.update(la2=down.a, lb2=down.b)
            scales["la2"] = down.scale
        return Lora(found, scales)

    def _halves(self, up: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if self.interleaved or not self.gated:
            return (up,)
        return (None, None) if up is None else tuple(up.chunk(2, 1))


def signature(module: Any) -> tuple[Any, ...]:
    """Returns a value that changes when a contract is out of date. Called before every forward, so it must be fast."""
    state = module.__dict__
    get = state.get
    act = state["_modules"].get("act_fn")
    if act is None:
        act = get("act_fn")
    gate, own = getattr(type(module), "_apply_gate", None), get("_apply_gate")
    has_own_gate = _has_own_gate(gate, own)
    return (
        act,
        bool(getattr(act, "_forward_hooks", None) or getattr(act, "_forward_pre_hooks", None)),
        get("training"),
        gate,
        own,
        get("has_gate"),
        get("has_bias"),
        get("is_transposed"),
        get("is_concatenated"),
        get("has_post_expert_norm"),
        numbers_of(state) if has_own_gate else None,
        None if type(act) in _STATELESS else numbers_of(getattr(act, "__dict__", _NONE)),
    )


def numbers_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns all numbers that a function of an object with these attributes may read; for tensors see _unit."""
    return tuple([value for value in state.values() if type(value) in _NUMBERS])


def _has_own_gate(gate: Any, own: Any) -> bool:
    """Returns whether the gate is not transformers' default, which reads `act_fn` alone."""
    return own is not None or getattr(gate, "__module__", None) != "transformers.integrations.moe"


def read(module: Any, chosen: str | None = None) -> Contract:
    """Returns the contract of a module, or raises an error that names class, attribute and remedy.

    chosen: under expert parallelism, the implementation of experts that the model's config names
    """
    name = type(module).__name__
    for flag in _FLAGS:
        if not isinstance(getattr(module, flag, None), bool):
            raise Unsupported(
                f"{name}.{flag} is {getattr(module, flag, 'absent')}: Sluice runs experts that transformers' "
                f"use_experts_implementation decorates, as 5.23 does; use such a class, {OTHERWISE}"
            )
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = (up, "down_proj", f"{up}_bias", "down_proj_bias") if module.has_bias else (up, "down_proj")
    for attribute in names:
        if not isinstance(getattr(module, attribute, None), torch.Tensor):
            raise Unsupported(
                f"{name}.{attribute} is {_kind(getattr(module, attribute, None))}, not a tensor stacked over experts: "
                f"load the model in float32, bfloat16 or float16, {OTHERWISE}"
            )
    if chosen in KERNELS:
        raise Unsupported(
            f'{type(module).__name__}: experts_implementation="{chosen}" cannot compute the rows of one expert at a '
            f'time, which ep_implementation="{NAME}" needs: set experts_implementation="{NAME}", "grouped_mm", '
            f'"batched_mm" or "eager", or ep_implementation="all_to_all"'
        )
    stock = chosen not in (None, NAME)
    unit, reason = (None, f'experts_implementation="{chosen}"') if stock else _unit(module, names)
    return Contract(
        names=names,
        gated=module.has_gate,
        bias=module.has_bias,
        transposed=module.is_transposed,
        interleaved=module.has_gate and not module.is_concatenated,
        unit=unit,
        reason=reason,
        stock=stock,
    )


def normalises(module: Any) -> bool:
    """Returns whether each expert's output is normalised. Before 5.23 (5.17 was tested) no model has a flag or norm."""
    return bool(getattr(module, "has_post_expert_norm", False))


def _unit(module: Any, names: tuple[str, ...]) -> tuple[activations.Unit | None, str]:
    if normalises(module):
        return None, "it normalises each expert's output"
    if signature(module)[1]:
        return None, "its act_fn has hooks"
    loose = _loose_tensors(module, names) if module.has_gate else []
    for number in (*others(module, names), *dict(module.named_buffers()), *loose):
        return None, f"its {number} may be a parameter of its gate, which may change"
    try:
        found = _gate_of(module)
    except Exception as error:  # any class may be here
        return None, f"its gate fails on plain rows ({type(error).__name__}: {error})"
    return found, "" if found is not None else "its gate is not one that the library supports"


def _loose_tensors(module: Any, names: tuple[str, ...]) -> list[str]:
    """Returns tensors that are neither parameters nor buffers, and that a gate other than the default may read."""
    state = module.__dict__
    if not _has_own_gate(getattr(type(module), "_apply_gate", None), state.get("_apply_gate")):
        return []
    return [name for name, value in state.items() if isinstance(value, torch.Tensor) and name not in names]


def others(module: Any, names: tuple[str, ...]) -> dict[str, torch.nn.Parameter]:
    """Returns parameters other than the stacked ones and the inputs of their parametrizations."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if name not in names and not name.startswith("parametrizations.")
    }


def check_tensors(module: Any, contract: Contract, tensors: Sequence[torch.Tensor]) -> None:
    """Checks shapes, dtypes and devices, when one of them has changed."""
    name = type(module).__name__
    for attribute, tensor in zip(contract.names, tensors):
        where = f"{name}.{attribute}"
        if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
            raise Unsupported(
                f"{where} is a {tensor.layout} tensor on {tensor.device}; Sluice computes on strided tensors on the "
                f"CPU or on a CUDA device: move the model, {OTHERWISE}"
            )
        if tensor.device != tensors[0].device:
            raise Unsupported(
                f"{where} is on {tensor.device} and {contract.names[0]} on {tensors[0].device}: move one, {OTHERWISE}"
            )
        if type(tensor) not in PLAIN and torch.nn.utils.parametrize.is_parametrized(module, attribute):
            raise Unsupported(f"{where} is parametrized and makes a {_kind(tensor)}: {INSTEAD}")
        if is_packed(tensor) != is_packed(tensors[0]) and attribute == contract.names[1]:
            raise Unsupported(f"{where} and {contract.names[0]} have different formats: load both in one format")
        if is_packed(tensor):
            _check_packed(where, contract, tensor)
        elif type(tensor) not in PLAIN:
            raise Unsupported(
                f"{where} is a {_kind(tensor)}; Sluice reads plain tensors: {_unwrapped(tensor)}, {OTHERWISE}"
            )
        if tensor.dtype not in DTYPES:
            raise Unsupported(
                f"{where} is {tensor.dtype}; Sluice computes in float32, bfloat16 and float16: "
                f"load the model with dtype=torch.float32, {OTHERWISE}"
            )
        if tensor.dtype != tensors[0].dtype:
            raise Unsupported(
                f"{where} is {tensor.dtype} and {contract.names[0]} {tensors[0].dtype}: cast one, {OTHERWISE}"
            )
    model, hidden = contract.widths(tensors)
    count, factor = tensors[0].shape[0], 2 if contract.gated else 1
    wanted = [
        (count, model, factor * hidden) if contract.transposed else (count, factor * hidden, model),
        (count, hidden, model) if contract.transposed else (count, model, hidden),
        (count, factor * hidden),
        (count, model),
    ]
    for attribute, tensor, shape in zip(contract.names, tensors, wanted):
        if tuple(tensor.shape) != shape:
            raise InvalidArgument(
                f"{name}.{attribute} has shape {list(tensor.shape)}; with is_transposed={contract.transposed} and "
                f"down_proj {list(tensors[1].shape)} it must be {list(shape)}: correct the layout, {OTHERWISE}"
            )
    if form_of(tensors) is None and not _are_matrices(contract, tensors):
        raise InvalidArgument(
            f"{name}: a matrix of {' or '.join(contract.names[:2])} has no unit stride: make it contiguous, {OTHERWISE}"
        )


def _unwrapped(tensor: Any) -> str:
    if hasattr(tensor, "to_local"):  # of fully_shard, or of expert parallelism
        return "call the model instead of its experts, whose parameters are whole in its forward alone"
    return "unwrap it"


def _check_packed(where: str, contract: Contract, tensor: Any) -> None:
    if not contract.fused:
        raise Unsupported(
            f"{where} is in {tensor.form.name}, and these experts run with their own functions ({contract.reason}), "
            f"which need plain weights; {REMEDY}"
        )
    if tensor.requires_grad:
        raise Unsupported(
            f"{where} is in {tensor.form.name} and requires a gradient, but packed weights are frozen: set its "
            "requires_grad to False, and train adapters"
        )


def _are_matrices(contract: Contract, tensors: Sequence[torch.Tensor]) -> bool:
    return all(1 in tensor.stride()[1:] for tensor in tensors[:2])


def _kind(value: Any) -> str:
    return "absent" if value is None else type(value).__name__


def _gate_of(module: Any) -> activations.Unit | None:
    """Returns the library's unit for the activation, found by calls of `_apply_gate`, or of `act_fn` without a gate.
    None: the library has none."""

    def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if not module.has_gate:
            return module.act_fn(gate)
        return module._apply_gate(
            torch.cat((gate, up), -1) if module.is_concatenated else torch.stack((gate, up), -1).flatten(-2)
        )

    alphas = _numbers(module, "alpha", "swiglu_alpha")
    return activations.find(activation, module.has_gate, alphas, _numbers(module, "limit", "swiglu_limit"))


def _numbers(module: Any, *names: str) -> list[float]:
    found = [getattr(module, name, None) for name in names]
    return [float(value) for value in found if isinstance(value, (int, float))]
