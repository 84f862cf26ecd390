# SPDX-License-Identifier: Apache-2.0
"""Reads a `MOELayer` of the host, and finds whether Sluice can run it.

It checks capabilities, never version numbers.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sluice.adapters.deepspeed.moe import experts as experts_module
from sluice.adapters.deepspeed.moe.experts import FusedForm
from sluice.adapters.deepspeed.moe.finding import DTYPES, Finding, ranks_of
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from torch import nn

from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from deepspeed.utils import groups

SPARSE, DENSE = "sparse", "dense"


def probe(layer: MOELayer, layer_id: int, name: str) -> Finding:
    """Describes a layer or raises UnsupportedError. Changes nothing and runs nothing of the model."""

    def refuse(reason: str) -> UnsupportedError:
        return UnsupportedError(f"MoE layer '{name}': {reason}")

    if type(layer) is not MOELayer:
        raise refuse(f"{type(layer).__name__} is a subclass of MOELayer with a forward of its own")
    if "forward" in layer.__dict__:
        raise refuse("its forward was replaced on the instance")
    gate, container = layer.gate, layer.experts
    if not isinstance(gate, TopKGate):
        raise refuse(f"its gate is a {type(gate).__name__}, not a TopKGate")
    layout = gate_format(gate)
    if layout is None:
        raise refuse(
            f"the gate's forward takes {inspect.signature(type(gate).forward)}, which this version does not know"
        )
    if type(container) is not Experts:
        raise refuse(f"its experts are held by a {type(container).__name__}, not by DeepSpeed's own Experts")
    if not _plain_container(container):
        raise refuse("the container of its experts has hooks, a parametrisation or a forward of its own")
    parallel = {"groups.mpu": _tensor_parallel_size(), "its experts": groups._get_expert_model_parallel_world_size()}
    for who, size in parallel.items():
        if size > 1:
            raise refuse(f"tensor parallelism ({who}: {size} ranks) is not supported yet: use tensor-parallel size 1")
    if any(hasattr(parameter, "ds_id") for parameter in layer.parameters()):
        raise refuse(
            "its parameters are partitioned (ZeRO stage 3), which DeepSpeed refuses for such layers: use stage 2"
        )
    modules = list(container.deepspeed_experts)
    for index, expert in enumerate(modules):
        reason = experts_module.unsupported_reason(expert)
        if reason is not None:
            raise refuse(f"expert {index}: {reason}")
    width = int(gate.wg.weight.shape[1])
    form = experts_module.fused_form(modules)
    why = ""
    if isinstance(form, FusedForm) and form.model_width != width:
        form = f"its experts have model width {form.model_width}, the gate {width}"
    if isinstance(form, str):
        form, why = None, form
    sample = _sample(modules, gate, refuse)
    ranks = ranks_of(layer, refuse)
    experts = int(gate.wg.weight.shape[0])
    if experts % len(ranks) != 0 or experts // len(ranks) != len(modules):
        raise refuse(
            f"its gate chooses among {experts} experts, and each of its {len(ranks)} ranks must hold an equal share of "
            f"them (this rank holds {len(modules)}): choose num_experts so that ep_size {len(ranks)} divides it"
        )
    device = device_of_experts(sample)
    if device.type not in ("cpu", "cuda"):
        raise refuse(f"its experts are on {device}; Sluice computes on the CPU and on CUDA devices")
    return Finding(
        layer_id=layer_id,
        name=name,
        ranks=ranks,
        gate_format=layout,
        num_experts=experts,
        top_k=int(gate.k),
        model_width=width,
        dtype=sample.dtype,
        device=device,
        form=form,
        why_not_fused=why,
    )


def gate_format(gate: nn.Module | type[nn.Module]) -> str | None:
    """Returns how to call this gate for routes: its third argument is `use_tutel` up to 0.19.2, then `sparse_routes`.

    The old index format needs Tutel and k = 1, so the dense masks are used there. None: the gate has neither.
    """
    cls = gate if isinstance(gate, type) else type(gate)
    names = list(inspect.signature(cls.forward).parameters)
    if names[:4] == ["self", "input", "used_token", "sparse_routes"]:
        return SPARSE
    if names[:3] == ["self", "input", "used_token"] and names[3:] in ([], ["use_tutel"]):
        return DENSE
    return None


def _plain_container(container: Experts) -> bool:
    return experts_module.untouched(container) and experts_module.untouched(container.deepspeed_experts)


def _tensor_parallel_size() -> int:
    from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size

    return int(bwc_tensor_model_parallel_world_size(groups.mpu))


def _sample(modules: list[nn.Module], gate: TopKGate, refuse: Any) -> torch.Tensor:
    """Returns a tensor with the dtype and device of the experts, or of the gate if experts have no parameters."""
    for tensor in [parameter for expert in modules for parameter in expert.parameters()] or [gate.wg.weight]:
        if tensor.is_floating_point():
            if tensor.dtype not in DTYPES:
                raise refuse(f"its experts are in {tensor.dtype}; float32, bfloat16 and float16 are supported")
            return tensor
    raise refuse("its experts have no floating-point parameters")


def device_of_experts(tensor: torch.Tensor) -> torch.device:
    """Returns the device on which a layer computes."""
    return tensor.device
