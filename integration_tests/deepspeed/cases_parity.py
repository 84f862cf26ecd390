# SPDX-License-Identifier: Apache-2.0
"""Rank-side: the same training with stock DeepSpeed and through Sluice, in one process group."""

from __future__ import annotations

import functools
import re
from typing import Any
from unittest.mock import patch

import ds_models as models
import sluice
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def parity(layers: list[dict[str, Any]], steps: int = 10, sluice: dict[str, Any] | None = None, **how: Any) -> Any:
    """Returns (stock, through Sluice): the results of `models.train`."""
    stock = models.train(layers, steps, None, **how)
    swapped = models.train(layers, steps, {**models.SLUICE, **(sluice or {})}, **how)
    return [stock, swapped]


def _freeze(model: Any, patterns: list[str]) -> None:
    for name, parameter in model.named_parameters():
        place = f"rank {dist.get_rank()}: {name}"
        parameter.requires_grad_(not any(re.search(pattern, place) for pattern in patterns))


def parity_frozen(layers: list[dict[str, Any]], frozen: list[str], **how: Any) -> Any:
    """Runs `parity` with frozen parameters: those with one of these patterns in "rank RANK: NAME"."""
    return parity(layers, prepare=lambda model: _freeze(model, frozen), **how)


def refused_frozen(layers: list[dict[str, Any]], frozen: list[str], **how: Any) -> str:
    """Returns the error of a training with these frozen parameters."""
    prepare = functools.partial(_freeze, patterns=frozen)
    return models.said(lambda: models.train(layers, 1, models.SLUICE, prepare=prepare, **how))


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

    with patch.object(probe, "gate_format", lambda gate: probe.DENSE):
        return parity(layers, steps, **how)


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
        return (x.abs() + 0.1) * (1 if dist.get_rank() < 2 else -1), target

    layers = [{"num_experts": 4, "ep_size": 2, "capacity_factor": 8.0}]
    how = {"prepare": prepare, "data": data, "config": {"zero_optimization": {"stage": stage}}}
    return [models.train(layers, 4, section, **how) for section in (None, models.SLUICE)]


# ---- rare but valid sections of ds_config and ways to use an engine ----


def profiled_macs(kind: str) -> list[int]:
    """Returns counts of DeepSpeed's flops profiler on rank 0, for a step computed in C and one that calls modules."""
    counted = []
    profiler = {"enabled": True, "profile_step": 1, "output_file": "/dev/null"}
    for is_called in (False, True):
        layers = [{"ep_size": 1, "expert": kind, "drop_tokens": False}]
        host = models.engine(models.build(layers), models.ds_config(flops_profiler=profiler), models.SLUICE)
        layer = host.module.moes[0].deepspeed_moe
        if is_called:
            layer.experts.deepspeed_experts[0].register_forward_hook(lambda *_: None)
        for step in range(2):
            loss = host(*models.batch(step))
            assert sluice.stats(layer)["layers"][0]["computed_by"] == ("host modules" if is_called else "sluice")
            if step == 1 and dist.get_rank() == 0:
                counted.append(host.flops_profiler.get_total_macs())
            host.backward(loss)
            host.step()
        host.sluice.unswap()
    return counted


def half_precision(steps: int) -> Any:
    """Runs `parity` in fp16 under ZeRO 1 with a loss scale that overflows at first. "end": steps skipped, and the loss
    scale."""
    if not get_accelerator().is_fp16_supported():
        return None
    scale = {"enabled": True, "initial_scale_power": 28, "hysteresis": 1}
    how: dict[str, Any] = {"config": {"fp16": scale, "zero_optimization": {"stage": 1}}, "dtype": "float16"}
    end = {"at_end": lambda host: [host.skipped_steps, float(host.loss_scale())]}
    return parity([{"k": 2}, {"expert": "tuple"}], steps, **how, **end)


def evaluated_between(mode: str, sluice_section: dict[str, Any]) -> Any:
    """Runs `parity`. The very first call, and calls between the micro-steps of a step, are evaluations with other
    lengths, whose losses are "end"."""
    found: list[float] = []

    def evaluate(host: Any, length: int) -> None:
        host.eval()
        with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]():
            found.append(float(host(*models.batch(1000 + length, length))))
        host.train()

    def before(host: Any, step: int) -> None:
        if step == 0:
            found.clear()
            evaluate(host, 20)

    layer = {"k": 2, "top2_2nd_expert_sampling": False}
    how: dict[str, Any] = {"config": {"gradient_accumulation_steps": 2}, "before": before}
    how |= {"check": lambda host, step: evaluate(host, 5 + step), "at_end": lambda _: list(found)}
    return parity([layer, {**layer, "expert": "tuple"}], 6, sluice_section, **how)


def shared_layer(sluice_section: dict[str, Any]) -> Any:
    """Runs `parity` with one layer that the model calls twice in a forward."""
    layers = [{"k": 2, "top2_2nd_expert_sampling": False}]
    return parity(layers, 6, sluice_section, prepare=lambda model: model.moes.append(model.moes[0]))


def swapped_again() -> Any:
    """Runs `parity`. Training is unswapped in the middle, and swapped again by hand."""
    from sluice.adapters.deepspeed import swap
    from sluice.config import Options

    def before(host: Any, step: int) -> None:
        if hasattr(host, "sluice") and step == 3:
            host.sluice.unswap()
        if hasattr(host, "sluice") and step == 6:
            host.again = swap(host.module, Options(chunks=3, timeout=60))
            assert len(host.again.layers) == 2

    layers = [{"k": 2, "top2_2nd_expert_sampling": False}, {"ep_size": 1, "expert": "tuple"}]
    end = {"at_end": lambda host: host.again.unswap() if hasattr(host, "again") else None}
    return parity(layers, 9, before=before, **end)
