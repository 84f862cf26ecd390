# SPDX-License-Identifier: Apache-2.0
"""Implements `DistributedConfig(ep_implementation="sluice")`: dispatch, experts and combine in one call of the library.

The experts are fused if `experts_implementation="sluice"` is chosen too. With any other choice they run as callbacks:
transformers' own function on the rows of one expert. Only real rows are sent; a rank without rows needs no dummy row.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from sluice import settings
from sluice.adapters.common.contexts import group_of
from sluice.adapters.transformers import low_rank, own_factors
from sluice.adapters.transformers.contract import INSTEAD
from sluice.adapters.transformers.experts import ExpertsState, is_transported, outside_the_graph, transported
from sluice.errors import Unsupported
from torch.distributed import get_process_group_ranks, get_world_size
from torch.distributed.tensor import DTensor, Replicate, Shard

from transformers.distributed.expert_parallel import AutoEP, EPImplementation

# Layer numbers. They are the same on all ranks, which apply a model's plan in the same order.
_numbers = itertools.count()


@functools.cache
def _watch_wrappers() -> None:
    """Makes the construction of PEFT's wrappers of sharded experts, except LoRA's, an error from now on. In a forward
    they would add a plain tensor to a sharded one before Sluice is called, and torch's error names neither."""
    torch.nn.modules.module.register_module_module_registration_hook(_refuse_wrapper)


def _refuse_wrapper(wrapper: torch.nn.Module, name: str, module: Any) -> None:
    if name != "base_layer" or not type(wrapper).__module__.startswith("peft."):
        return
    if module is not None and is_transported(module) and not low_rank.is_lora(wrapper):
        kind = type(wrapper)
        raise Unsupported(
            f"{type(module).__name__} gets an adapter ({kind.__module__}.{kind.__name__} of "
            f"{getattr(wrapper, 'parameter_name', 'its tensors')}) while its experts are shared out to ranks: {INSTEAD}"
        )


class SluiceEP(EPImplementation):
    """Implements the transport of one experts module. All ranks of the group make it at the same point of loading."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        options = settings.effective(getattr(experts.config, "sluice", None))
        self._stock = AutoEP(experts, ep_mesh, tp_mesh) if options is None else None
        self._experts = experts
        if options is None:
            return
        ranks = sorted(get_process_group_ranks(ep_mesh.get_group()))
        group = group_of(ranks, options)
        everywhere = self.num_local_experts * len(ranks)
        self._state = ExpertsState(
            next(_numbers),
            group,
            self.experts_forward,
            torch_group=ep_mesh.get_group(),
            num_experts=everywhere,
            num_batches=len(ranks) // tp_mesh.size(),
        )
        transported(experts, self._state)
        _watch_wrappers()
        if len(ranks) == get_world_size():  # otherwise other ranks hold the same experts, and Trainer averages adapters
            own_factors.watch(experts, self._state, ep_mesh)

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """Returns the weighted expert outputs for this rank's tokens. Collective over the expert-parallel group."""
        if self._stock is not None:
            return self._stock(hidden_states, top_k_index, top_k_weights)
        if torch.compiler.is_compiling():
            return outside_the_graph(SluiceEP._exchange)(self, hidden_states, top_k_index, top_k_weights)
        return self._exchange(hidden_states, top_k_index, top_k_weights)

    def _exchange(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        if self.tp_mesh.size() == 1:
            return self._state.call(self._experts, hidden_states, top_k_index, top_k_weights)
        # Ranks that share a batch keep a slice of its tokens each, so that no token is computed twice.
        tokens, ids, weights = (
            DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
            .redistribute(self.tp_mesh, [Shard(0)])
            .to_local()
            for tensor in (hidden_states, top_k_index, top_k_weights)
        )
        out = self._state.call(self._experts, tokens, ids, weights)
        shape, stride = hidden_states.shape, (hidden_states.shape[1], 1)
        return DTensor.from_local(out, self.tp_mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()
