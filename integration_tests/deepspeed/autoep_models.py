# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose MoE blocks DeepSpeed's AutoEP replaces, trained stock or through Sluice.

Models of transformers are imported on demand, because the import takes seconds. `autoep_custom` does not need them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import autoep_custom
import ds_models
import torch
import torch.distributed as dist
from torch import nn

VOCABULARY = 61
SLUICE = {"enabled": True, "chunks": 2, "timeout": 120}


def build(kind: str, seed: int = 3, **shape: int) -> nn.Module:
    """Returns the same model on every call and rank, with expert weights large enough to affect the loss. shape:
    "experts" and "chosen" (per token) of a custom model."""
    torch.manual_seed(seed)
    if kind in autoep_custom.LAYOUTS:
        model: nn.Module = autoep_custom.Custom(kind, VOCABULARY, **shape)
    else:
        import autoep_presets

        model = autoep_presets.build(kind, VOCABULARY)
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def expert_parallel(kind: str, size: int = 2, **changes: Any) -> dict[str, Any]:
    """Returns the host's section with a loop over experts, which is the host's choice on a CPU."""
    preset = {"qwen2_moe": "qwen3_moe"}.get(kind, kind)
    section = {"enabled": True, "autoep_size": size, "preset_model": preset, "use_grouped_mm": False}
    if kind in autoep_custom.LAYOUTS:
        section.update(autoep_custom.section(kind))
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
    """Trains, and returns values for the comparison of two runs, with tensors as flat lists. check, before: called with
    engine and step before each update, and before each forward."""
    model = build(kind, **(shape or {}))
    if prepare is not None:
        prepare(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    host = engine(model, expert_parallel(kind, **(section or {})), sluice, **(config or {}))
    if sluice is not None:
        assert len(host.sluice.layers) == len(moe_layers(host.module)), host.sluice.refused
    losses = []
    for step in range(steps):
        if before is not None:
            before(host, step)
        ids = batch(step, length=12 if lengths is None else lengths[step])
        context = torch.autocast("cpu", getattr(torch, autocast)) if autocast else contextlib.nullcontext()
        with context:
            loss = host(input_ids=ids, labels=ids, use_cache=False).loss
        host.backward(loss)
        if check is not None:
            check(host, step)
        host.step()
        losses.append(float(loss.detach()))
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
