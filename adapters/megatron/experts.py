# SPDX-License-Identifier: Apache-2.0
"""Finds which of Megatron's experts C may compute itself, and where their weights are.

Experts whose whole mathematics is known are fused: exactly SequentialMLP of MLPs with the local linears, or exactly
GroupedMLP. The activation is found by calls of the host's own code. Other experts of a SequentialMLP are called as
modules; containers of other classes are refused.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from sluice.adapters.common import activations
from sluice.adapters.common.modules import HostModules
from sluice.adapters.torch import (
    CastingLayer,
    Context,
    MoeConfig,
    MoeLayer,
    PackedLayer,
    StackedLayer,
    Sums,
    parameters_behind,
)
from sluice.errors import Unsupported
from torch import nn

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts as host

# Removed in Megatron-Core 0.17.
GroupedMLP = getattr(host, "GroupedMLP", None)


@dataclass(frozen=True)
class Form:
    """Describes a rank's experts. unit None: the host's modules are called, and `why` is the reason."""

    model_width: int
    hidden_width: int
    gated: bool
    bias: bool
    stacked: bool  # one tensor for all experts (GroupedMLP)
    unit: activations.Unit | None
    why: str = ""

    @property
    def fused(self) -> bool:
        """Returns whether C computes the experts."""
        return self.unit is not None


def form_of(experts: nn.Module) -> Form:
    """Returns the form of a layer's experts. Unsupported if neither C nor calls of single experts can replace them."""
    if type(experts) is host.SequentialMLP:
        return _form_of_sequence(experts)
    if GroupedMLP is not None and type(experts) is GroupedMLP:
        return _form_of_stack(experts)
    raise Unsupported(
        f"its experts are a {type(experts).__name__}: Sluice runs SequentialMLP and GroupedMLP; build the model "
        "without Transformer Engine's grouped GEMM (leave --moe-grouped-gemm out, or transformer_impl local)"
    )


class _MainGrads(CastingLayer):
    """Adds gradients to `main_grad`, if the host's own linears do so (gradient_accumulation_fusion).

    DDP keeps a `main_grad` for each parameter, in f32 if it is configured so, and adds autograd's gradients to it. With
    the host's fusion a linear adds to it itself, marks the parameter, and returns a dummy gradient that is never read.
    Here the library adds, so that bf16 weights have f32 gradients without a second copy.
    """

    def sums_for(self, ctx: Any, work: Any, reads: Sequence[torch.Tensor]) -> Sums | None:
        """See MoeLayer."""
        leaves = parameters_behind(ctx)
        fuses = work.experts is None and self.accumulate == "in_place" and all(map(self._takes_sums, leaves))
        fuses = fuses and len({leaf.main_grad.dtype for leaf in leaves}) == 1
        for leaf in leaves:
            if hasattr(leaf, "grad_added_to_main_grad"):
                # An earlier backward may have set it: then autograd's gradient of this one would be left out.
                leaf.grad_added_to_main_grad = fuses
        if not fuses:
            return None
        grads = [leaf.main_grad for leaf in leaves]
        marked = [hasattr(leaf, "grad_added_to_main_grad") for leaf in leaves]
        stand_ins = [torch.empty_like(leaf) if is_marked else None for leaf, is_marked in zip(leaves, marked)]
        return Sums(grads, grads, stand_ins)

    def _takes_sums(self, leaf: Any) -> bool:
        grad = getattr(leaf, "main_grad", None)
        return (
            type(grad) is torch.Tensor
            and grad.dtype in (self.dtype, torch.float32)
            and grad.shape == leaf.shape
            and grad.is_contiguous()
            and leaf.dtype == self.dtype
            and grad.is_cpu
            and not hasattr(leaf, "__fsdp_param__")
        )


class MainGradPackedLayer(_MainGrads, PackedLayer):
    """See PackedLayer."""


class MainGradStackedLayer(_MainGrads, StackedLayer):
    """See StackedLayer."""


class MainGradModulesLayer(_MainGrads):
    """Calls experts as modules: their linears add to main_grad themselves, or autograd does."""


class _Kinds(NamedTuple):
    """Names classes of engine layers, for parameters packed by expert, stacked over experts, and in called modules."""

    packed: type[PackedLayer]
    stacked: type[StackedLayer]
    modules: type[CastingLayer]


_KINDS = {
    False: _Kinds(PackedLayer, StackedLayer, CastingLayer),
    True: _Kinds(MainGradPackedLayer, MainGradStackedLayer, MainGradModulesLayer),
}


def make_layer(context: Context, form: Form, fused: bool, adds_itself: bool, config: MoeConfig) -> MoeLayer:
    """Returns the engine layer for experts of this form, or for calls of the host's modules.

    adds_itself  whether it adds gradients to main_grad (_MainGrads)
    config       without the fields that the form sets
    """
    kinds = _KINDS[adds_itself]
    if not fused:
        local = config.num_experts // context.ep_group.world_size
        return kinds.modules(context, replace(config, hidden_width=form.hidden_width), HostModules(local))
    assert form.unit is not None
    known = replace(
        config,
        hidden_width=form.hidden_width,
        activation=form.unit.activation,
        swiglu=form.unit.swiglu,
        gated=form.gated,
        bias=form.bias,
    )
    if form.stacked:
        return kinds.stacked(context, known, views=_views_of(form))
    return kinds.packed(context, known, unpack=_unpack_gated if form.gated else tuple)


def parameters_of(experts: nn.Module, form: Form) -> Any:
    """Returns the current weights, as the layer for fused experts takes them."""
    if form.stacked:
        return [experts.weight1, experts.weight2]
    return [_tensors_of(expert, form.bias) for expert in experts.local_experts]


def why_not_plain(experts: Sequence[nn.Module]) -> str:
    """Returns why C cannot read the weights of these MLPs; "": it can. A wrapper in place of a linear (LoRA) adds to
    the product with the weight inside."""
    for expert in experts:
        if type(expert) is not MLP:
            return f"{type(expert).__name__} is not exactly megatron.core's MLP"
        for name, kind in (("linear_fc1", ColumnParallelLinear), ("linear_fc2", RowParallelLinear)):
            found = type(getattr(expert, name))
            if found is not kind:
                return f"{name} is a {found.__name__}, not {kind.__name__}"
    return ""


def call(expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Calls one expert as the host does, with a probability of 1 for each row: combine applies the route weights."""
    output, bias = expert(rows, torch.ones(rows.shape[0], dtype=torch.float32, device=rows.device))
    return output if bias is None else output + bias


# ---- SequentialMLP: fc1 [2H, M] (gate above up), fc2 [M, H] and their biases, for each expert ----


def _form_of_sequence(experts: Any) -> Form:
    first = experts.local_experts[0]
    config = first.config
    gated, bias = bool(config.gated_linear_unit), bool(config.add_bias_linear)
    unit, why = None, why_not_plain(experts.local_experts)
    if not why:
        unit, why = _unit_of(first, gated)
    return Form(first.input_size, config.moe_ffn_hidden_size, gated, bias, False, unit, why)


def _unit_of(expert: Any, gated: bool) -> tuple[activations.Unit | None, str]:
    """Returns the unit, found by a run of MLP's own forward between two linears that return their inputs."""
    config = expert.config
    if getattr(config, "activation_func_fp8_input_store", False):
        return None, "activation_func_fp8_input_store rounds what the backward reads"
    pass_on = _PassOn()
    bare = types.SimpleNamespace(
        config=config, activation_func=expert.activation_func, linear_fc1=pass_on, linear_fc2=pass_on
    )

    def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        rows = torch.cat((gate, up), -1) if gated else gate
        return MLP.forward(bare, rows, rows.new_ones(rows.shape[0]))[0]

    clamp, offset = (getattr(config, name, None) for name in ("activation_func_clamp_value", "glu_linear_offset"))
    return _asked(activation, gated, clamp, offset)


def _asked(activation: activations.Activation, gated: bool, clamp: Any = None, offset: Any = None) -> Any:
    try:
        unit = activations.find(activation, gated, limits=_given(clamp), offsets=_given(offset))
    except Exception as error:  # any function may be in the host's config
        return None, f"its activation fails on plain rows ({type(error).__name__}: {error})"
    return unit, "" if unit is not None else "its activation is not one that the library supports"


def _given(number: Any) -> list[float]:
    return [] if number is None else [float(number)]


class _PassOn(nn.Module):
    """Replaces a linear of the host."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns (the input, no bias)."""
        return rows, None


def _tensors_of(expert: Any, bias: bool) -> list[torch.Tensor]:
    up, down = expert.linear_fc1, expert.linear_fc2
    return [up.weight, down.weight, up.bias, down.bias] if bias else [up.weight, down.weight]


def _unpack_gated(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the members w1, w3, w2, b1, b3, b2 that exist."""
    up, down, *biases = tensors
    if not biases:
        return (*up.chunk(2), down)
    return (*up.chunk(2), down, *biases[0].chunk(2), biases[1])


# ---- GroupedMLP: weight1 is [E, M, 2H] (gate before up) and weight2 [E, H, M] in memory ----


def _form_of_stack(experts: Any) -> Form:
    config = experts.config
    gated = bool(config.gated_linear_unit)
    hidden = experts.weight2.shape[0] // experts.num_local_experts

    def activation(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        rows = torch.cat((gate, up), -1) if gated else gate
        return experts.activation_func_with_probs(rows, rows.new_ones(rows.shape[0], 1))

    unit, why = _asked(activation, gated)
    if unit is None:
        raise Unsupported(f"its experts are a GroupedMLP, and {why}: leave --moe-grouped-gemm out")
    return Form(experts.weight1.shape[0], hidden, gated, False, True, unit)


def _views_of(form: Form) -> Any:
    model, hidden = form.model_width, form.hidden_width
    columns = 2 * hidden if form.gated else hidden

    def views(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        up, down = tensors
        rows = None if up is None else up.view(-1, model, columns).transpose(1, 2)
        halves: list[Any] = [rows] if not form.gated else [None, None] if rows is None else list(rows.chunk(2, 1))
        return [*halves, None if down is None else down.view(-1, hidden, model).transpose(1, 2)]

    return views
