# SPDX-License-Identifier: Apache-2.0
"""Rank-side: the same training with stock DeepSpeed and through Sluice, in one process group."""

from __future__ import annotations

import functools
import re
from typing import Any

import ds_models as models
import torch


def parity(layers: list[dict[str, Any]], steps: int = 10, sluice: dict[str, Any] | None = None, **how: Any) -> Any:
    """Returns (stock, through Sluice): the results of `models.train`."""
    stock = models.train(layers, steps, None, **how)
    swapped = models.train(layers, steps, {**models.SLUICE, **(sluice or {})}, **how)
    return [stock, swapped]


def _freeze(model: Any, patterns: list[str]) -> None:
    for name, parameter in model.named_parameters():
        place = f"rank {torch.distributed.get_rank()}: {name}"
        parameter.requires_grad_(not any(re.search(pattern, place) for pattern in patterns))


def parity_frozen(layers: list[dict[str, Any]], frozen: list[str], **how: Any) -> Any:
    """Runs `parity` with frozen parameters: those with one of these patterns in "rank RANK: NAME"."""
    return parity(layers, prepare=lambda model: _freeze(model, frozen), **how)


def refused_frozen(layers: list[dict[str, Any]], frozen: list[str], **how: Any) -> str:
    """Returns the error of a training with these frozen parameters, or "none"."""
    try:
        models.train(layers, 1, models.SLUICE, prepare=lambda model: _freeze(model, frozen), **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def parity_of_lengths(layers: list[dict[str, Any]], lengths: list[int], sluice: dict[str, Any]) -> Any:
    """Runs `parity` with one step for each of the sequence lengths."""
    return parity(layers, len(lengths), sluice, data=lambda step, _, dtype: models.batch(step, lengths[step], dtype))


def same_with_every_policy(layers: list[dict[str, Any]], policies: list[Any], **how: Any) -> Any:
    """Returns the result of `models.train` with each policy, and everything else equal."""
    section = {**models.SLUICE, "chunks": 3, "chunking": "tokens"}  # equal bits require equal chunks
    return [models.train(layers, 4, {**section, "policy": policy}, **how) for policy in policies]


def parity_through_masks(layers: list[dict[str, Any]], steps: int = 10, **how: Any) -> Any:
    """Runs `parity` with dense masks requested from the gate, as in DeepSpeed before 0.19.4."""
    from sluice.adapters.deepspeed.moe import probe

    known = probe.gate_format
    probe.gate_format = lambda gate: probe.DENSE
    try:
        return parity(layers, steps, **how)
    finally:
        probe.gate_format = known


def _reorder_sums(seed: int, model: Any) -> None:
    """Permutes the hidden units of each expert. The training is the same, but GEMMs sum in another order."""
    generator = torch.Generator().manual_seed(seed)
    for moe in model.moes:
        for expert in moe.deepspeed_moe.experts.deepspeed_experts:
            up, down = expert[0], expert[2]
            order = torch.randperm(up.out_features, generator=generator)
            with torch.no_grad():
                up.weight.copy_(up.weight[order].clone())
                up.bias.copy_(up.bias[order].clone())
                down.weight.copy_(down.weight[:, order].clone())


def long_run(steps: int) -> Any:
    """Returns losses through Sluice, of stock, and of stock runs that differ only in the order of sums."""
    layers = [{"k": 2, "expert": "gelu"}, {"noisy_gate_policy": "RSample"}]
    stock = [models.train(layers, steps, None)["losses"]]
    for seed in range(1, 6):
        stock.append(models.train(layers, steps, None, prepare=functools.partial(_reorder_sums, seed))["losses"])
    return {"stock": stock, "sluice": models.train(layers, steps, models.SLUICE)["losses"]}


def idle_here_busy_there(stage: int) -> Any:
    """Trap 1 under ZeRO: ranks 0 and 1 (one EP group) use only expert 0, ranks 2 and 3 (the other) only expert 1.

    Ranks 0 and 2 own both experts, and reduce their gradients together: [[counts by step], stock, through Sluice]
    """

    def prepare(model: Any) -> None:
        with torch.no_grad():
            model.first.weight.copy_(torch.eye(models.WIDTH))
            model.first.bias.zero_()
            gate = model.moes[0].deepspeed_moe.gate.wg.weight
            gate.zero_()
            gate[0], gate[1] = 1.0, -1.0  # so different that a few steps do not change the routes

    def data(step: int, length: int | None, dtype: torch.dtype) -> Any:
        x, target = models.batch(step, length, dtype)
        return (x.abs() + 0.1) * (1 if torch.distributed.get_rank() < 2 else -1), target

    layers = [{"num_experts": 4, "ep_size": 2, "capacity_factor": 8.0}]
    how = {"prepare": prepare, "data": data, "config": {"zero_optimization": {"stage": stage}}}
    return [models.train(layers, 4, section, **how) for section in (None, models.SLUICE)]
