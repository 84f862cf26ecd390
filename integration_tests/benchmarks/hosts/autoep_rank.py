# SPDX-License-Identifier: Apache-2.0
"""Ranks of compare.py: two engines with the same model of one layer, one of them with the key "sluice"."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import sluice
import torch
import torch.distributed as dist

from integration_tests.benchmarks.hosts import compare_rank

sys.path.append(str(Path(__file__).resolve().parents[2] / "deepspeed"))
import autoep_presets

VOCABULARY = 64
# The fields of each config that hold the number of experts and the hidden width.
NAMES = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    "deepseek_v2": ("n_routed_experts", "moe_intermediate_size"),
}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 10**9,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


def _model(cell: dict[str, Any]) -> Any:
    """The tiny model of the tests with one layer of the cell's widths. Every call on every rank gives the same."""
    experts, hidden = NAMES[cell["kind"]]
    sizes = {"hidden_size": cell["M"], "num_hidden_layers": 1, "num_experts_per_tok": cell["K"]}
    sizes |= {experts: cell["E"], hidden: cell["H"]}
    if cell["kind"] == "deepseek_v2":
        sizes["first_k_dense_replace"] = 0
    return autoep_presets.build(cell["kind"], VOCABULARY, **sizes)


def _layer(cell: dict[str, Any], section: dict[str, Any] | None) -> Any:
    model = _model(cell)
    parallel = {
        "enabled": True,
        "autoep_size": dist.get_world_size(),
        "preset_model": cell["kind"],
        "use_grouped_mm": False,
    }
    config = {**CONFIG, "expert_parallel": parallel, "bf16": {"enabled": cell["dtype"] == "bfloat16"}}
    if section is not None:
        config["sluice"] = section
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    (found,) = [module for module in engine.module.modules() if getattr(module, "_is_autoep_layer", False)]
    return found


def _call(layer: Any, tokens: torch.Tensor) -> torch.Tensor:
    output = layer(tokens)
    return output[0] if isinstance(output, tuple) else output


def make(cell: dict[str, Any]) -> compare_rank.Sides:
    """Both sides, and the rows that the host's router sends to each expert."""
    layers = {"stock": _layer(cell, None), "sluice": _layer(cell, {"enabled": True})}
    dtype = getattr(torch, cell["dtype"])
    generator = torch.Generator().manual_seed(17 + dist.get_rank())
    tokens = torch.randn(1, cell["T"], cell["M"], generator=generator).to(dtype)
    stock = layers["stock"]
    with torch.no_grad():
        _, chosen, _ = stock.router(tokens[0], stock.expert_bias)
    return compare_rank.Sides(
        layers=layers,
        call=_call,
        tokens=tokens,
        rows=torch.bincount(chosen.flatten().long(), minlength=cell["E"]),
        stats=lambda: sluice.stats(layers["sluice"])["contexts"][0],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    compare_rank.run(make)
