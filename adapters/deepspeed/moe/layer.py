# SPDX-License-Identifier: Apache-2.0
"""Defines the class of a swapped layer: the host's own `MOELayer` with a different forward, and nothing else; and its
state: its engine layers, and calls of host experts that C does not compute.

Parameters, names, hooks, state dict, isinstance checks, optimizers and checkpoints are those of the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sluice.adapters.common.migration.moving import Expert, of_modules
from sluice.adapters.deepspeed.moe import experts as experts_module
from sluice.adapters.deepspeed.moe import flops_profile, linear_adapters, routes
from sluice.adapters.deepspeed.moe.runners import EngineRunner, Key, Runners, Swapped
from sluice.adapters.deepspeed.unsupported import UnsupportedError, policy_of_modules
from sluice.errors import Mismatch
from torch import nn

from deepspeed.moe.sharded_moe import MOE_TIMER, MOELayer


class LayerState(Runners):
    """One swapped `MOELayer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._told: set[str] = set()  # reasons that a warning has given: experts without hooks run as modules
        self._seen_experts: set[tuple[int, bool]] = set()
        self._result_dtypes: dict[torch.dtype, torch.dtype] = {}

    def slots(self, container: Any) -> list[Expert]:
        """See Runners."""
        return of_modules(list(container.deepspeed_experts))

    def runner(self, layer: nn.Module) -> tuple[EngineRunner, torch.dtype]:
        """Returns the engine layer for this call, and the dtype of its rows."""
        self.check_container(layer.experts)
        experts = layer.experts.deepspeed_experts
        untouched, rank = experts_module.still_exact(experts), 0
        if untouched and self.finding.form is not None:
            terms = experts_module.adapters_of(experts, self.finding.form)
            if isinstance(terms, str):
                untouched = False
                self._tell_modules(terms)
            else:
                rank = linear_adapters.rank_of(terms)
        self._fused_now = self.finding.form is not None and untouched
        dtype = self._dtype(layer)
        key = Key(dtype, untouched, rank)
        if key not in self._runners:
            self._check_policy(key)
        return self.runner_for(key), dtype

    def _tell_modules(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            name = self.finding.name
            warnings.warn(f"sluice: MoE layer '{name}': its experts run as modules, since {reason}", stacklevel=2)

    def _check_policy(self, key: Key) -> None:
        """Warns if the policy does not suit experts that were hooked after the swap and now run as modules."""
        reason = None if key.untouched else policy_of_modules(self.finding.name, self._options)
        if reason is not None and self.finding.form is not None:  # otherwise the banner has warned already
            warnings.warn(f"sluice: {reason}", stacklevel=2)

    def check_tokens(self, tokens: torch.Tensor, dtype: torch.dtype) -> None:
        """Refuses tokens that the host would refuse later, or on the other ranks only."""
        self.check_width(tokens)
        if tokens.dtype != dtype and not self._autocast():
            raise ValueError(
                f"MoE layer '{self.finding.name}': the input is {tokens.dtype}, the experts are {dtype}: "
                "cast one, or use autocast"
            )

    def call_expert(self, expert: nn.Module, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Calls the host's expert with rows as a 4-D tensor, as the host does. Uses the first element of a tuple."""
        as_now = index, expert.training  # dropout draws random numbers only in training
        new = as_now not in self._seen_experts and torch.is_grad_enabled()
        before = torch.random.get_rng_state() if new else None
        result = expert(rows.view(1, 1, *rows.shape))
        if isinstance(result, tuple):
            result = result[0]
        if before is not None:
            self._seen_experts.add(as_now)
            self._check_first_call(expert, index, rows, result, not torch.equal(before, torch.random.get_rng_state()))
        if result.numel() != rows.numel():
            raise UnsupportedError(
                f"MoE layer '{self.finding.name}': an expert turned {list(rows.shape)} into {list(result.shape)}; "
                "Sluice needs one row of the model width per row"
            )
        return result.reshape(rows.shape).to(rows.dtype)

    def _check_first_call(self, expert: nn.Module, index: int, rows: Any, result: torch.Tensor, drew: bool) -> None:
        where = f"MoE layer '{self.finding.name}', expert {index}"
        if drew:
            text = f"{where} draws random numbers per row, and Sluice gives it its real rows without padding"
            if self._options.on_unsupported == "error":
                raise UnsupportedError(text)
            warnings.warn(f"sluice: {text}", stacklevel=2)
        leaves = _foreign_leaves(result, rows, expert)
        if leaves:  # whatever the options say: their gradients would be lost silently
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise UnsupportedError(
                f"{where} uses tensors that require a gradient but are not its parameters (of shape {shapes}): make "
                "them parameters of the expert, or detach them"
            )

    def as_host(self, output: torch.Tensor, experts: Sequence[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
        """Returns the output in the dtype of the host's result, which is the dtype that an expert returns."""
        if self._fused_now or not self._autocast():
            return output
        if output.dtype not in self._result_dtypes:
            with torch.no_grad():
                result = experts[0](tokens.new_zeros(1, 1, 1, tokens.shape[1]))
            self._result_dtypes[output.dtype] = (result[0] if isinstance(result, tuple) else result).dtype
        return output.to(self._result_dtypes[output.dtype])

    # ---- for the host's timers, logger and profiler ----

    def profile(self, expert_ids: torch.Tensor) -> None:
        """Adds the GEMMs of fused experts to the host's count: no module was called for them."""
        if self._fused_now and self.finding.form is not None:
            flops_profile.count(self.finding.form, expert_ids)

    @staticmethod
    def measures(layer: nn.Module) -> bool:
        """Returns whether the host measures this layer's communication."""
        return bool(layer.wall_clock_breakdown) or Runners.measures(layer)

    def record(self, layer: Any, output: torch.Tensor, before: tuple[int, int]) -> None:
        """Gives the host its communication times, and its logger the records."""
        if layer.wall_clock_breakdown and layer.ep_size > 1:
            # Both exchanges of all chunks share one lane, so each gets half of its time.
            lane_ns = self.since(before)[1]
            layer.time_falltoall += lane_ns / 2e6
            layer.time_salltoall += lane_ns / 2e6
        super().record(layer, output, before)

    def explain(self, error: Mismatch) -> Mismatch:
        """Adds the reason, which the library cannot know, to an error about differing ranks."""
        if self._fused_now == (self.finding.form is not None):
            return error
        return Mismatch(
            f"{error.message}. On this rank the experts of '{self.finding.name}' were hooked or changed after the "
            "swap, so they are called as modules: do so on every rank of the group, or on none",
            peer=error.peer,
        )

    # ---- dtypes ----

    def _dtype(self, layer: nn.Module) -> torch.dtype:
        """Returns the dtype of fused experts, that of two Linears: autocast's if it is on, else their own."""
        own = self.finding.dtype
        for parameter in layer.experts.deepspeed_experts.parameters():
            if parameter.is_floating_point():
                own = parameter.dtype  # a later .to() or .bfloat16() of the model
                break
        if self._autocast() and self._fused_now:
            own = torch.get_autocast_dtype(self.finding.device.type)
        self.check_dtype(own)
        return own


def _foreign_leaves(result: torch.Tensor, rows: torch.Tensor, expert: nn.Module) -> list[torch.Tensor]:
    """Returns tensors other than the expert's parameters that need a gradient, which Sluice cannot give them. result:
    the expert's output for `rows`"""
    own = {id(parameter) for parameter in expert.parameters()}
    return [leaf for leaf in _leaves(result, rows.grad_fn) if id(leaf) not in own]


def _leaves(result: torch.Tensor, stop: object) -> Iterator[torch.Tensor]:
    pending, seen = [result.grad_fn], {stop, None}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        pending.extend(following for following, _ in node.next_functions)


class SluiceMOELayer(Swapped, MOELayer):
    """A MOELayer whose dispatch, experts and combine are computed by Sluice; the gate is the host's."""

    _sluice: LayerState

    @torch.compiler.disable
    def forward(self, *input: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Has the arguments, result and side effects on the layer (l_aux, exp_counts, times) of the host's forward."""
        hidden, used_token = input[0], input[1] if len(input) > 1 else None
        if not self.wall_clock_breakdown:
            return _run(self, hidden, used_token)
        timer = self.timers(MOE_TIMER)
        timer.start()
        try:
            return _run(self, hidden, used_token)
        finally:  # also after a refused pass: a timer that still runs cannot be started again
            timer.stop()
            self.time_moe = timer.elapsed(reset=False)


def _run(layer: SluiceMOELayer, hidden: torch.Tensor, used_token: torch.Tensor | None) -> torch.Tensor:
    state = layer._sluice
    try:
        runner, dtype = state.runner(layer)
        tokens = hidden.reshape(-1, hidden.shape[-1])
        state.check_tokens(tokens, dtype)
        state.settle(tokens, dtype)
        route = routes.ask(layer.gate, state.finding.gate_format, tokens, used_token)
    except Exception as error:
        # The other ranks are about to exchange rows: they must learn that this rank does not take part.
        state.refuse(f"{type(error).__name__}: {error}")
        raise
    layer.l_aux, layer.exp_counts = route.l_aux, route.exp_counts
    before = state.communication() if state.measures(layer) else None
    experts = layer.experts.deepspeed_experts
    output = state.run(
        runner,
        tokens.to(dtype),
        route.expert_ids,
        route.weights,
        experts,
        lambda index, rows: state.call_expert(experts[index], index, rows),
    )
    state.profile(route.expert_ids)
    if before is not None:
        state.record(layer, output, before)
    return state.as_host(output, experts, tokens).reshape(hidden.shape)
