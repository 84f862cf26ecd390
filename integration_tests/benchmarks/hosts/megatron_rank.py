# SPDX-License-Identifier: Apache-2.0
"""Ranks of compare.py: a stock `MoELayer` and one of Sluice's class with the same weights."""

from typing import Any

import sluice
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from sluice.megatron import with_sluice

from integration_tests.benchmarks.hosts import compare_rank
from integration_tests.benchmarks.layer import routing
from integration_tests.megatron import cpu_shim  # before megatron

ACTIVATIONS = {True: torch.nn.functional.silu, False: torch.nn.functional.gelu}


def _config(cell: dict[str, Any]) -> TransformerConfig:
    dtype = getattr(torch, cell["dtype"])
    return TransformerConfig(
        num_layers=1,
        hidden_size=cell["M"],
        num_attention_heads=8,
        ffn_hidden_size=cell["H"],
        moe_ffn_hidden_size=cell["H"],
        num_moe_experts=cell["E"],
        moe_router_topk=cell["K"],
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=cell["K"]
        == 1,  # with a softmax over the chosen experts, the probability of a single route would always be 1
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        gated_linear_unit=cell["gated"],
        activation_func=ACTIVATIONS[cell["gated"]],
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )


def _call(layer: MoELayer, tokens: torch.Tensor) -> torch.Tensor:
    """Calls a layer without the shim, which adds time to torch calls. A backward makes few calls that the shim sees."""
    with cpu_shim.off():
        return layer(tokens)[0]


def make(cell: dict[str, Any]) -> compare_rank.Sides:
    """Both sides. The first E numbers of a token are its logits (routing.py)."""
    config = _config(cell)
    spec = get_gpt_layer_local_spec(num_experts=cell["E"], moe_grouped_gemm=False).submodules.mlp
    torch.manual_seed(3)
    layers = {"stock": build_module(spec, config=config), "sluice": build_module(with_sluice(spec), config=config)}
    stock: MoELayer = layers["stock"]
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
            if name == "router.weight":
                parameter.copy_(torch.eye(*parameter.shape))
    for layer in layers.values():
        layer.set_layer_number(1)
        layer.load_state_dict(stock.state_dict())
        layer.to(config.params_dtype).train()
    rank = dist.get_rank()
    chosen = routing.assignments(cell["T"], cell["E"], cell["K"], cell["skew"], 13 + rank)
    tokens = routing.tokens(chosen, cell["E"], cell["M"], 17 + rank).to(config.params_dtype).unsqueeze(1)
    return compare_rank.Sides(
        layers=layers,
        call=_call,
        tokens=tokens,
        rows=torch.bincount(chosen.flatten(), minlength=cell["E"]),
        stats=lambda: sluice.stats(layers["sluice"])["contexts"][0],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=dist.get_world_size())
    compare_rank.run(make)
