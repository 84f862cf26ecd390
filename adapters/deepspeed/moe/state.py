# SPDX-License-Identifier: Apache-2.0
"""Defines the state of a swapped `MOELayer`: its engine layers, and calls of host experts that C does not compute."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from sluice.adapters.common.migration.moving import Expert, of_modules
from sluice.adapters.deepspeed.moe import experts as experts_module
from sluice.adapters.deepspeed.moe import first_call, flops_profile, linear_adapters
from sluice.adapters.deepspeed.moe.engine_backend import EngineRunner
from sluice.adapters.deepspeed.moe.runners import Key, Runners
from sluice.adapters.deepspeed.unsupported import UnsupportedError, policy_of_modules
from sluice.errors import Mismatch
from torch import nn


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
        before = first_call.random_state() if new else None
        result = expert(rows.view(1, 1, *rows.shape))
        if isinstance(result, tuple):
            result = result[0]
        if before is not None:
            self._seen_experts.add(as_now)
            self._check_first_call(expert, index, rows, result, not torch.equal(before, first_call.random_state()))
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
        leaves = first_call.foreign_leaves(result, rows, expert)
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
