# SPDX-License-Identifier: Apache-2.0
"""Runs the layers of DeepSpeed's AutoEP (`expert_parallel` in ds_config): how a layer is read, its state, its class.

Its experts are stacked: w1 and w3 [E_local, H, M], w2 [E_local, M, H]. AutoEP makes these tensors from any layout of
the model (one tensor for gate and up, a list of modules). The activation is found by calls of the host's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from sluice.adapters.common import activations
from sluice.adapters.common.migration.moving import Expert, of_stacks
from sluice.adapters.deepspeed.moe import experts as experts_module
from sluice.adapters.deepspeed.moe import flops_profile
from sluice.adapters.deepspeed.moe.finding import DTYPES, Finding, ranks_of
from sluice.adapters.deepspeed.moe.runners import EngineRunner, Key, Runners, Swapped
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.adapters.torch import Context, MoeConfig, StackedLayer

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe import ep_experts
from deepspeed.moe.ep_experts import GroupedExperts

# The methods that `SluiceAutoEPMoELayer` needs of a release's layer.
_STEPS = ("_forward", "_finalize_output")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class StackedForm:
    """Gated experts in three stacked tensors."""

    unit: activations.Unit
    model_width: int
    hidden_width: int
    gated: ClassVar[bool] = True

    def make_layer(self, context: Context, config: MoeConfig) -> StackedLayer:
        """See finding.Form."""
        how = replace(config, activation=self.unit.activation, swiglu=self.unit.swiglu, gated=True)
        return StackedLayer(context, how, views=_as_they_are)

    def parameters_of(self, experts: GroupedExperts) -> list[torch.Tensor]:
        """See finding.Form."""
        return [experts.w1, experts.w3, experts.w2]


def _as_they_are(tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
    """Returns the stacked tensors, which are the members."""
    return tensors


def missing_steps() -> list[str]:
    """Returns the steps that this release's layer does not have."""
    return [step for step in _STEPS if not hasattr(AutoEPMoELayer, step)]


def probe(layer: AutoEPMoELayer, layer_id: int, name: str) -> Finding:
    """Describes a layer or raises UnsupportedError. Changes nothing and runs nothing of the model."""

    def refuse(reason: str) -> UnsupportedError:
        return UnsupportedError(f"MoE layer '{name}' (AutoEP): {reason}")

    _check_class(layer, refuse)
    _check_parallelism(layer, refuse)  # before hooks: ZeRO stage 3 sets some
    _check_container(layer, refuse)
    experts = layer.experts
    ranks = ranks_of(layer, refuse)
    local, hidden, model = experts.w1.shape
    if layer.num_experts != local * len(ranks):
        raise refuse(
            f"its router chooses among {layer.num_experts} experts, and this rank of {len(ranks)} holds {local}: "
            "choose an autoep_size that divides their number"
        )
    form = StackedForm(_unit_of(experts, refuse), model, hidden)
    return Finding(
        layer_id=layer_id,
        name=name,
        ranks=ranks,
        num_experts=int(layer.num_experts),
        # If scores are multiplied in before the experts, each route of a token is a row (see _before).
        top_k=1 if layer.score_apply == "pre" else int(layer.top_k),
        model_width=model,
        dtype=experts.w1.dtype,
        device=experts.w1.device,
        form=form,
    )


Refuse = Callable[[str], UnsupportedError]


def _check_class(layer: AutoEPMoELayer, refuse: Refuse) -> None:
    if type(layer) is not AutoEPMoELayer:
        raise refuse(f"{type(layer).__name__} is a subclass of AutoEPMoELayer with a forward of its own")
    if missing_steps():
        raise refuse(f"this DeepSpeed's AutoEPMoELayer has no {missing_steps()[0]}: use 0.19.8")
    for own in ("forward", "_forward"):
        if own in layer.__dict__:
            raise refuse(f"its {own} was replaced on the instance")


def _check_parallelism(layer: AutoEPMoELayer, refuse: Refuse) -> None:
    folding = getattr(layer, "folding_group_handles", None)
    if folding is not None and folding.spec.tp_size > 1:
        raise refuse(
            f"its tokens are shared out over {folding.spec.tp_size} tensor-parallel ranks (AutoEP + AutoTP folding): "
            'set "tensor_parallel": {"autotp_size": 1}'
        )
    if layer.ep_size > 1 and getattr(layer, "comm_backend", "comm") != "comm":
        raise refuse(
            f'"comm_backend": "{layer.comm_backend}" was asked for, and Sluice exchanges rows itself: take that key out'
        )
    for which, parameter in layer.experts.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise refuse("its parameters are partitioned (ZeRO stage 3): use stage 2 or less")
        if type(parameter) not in _PLAIN or parameter.layout is not torch.strided:
            raise refuse(f"experts.{which} is a {type(parameter).__name__}, not a plain strided tensor")
        if parameter.dtype not in DTYPES:
            raise refuse(f"experts.{which} is {parameter.dtype}; float32, bfloat16 and float16 are supported")
        if parameter.device.type not in ("cpu", "cuda"):
            raise refuse(f"its experts are on {parameter.device}; Sluice computes on the CPU and on CUDA devices")


def _check_container(layer: AutoEPMoELayer, refuse: Refuse) -> None:
    if type(layer.experts) is not GroupedExperts:
        raise refuse(f"its experts are held by a {type(layer.experts).__name__}, not by DeepSpeed's own GroupedExperts")
    if not experts_module.untouched(layer.experts):
        raise refuse("the container of its experts has hooks, a parametrisation or a forward of its own")


def _unit_of(experts: GroupedExperts, refuse: Refuse) -> activations.Unit:
    """Returns the activation that the host's registered function computes, as do the host's fused kernels."""
    name = experts.activation
    known = getattr(ep_experts, "EXPERT_ACTIVATIONS", {}).get(name)
    if known is None:
        raise refuse(f'its activation "{name}" is not registered in deepspeed.moe.ep_experts')
    alpha, limit = float(experts.activation_alpha), float(experts.activation_limit)
    try:
        unit = activations.find(lambda gate, up: known.fn(gate, up, alpha, limit), True, alphas=[alpha], limits=[limit])
    except Exception as error:  # any function may be registered
        raise refuse(f'its activation "{name}" fails on plain rows ({type(error).__name__}: {error})') from error
    if unit is None:
        raise refuse(
            f'its activation "{name}" is not supported by the library, which has SiLU, GELU and ReLU gates, and SwiGLU'
        )
    return unit


# ---- a swapped layer ----

# Rows, expert ids [rows, K'] and weights f32 [rows, K'] of tokens [T, M], scores [T, K] and chosen experts [T, K].
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ScorePlace(NamedTuple):
    """Where a token's scores are multiplied in."""

    route: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Routed]
    by_token: Callable[[torch.Tensor, int], torch.Tensor]  # (outputs of the rows, K) -> outputs of the tokens [T, M]


def _after(tokens: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> Routed:
    return tokens, chosen, scores.float()


def _before(tokens: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor) -> Routed:
    """Returns a row for each route of a token, as stock does."""
    rows = tokens.repeat_interleave(scores.shape[1], 0)
    rows = (rows.float() * scores.reshape(-1, 1)).to(tokens.dtype)
    return rows, chosen.reshape(-1, 1), torch.ones_like(scores, dtype=torch.float32).reshape(-1, 1)


SCORES = {
    "post": ScorePlace(_after, lambda outputs, top_k: outputs),
    "pre": ScorePlace(_before, lambda outputs, top_k: outputs.view(-1, top_k, outputs.shape[-1]).sum(dim=1)),
}


class AutoEPState(Runners):
    """One swapped `AutoEPMoELayer`."""

    def slots(self, container: Any) -> list[Expert]:
        """See Runners."""
        return of_stacks({"w1": container.w1, "w3": container.w3, "w2": container.w2}, container.w1.shape[0])

    def runner(self, layer: Any, tokens: torch.Tensor) -> tuple[EngineRunner, torch.dtype]:
        """Returns the engine layer for these tokens, and the dtype of its rows."""
        self.check_container(layer.experts)
        self.check_width(tokens)
        dtype = self._dtype(layer, tokens)
        return self.runner_for(Key(dtype, True)), dtype

    def profile(self, expert_ids: torch.Tensor) -> None:
        """Adds GEMMs to the host's count, since no module was called for them."""
        assert self.finding.form is not None
        flops_profile.count(self.finding.form, expert_ids)

    def _dtype(self, layer: Any, tokens: torch.Tensor) -> torch.dtype:
        """Returns the dtype of the host's GEMMs. The host casts weights to the rows' dtype, and its loop multiplies in
        autocast's dtype, which its grouped GEMMs ignore."""
        dtype = tokens.dtype
        if self._autocast() and not layer.experts.use_grouped_mm:
            dtype = torch.get_autocast_dtype(self.finding.device.type)
        self.check_dtype(dtype)
        return dtype


class SluiceAutoEPMoELayer(Swapped, AutoEPMoELayer):
    """An AutoEP layer whose dispatch, experts and combine are computed by Sluice. Router, shared experts, parameters,
    names, state dict and checkpoints are those of the host."""

    _sluice: AutoEPState

    @torch.compiler.disable
    def _forward(self, hidden_states: torch.Tensor) -> Any:
        """Has the argument, result and side effects on the layer (tokens_per_expert) of the host's forward."""
        state = self._sluice
        try:
            batch, length, width = hidden_states.shape
            tokens = hidden_states.reshape(-1, width)
            runner, dtype = state.runner(self, tokens)
            scores, chosen, counts = self.router(tokens, self.expert_bias)
            with torch.no_grad():
                self.tokens_per_expert.add_(counts)
            place = SCORES[self.score_apply]
            rows, expert_ids, weights = place.route(tokens, scores, chosen)
            state.settle(rows, dtype)
        except Exception as error:
            # The other ranks are about to exchange rows: they must learn that this rank does not take part.
            state.refuse(f"{type(error).__name__}: {error}")
            raise
        before = state.communication() if state.measures(self) else None
        summed = state.run(runner, rows.to(dtype), expert_ids, weights, self.experts)
        state.profile(expert_ids)
        if before is not None:
            state.record(self, summed, before)
        output = place.by_token(summed, self.top_k).reshape(batch, length, width)
        return self._finalize_output(output, tokens, hidden_states, width)
