# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose MoE blocks DeepSpeed's AutoEP replaces, trained stock or through Sluice.

Models of transformers are imported on demand, because the import takes seconds.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import ds_models
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SLUICE = ds_models.SLUICE
VOCABULARY = 61
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
    """A language model with two layers that contain only an MoE block, which AutoEP finds by patterns. layout: of the
    experts, with each of which AutoEP works."""

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


def _section(layout: str) -> dict[str, Any]:
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


def build(kind: str, seed: int = 3, **shape: int) -> nn.Module:
    """Returns the same model on every call and rank, with expert weights large enough to affect the loss. shape:
    "experts" and "chosen" (per token) of a custom model."""
    if kind not in LAYOUTS:
        import autoep_presets

        return autoep_presets.build(kind, VOCABULARY, seed)
    torch.manual_seed(seed)
    model = Custom(kind, VOCABULARY, **shape)
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def expert_parallel(kind: str, size: int = 2, **changes: Any) -> dict[str, Any]:
    """Returns the host's section with a loop over experts, which is the host's choice on a CPU."""
    preset = {"qwen2_moe": "qwen3_moe"}.get(kind, kind)
    section = {"enabled": True, "autoep_size": size, "preset_model": preset, "use_grouped_mm": False}
    if kind in LAYOUTS:
        section.update(_section(kind))
    return {**section, **changes}


def engine(model: nn.Module, section: dict[str, Any], sluice: dict[str, Any] | None, **config: Any) -> Any:
    """Calls only deepspeed.initialize."""
    return ds_models.engine(model, {**ds_models.ds_config(), "expert_parallel": section, **config}, sluice)


def moe_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Returns (name, layer) of the model's AutoEP layers, of which there must be at least one."""
    found = [(name, child) for name, child in model.named_modules() if getattr(child, "_is_autoep_layer", False)]
    assert found
    return found


def batch(step: int, rows: int = 2, length: int = 12) -> torch.Tensor:
    """Returns token ids of this rank and step."""
    generator = torch.Generator().manual_seed(10_000 * (dist.get_rank() + 1) + step)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def train(
    kind: str,
    steps: int,
    sluice: dict[str, Any] | None,
    section: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    autocast: str | None = None,
    prepare: Any = None,
    checkpointing: bool = False,
    lengths: list[int] | None = None,
    check: Callable[[Any, int], None] | None = None,
    before: Callable[[Any, int], None] | None = None,
    shape: dict[str, int] | None = None,
) -> dict[str, Any]:
    """Trains, and returns values for the comparison of two runs, with tensors as flat lists. check, before: of
    `ds_models.losses_of`."""
    model = build(kind, **(shape or {}))
    if prepare is not None:
        prepare(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    host = engine(model, expert_parallel(kind, **(section or {})), sluice, **(config or {}))
    if sluice is not None:
        assert len(host.sluice.layers) == len(moe_layers(host.module)), host.sluice.refused

    def forward(host: Any, step: int) -> torch.Tensor:
        ids = batch(step, length=12 if lengths is None else lengths[step])
        return host(input_ids=ids, labels=ids, use_cache=False).loss

    losses = ds_models.losses_of(host, range(steps), forward, autocast, before, check)
    result = {
        "losses": losses,
        "counts": [layer.tokens_per_expert.tolist() for _, layer in moe_layers(host.module)],
        "weights": {
            name: tensor.detach().double().flatten().tolist() for name, tensor in host.module.named_parameters()
        },
        "kinds": [type(layer).__name__ for _, layer in moe_layers(host.module)],
    }
    if sluice is not None:
        result["stats"] = [state["computed_by"] for state in host.sluice.stats()["layers"]]
        result["sent"] = max((state["bytes_sent"] for state in host.sluice.stats()["contexts"]), default=0)
        host.sluice.unswap()
        result["kinds_after"] = [type(layer).__name__ for _, layer in moe_layers(host.module)]
    host.destroy()
    return result
