# SPDX-License-Identifier: Apache-2.0
"""A custom model whose MoE blocks AutoEP finds by patterns, with each layout of experts that AutoEP supports."""

import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HIDDEN = 32, 24
LAYOUTS = ("looped", "stacked", "transposed")


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.fc_up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.fc_down = nn.Linear(HIDDEN, WIDTH, bias=False)


class _Stacked(nn.Module):
    """[E, out, in], gate and up in separate tensors."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.fc_gate = nn.Parameter(torch.empty(experts, HIDDEN, WIDTH))
        self.fc_up = nn.Parameter(torch.empty(experts, HIDDEN, WIDTH))
        self.fc_down = nn.Parameter(torch.empty(experts, WIDTH, HIDDEN))


class _Transposed(nn.Module):
    """[E, in, out], gate and up in one tensor."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.fc_gate = nn.Parameter(torch.empty(experts, WIDTH, 2 * HIDDEN))
        self.fc_down = nn.Parameter(torch.empty(experts, HIDDEN, WIDTH))


class _Block(nn.Module):
    def __init__(self, layout: str, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=True)
        self.experts = {
            "looped": lambda count: nn.ModuleList(_Expert() for _ in range(count)),
            "stacked": _Stacked,
            "transposed": _Transposed,
        }[layout](experts)
        self.common = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, WIDTH))
        self.common_gate = nn.Linear(WIDTH, 1)


class _Layer(nn.Module):
    def __init__(self, layout: str, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = _Block(layout, experts)


class Custom(nn.Module):
    """A language model with two layers that contain only an MoE block."""

    def __init__(self, layout: str, vocabulary: int, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(n_experts=experts, k=chosen, model_type="nobodys")
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(_Layer(layout, experts) for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool = False) -> Any:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer.moe(layer.norm(hidden))
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        return types.SimpleNamespace(loss=F.cross_entropy(logits.float(), labels[:, 1:].flatten()))


def section(layout: str) -> dict[str, Any]:
    """Returns the `expert_parallel` section for the custom model."""
    return {
        "preset_model": None,
        "moe_layer_pattern": r"layers\.\d+\.moe",
        "router_pattern": "router",
        "expert_pattern": "experts",
        "expert_w1": "fc_gate",
        "expert_w2": "fc_down",
        "expert_w3": None if layout == "transposed" else "fc_up",  # None: w1 and w3 are one tensor
        "num_experts_attr": "n_experts",
        "top_k_attr": "k",
        "has_shared_experts": True,
        "shared_experts_pattern": "common",
        "shared_experts_gate_pattern": "common_gate",
    }
