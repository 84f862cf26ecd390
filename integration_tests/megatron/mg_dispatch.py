# SPDX-License-Identifier: Apache-2.0
"""Rank-side of test_mg_dispatch.py: calls layers whose experts return their rows, step by step as schedules do."""

import os
from pathlib import Path
from typing import Any

import mg_models
import sluice
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer

WIDTH, EXPERTS, TOP_K = 32, 8, 2
_SHAPE: dict[str, Any] = {
    "num_layers": 1,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_router_dtype": "fp32",
    "moe_z_loss_coeff": None,
    "moe_aux_loss_coeff": 0.0,
}


def _layer(ep: int, how: str, **changes: Any) -> MoELayer:
    options = {"gemm": "host", "chunks": 2}
    model = mg_models.model_of(ep, how, options, **{**_SHAPE, **changes})
    return next(module for module in model.modules() if isinstance(module, MoELayer))


def _identity_layer(ep: int, how: str, **changes: Any) -> MoELayer:
    """Returns a layer of ReLU between two unit matrices, which leaves positive rows and gradients unchanged."""
    same = {"gated_linear_unit": False, "activation_func": "relu", "moe_ffn_hidden_size": WIDTH}
    layer = _layer(ep, how, **same, **changes)
    with torch.no_grad():
        for expert in layer.experts.local_experts:
            for linear in (expert.linear_fc1, expert.linear_fc2):
                linear.weight.copy_(torch.eye(WIDTH))
    return layer


def _hidden(*shape: int) -> torch.Tensor:
    """Returns positive hidden states, different on each rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return (torch.rand(*shape, WIDTH, generator=generator) + 0.1).requires_grad_()


def _experts(layer: MoELayer, hidden: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Runs the host's forward after the router."""
    rows, weights = layer.dispatch(*layer.preprocess(hidden, probs, chosen))
    output, _ = layer.routed_experts_compute(rows, weights)
    return layer.postprocess(layer.combine(output), None)


def round_trip(ep: int, how: str, **changes: Any) -> dict[str, Any]:
    """Runs a layer with probabilities of 1 / K for all routes, and returns the errors of outputs and gradients. With a
    capacity a token is returned once per kept route."""
    layer = _identity_layer(ep, how, **changes)
    hidden = _hidden(16, 2)
    probs, chosen = layer.route(hidden)
    kept = (probs.detach() != 0).float()
    output = _experts(layer, hidden, kept / TOP_K, chosen)
    wanted = hidden.detach() * (kept.sum(1) / TOP_K).view(16, 2, 1)
    output.backward(hidden.detach())
    assert hidden.grad is not None
    return {
        "output": float((output - wanted).abs().max()),
        "gradient": float((hidden.grad - wanted).abs().max()),
        "kept": float(kept.sum()) / (TOP_K * len(kept)),
        "ran": _passes(layer),
    }


def _passes(layer: MoELayer) -> int:
    return int(sluice.stats(layer)["contexts"][0]["num_passes"]) if getattr(layer, "_sluice", None) is not None else 0


def padded_beside_plain(ep: int, how: str) -> dict[str, Any]:
    """Compares layers with and without padding to the same capacity, with the router's own probabilities."""
    outputs, gradients, full = [], [], []
    for padded in (False, True):
        layer = _layer(ep, how, moe_expert_capacity_factor=0.6, moe_pad_expert_input_to_capacity=padded)
        hidden = _hidden(16, 2)
        probs, chosen = layer.route(hidden)
        output = _experts(layer, hidden, probs, chosen)
        output.backward(output.detach())
        outputs.append(output.detach())
        gradients.append(hidden.grad)
        full.append(sorted(set(chosen.sum(0).tolist())))
    return {
        "output": float((outputs[0] - outputs[1]).abs().max()),
        "gradient": float((gradients[0] - gradients[1]).abs().max()),
        "size": float(outputs[0].abs().max()),
        "counts": full,
    }


def router_losses(ep: int, how: str, scale: float = 1.0) -> list[float]:
    """Returns the router's gradient, summed, if outputs have no gradient: without a loss of the router, with an aux
    loss, with a z-loss. scale: of these losses, as Megatron's schedules set it."""
    layer = _layer(ep, how)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale))
    sums = []
    for aux, z in ((0.0, None), (1.0, None), (0.0, 1.0)):
        layer.config.moe_aux_loss_coeff, layer.config.moe_z_loss_coeff = aux, z
        layer.router.weight.grad = None
        output, _ = layer(_hidden(16, 2))
        (output.sum() * 0).backward()
        sums.append(float(layer.router.weight.grad.abs().sum()))
    return sums


def router_dtypes(ep: int, how: str) -> list[list[str]]:
    """Returns the dtypes of probabilities and outputs of a layer in bf16 for each moe_router_dtype."""
    found = []
    for wanted in (None, "fp32", "fp64"):
        layer = _layer(ep, how, moe_router_dtype=wanted).to(torch.bfloat16)
        hidden = _hidden(16, 2).detach().bfloat16()
        with torch.no_grad():
            probs, _ = layer.route(hidden)
            output, _ = layer(hidden)
        found.append([str(probs.dtype).removeprefix("torch."), str(output.dtype).removeprefix("torch.")])
    return found


def resharded_in_turn(folder: str, gated: bool) -> dict[str, Any]:
    """Saves with 4 expert-parallel ranks, loads and saves with 2, then with 4, and returns each folder's contents."""
    folders = [Path(folder) / str(number) for number in range(3)]
    for number, ep in enumerate((4, 2, 4)):
        model = mg_models.model_of(
            ep, "decorated", gated_linear_unit=gated, activation_func="silu" if gated else "gelu"
        )
        if number:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(dist_checkpointing.load(_sharded(model), str(folders[number - 1])))
        if dist.get_rank() == 0:
            os.makedirs(folders[number])
        dist.barrier()
        dist_checkpointing.save(_sharded(model), str(folders[number]))
    first, *others = [dist_checkpointing.load_plain_tensors(str(each)) for each in folders]
    return {
        "experts": sorted(name for name in first if "experts" in name and "_extra_state" not in name),
        "same": [_is_same(first, other) for other in others],
        "largest": max(float(value.abs().max()) for name, value in first.items() if "linear_fc2" in name),
    }


def _sharded(model: Any) -> Any:
    groups = mg_models.parallel_state
    return model.sharded_state_dict(
        metadata={"dp_cp_group": groups.get_data_parallel_group(with_context_parallel=True)}
    )


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items() if isinstance(value, torch.Tensor)
    )
