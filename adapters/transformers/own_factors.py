# SPDX-License-Identifier: Apache-2.0
"""Shards A and B of PEFT's adapters on experts under expert parallelism: each rank has the factors of its own experts.

PEFT makes A and B of all experts, for one target parameter after the other. When it has initialised them, a hook keeps
the part of this rank as a DTensor, so the values are those that one process draws from the same seed. Trainer, torch's
optimizers and PEFT treat these DTensors like the sharded experts: no gradient of one rank's experts is averaged. State
dicts have PEFT's full shapes: hooks gather saved tensors, and take this rank's part of loaded tensors.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from sluice.adapters.common.migration.moving import MovingLayer
from sluice.adapters.transformers import low_rank
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

_FACTORS = ("lora_A", "lora_B")


class _Shared(NamedTuple):
    """Has the adapters of an experts module. wrappers: PEFT's, one for each target parameter."""

    layer: MovingLayer
    mesh: DeviceMesh
    wrappers: weakref.WeakSet[Any]


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()
# For each of PEFT's dicts of the A or the B of all adapters: its wrapper, and which of the two it is.
_dicts: weakref.WeakKeyDictionary[nn.ModuleDict, tuple[weakref.ref[Any], str]] = weakref.WeakKeyDictionary()


def watch(experts: Any, layer: MovingLayer, mesh: DeviceMesh) -> None:
    """Splits adapters on these experts, from now on, over the ranks of the mesh as the experts are."""
    if not _shared:
        nn.modules.module.register_module_module_registration_hook(_registered)
    _shared[experts] = _Shared(layer, mesh, weakref.WeakSet())


def _registered(parent: nn.Module, name: str, child: Any) -> None:
    if name in _FACTORS and low_rank.is_lora(parent):
        shared = _shared.get(parent.get_base_layer())
        if shared is not None:
            shared.wrappers.add(parent)
            _dicts[child] = weakref.ref(parent), name
    # PEFT puts a factor into its dict twice: when it makes the factor, and after it has the experts' device and dtype.
    elif isinstance(parent, nn.ModuleDict) and parent in _dicts and parent._modules.get(name) is child:
        wrapper, which = _dicts[parent]
        _keep_own(wrapper(), child, which)


def _keep_own(wrapper: Any, factor: nn.Linear, which: str) -> None:
    weight, count = factor.weight, wrapper.num_experts
    if weight.is_meta or isinstance(weight, DTensor) or count == 1:
        return
    layer, mesh, _ = _shared[wrapper.get_base_layer()]
    mine = layer.placement.experts_of(mesh.get_local_rank())
    whole = weight.detach()
    if which == "lora_A":
        part, placement = whole.view(count, -1, whole.shape[1])[mine].flatten(0, 1), Shard(0)
    else:
        columns = whole.view(whole.shape[0], -1, count)
        part, placement = columns[:, :, mine].flatten(1), _StridedShard(1, split_factor=columns.shape[1])
    own = DTensor.from_local(
        part.contiguous(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    factor.weight = nn.Parameter(own, requires_grad=weight.requires_grad)
    factor.register_state_dict_post_hook(_gather)
    factor.register_load_state_dict_pre_hook(_scatter)


def _gather(factor: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Replaces a sharded factor by the full one. Collective over the ranks of the experts."""
    name = prefix + "weight"
    if isinstance(state_dict.get(name), DTensor):
        state_dict[name] = state_dict[name].detach().full_tensor()


def _scatter(factor: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    from transformers.distributed.sharding_utils import DtensorShardOperation

    name, own = prefix + "weight", factor.weight
    whole = state_dict.get(name)
    if isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor) and whole.shape == own.shape:
        part = DtensorShardOperation(own).shard_tensor(whole)
        state_dict[name] = DTensor.from_local(
            part, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
        )


def of(experts: Any) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Returns A and B, by name, of all adapters on these experts (also inactive ones) that this rank has in part."""
    found: tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]] = {}, {}
    shared = _shared.get(experts)
    # In the same order on all ranks.
    for wrapper in () if shared is None else sorted(shared.wrappers, key=lambda each: str(each.parameter_name)):
        for which, parameters in zip(_FACTORS, found):
            for adapter, factor in sorted(getattr(wrapper, which).items()):
                if isinstance(factor.weight, DTensor):
                    parameters[f"{wrapper.parameter_name}.{which}.{adapter}"] = factor.weight
    return found
