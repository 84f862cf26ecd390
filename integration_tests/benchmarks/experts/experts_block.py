# SPDX-License-Identifier: Apache-2.0
"""The experts blocks that benchmarks measure: model shapes, a transformers module, and rows with skewed routing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts


@dataclass(frozen=True)
class Shape:
    """M, H, E, K of a model's experts."""

    model: int
    hidden: int
    experts: int
    top_k: int


SHAPES = {
    "mixtral": Shape(1024, 3584, 8, 2),
    "qwen3": Shape(2048, 768, 128, 8),
    "deepseek": Shape(1024, 512, 64, 6),
    "gptoss": Shape(1440, 1440, 32, 4),
    "smoke": Shape(64, 32, 8, 2),
}


@dataclass
class Rows:
    """Inputs of a call and the gradient of its output."""

    tokens: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    grad: torch.Tensor


def make_module(shape: Shape, dtype: torch.dtype) -> Any:
    """Gated SiLU experts as transformers stores them."""
    config = SimpleNamespace(
        num_experts=shape.experts,
        hidden_size=shape.model,
        moe_intermediate_size=shape.hidden,
        hidden_act="silu",
        _experts_implementation="sluice",
    )
    torch.manual_seed(0)
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module.to(dtype)


def make_rows(shape: Shape, tokens: int, dtype: torch.dtype) -> Rows:
    """Skewed routing: expert e is drawn in proportion to 1 / (e + 8)."""
    gen = torch.Generator().manual_seed(1)
    share = 1.0 / (torch.arange(shape.experts) + 8.0)
    ids = torch.multinomial(share.repeat(tokens, 1), shape.top_k, generator=gen)
    return Rows(
        torch.randn(tokens, shape.model, generator=gen).to(dtype),
        ids,
        torch.softmax(torch.randn(tokens, shape.top_k, generator=gen), -1),
        torch.randn(tokens, shape.model, generator=gen).to(dtype),
    )


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """The duration of `action` and its result."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result
