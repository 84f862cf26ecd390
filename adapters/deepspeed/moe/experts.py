# SPDX-License-Identifier: Apache-2.0
"""Finds which experts C may compute itself, and which must be called as modules of the host.

Only experts whose whole mathematics is known are fused: Linear - activation - Linear (or the gated form), exact torch
types, nothing hooked, parametrised or overridden; a Linear may have PEFT's LoRA around it. All others are called as
modules, unless they mix rows or draw random numbers. Those are unsupported, because real rows without the host's
padding would change their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from sluice.adapters.common import activations
from sluice.adapters.deepspeed.moe import flops_profile, forward_source, linear_adapters
from sluice.adapters.torch import CastingLayer, Context, Lora, MoeConfig
from torch import nn
from torch.nn.modules import module as nn_module

ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh", "silu")

# Rows are tokens: these modules read several rows at once, or keep state of earlier rows.
MIXES_ROWS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.modules.conv._ConvNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._LPPoolNd,
)


@dataclass(frozen=True)
class FusedForm:
    """How to find the weights in an expert, and how they are used; the same for all local experts."""

    w1: str  # paths of the Linears below the expert
    w2: str
    w3: str | None
    activation: str
    bias: bool
    model_width: int
    hidden_width: int
    lora_rank: int = 0  # of the adapters that were active when the layer was found

    @property
    def gated(self) -> bool:
        """Returns whether act(w1 x) is multiplied by w3 x."""
        return self.w3 is not None

    def make_layer(self, context: Context, config: MoeConfig) -> CastingLayer:
        """See finding.Form."""
        how = replace(config, activation=self.activation, gated=self.gated, bias=self.bias)
        return CastingLayer(context, how)

    def parameters_of(self, experts: Sequence[nn.Module]) -> list[dict[str, torch.Tensor]]:
        """See finding.Form."""
        return [self._members(expert) for expert in experts]

    def lora_of(self, experts: Sequence[nn.Module], dtype: torch.dtype) -> Lora | None:
        """See finding.Form."""
        terms = adapters_of(experts, self)
        return linear_adapters.lora_of(terms, dtype) if terms and not isinstance(terms, str) else None

    def _members(self, expert: nn.Module) -> dict[str, torch.Tensor]:
        names = ("w1", "w3", "w2") if self.gated else ("w1", "w2")
        members: dict[str, torch.Tensor] = {}
        for name, linear in zip(names, linears(expert, self)):
            members[name] = linear.weight
            if self.bias:
                members[name.replace("w", "b")] = linear.bias
        return members


def fused_form(experts: Sequence[nn.Module]) -> FusedForm | str:
    """Returns the common form of these experts, or why the host's modules must be called."""
    if not experts:
        return "this rank has no experts"
    forms = [_form_of(expert) for expert in experts]
    for index, form in enumerate(forms):
        if isinstance(form, str):
            return f"expert {index}: {form}"
    if any(form != forms[0] for form in forms):
        return "the experts differ in structure"
    terms = adapters_of(experts, forms[0])
    if isinstance(terms, str):
        return terms
    tensors = [
        parameter
        for expert in experts
        for linear in linears(expert, forms[0])
        for parameter in linear_adapters.base_of(linear).parameters()
    ]
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) != 1:
        return "the experts' parameters differ in dtype or device"
    if any(tensor.layout != torch.strided or type(tensor) not in (nn.Parameter, torch.Tensor) for tensor in tensors):
        return "a parameter of an expert is not a plain strided tensor"
    return replace(forms[0], lora_rank=linear_adapters.rank_of(terms))


def still_exact(experts: Iterable[nn.Module]) -> bool:
    """Returns whether nothing was hooked since `fused_form`. Cheap, since each forward calls this."""
    if nn_module._has_any_global_hook():
        return False
    return all(untouched(module) for expert in experts for module in expert.modules())


def adapters_of(experts: Sequence[nn.Module], form: FusedForm) -> linear_adapters.Terms | str:
    """Returns the active adapters on the experts' Linears, or why the experts have to be called as modules."""
    names = ("w1", "w3", "w2") if form.gated else ("w1", "w2")
    found = dict(zip(names, zip(*(linears(expert, form) for expert in experts))))
    return linear_adapters.read(found)


def unsupported_reason(expert: nn.Module) -> str | None:
    """Returns why this expert must not be given real rows only, or None."""
    for name, module in expert.named_modules():
        where = f"{type(module).__name__} at '{name or '.'}'"
        if isinstance(module, MIXES_ROWS):
            return f"{where} mixes rows, and Sluice gives an expert its real rows without padding"
        probability = getattr(module, "p", 0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0
        if probability or isinstance(module, nn.RReLU):
            return f"{where} draws random numbers per row in training"
    return None


def untouched(module: nn.Module) -> bool:
    """Returns whether the module has no parametrisation, no own forward, and no hooks except a profiler's."""
    state = module.__dict__
    return not (
        (state.get("_forward_hooks") and not flops_profile.has_set_all(state, "_forward_hooks"))
        or (state.get("_forward_pre_hooks") and not flops_profile.has_set_all(state, "_forward_pre_hooks"))
        or state.get("_backward_hooks")
        or state.get("_backward_pre_hooks")
        or "forward" in state
        or "_compiled_call_impl" in state
        and state["_compiled_call_impl"] is not None
        or "parametrizations" in state.get("_modules", ())
    )


def linears(expert: nn.Module, form: FusedForm) -> list[nn.Linear]:
    """Returns the expert's Linears in the order w1, w3 (if gated), w2."""
    paths = [path for path in (form.w1, form.w3, form.w2) if path is not None]
    return [expert.get_submodule(path) for path in paths]  # type: ignore[misc]


def _form_of(expert: nn.Module) -> FusedForm | str:
    if not all(untouched(module) for module in expert.modules()):
        return "something in it has hooks, a parametrisation or a forward of its own"
    if type(expert) is nn.Sequential:
        found = _sequential(expert)
    else:
        found = forward_source.read(expert)
    if isinstance(found, str):
        return found
    w1, w3, w2, activation = found
    modules = [expert.get_submodule(path) for path in (w1, w3, w2) if path is not None]
    for module in modules:
        if type(linear_adapters.base_of(module)) is not nn.Linear:
            return f"{type(module).__name__} is not exactly torch.nn.Linear"
    if len({id(module) for module in modules}) != len(modules):
        return "one Linear is used twice"
    known = {id(tensor) for module in modules for tensor in module.parameters()}
    if any(id(tensor) not in known for tensor in expert.parameters()):
        return "it has parameters that its forward does not use"
    first, last = modules[0], modules[-1]
    if len({module.bias is None for module in modules}) != 1:
        return "only some of its Linears have a bias"
    if any((m.in_features, m.out_features) != (first.in_features, first.out_features) for m in modules[:-1]):
        return "its gate and up projections differ in shape"
    if (last.in_features, last.out_features) != (first.out_features, first.in_features):
        return "its Linears do not map the model width to itself"
    return FusedForm(w1, w2, w3, activation, first.bias is not None, first.in_features, first.out_features)


def _sequential(expert: nn.Sequential) -> tuple[str, str | None, str, str] | str:
    steps: list[tuple[str, nn.Module]] = []
    for name, module in expert.named_children():
        idle = type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)
        if not idle:
            steps.append((name, module))
    kinds = [activations.of_module(module) for _, module in steps]
    if len(steps) == 2 and kinds == [None, None]:
        return steps[0][0], None, steps[1][0], "identity"
    if len(steps) == 3 and kinds[0] is None and kinds[1] is not None and kinds[2] is None:
        return steps[0][0], None, steps[2][0], kinds[1]
    return "not Linear - activation - Linear"
