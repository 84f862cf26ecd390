# SPDX-License-Identifier: Apache-2.0
"""Rank-side: rare but valid sections of ds_config and ways to use an engine."""

import contextlib
from collections.abc import Callable
from typing import Any

import cases_parity
import ds_models as models
import sluice
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from ds_models import SLUICE, build, ds_config, engine


def profiled_macs(kind: str) -> list[int]:
    """Returns counts of DeepSpeed's flops profiler on rank 0, for a step computed in C and one that calls modules."""
    counted = []
    profiler = {"enabled": True, "profile_step": 1, "output_file": "/dev/null"}
    for is_called in (False, True):
        layers = [{"ep_size": 1, "expert": kind, "drop_tokens": False}]
        host = engine(build(layers), ds_config(flops_profiler=profiler), SLUICE)
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
    """Trains in fp16 under ZeRO 1 with a loss scale that overflows at first.

    [losses, steps skipped, loss scale] of stock and of Sluice
    """
    if not get_accelerator().is_fp16_supported():
        return None
    scale = {"enabled": True, "initial_scale_power": 28, "hysteresis": 1}
    found = []
    for section in (None, SLUICE):
        host = engine(
            build([{"k": 2}, {"expert": "tuple"}]), ds_config(fp16=scale, zero_optimization={"stage": 1}), section
        )
        losses = []
        for step in range(steps):
            torch.manual_seed(77 * step + dist.get_rank())
            x, target = models.batch(step, dtype=torch.float16)
            loss = host(x, target)
            host.backward(loss)
            host.step()
            losses.append(float(loss.detach()))
        found.append([losses, host.skipped_steps, float(host.loss_scale())])
        if section is not None:
            host.sluice.unswap()
    return found


def _evaluation(host: Any, mode: Callable[[], contextlib.AbstractContextManager[Any]], length: int) -> float:
    host.eval()
    with mode():
        loss = float(host(*models.batch(1000 + length, length)))
    host.train()
    return loss


def evaluated_between(mode: str, sluice_section: dict[str, Any]) -> Any:
    """The very first call, and calls between the micro-steps of a step, are evaluations with other lengths.

    [losses, evaluations] of stock and of Sluice
    """
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    layers = [{"k": 2, "top2_2nd_expert_sampling": False}, {"k": 2, "top2_2nd_expert_sampling": False}]
    layers[1]["expert"] = "tuple"
    found = []
    for section in (None, {**SLUICE, **sluice_section}):
        host = engine(build(layers), ds_config(gradient_accumulation_steps=2), section)
        losses, evaluations = [], [_evaluation(host, modes[mode], 20)]
        for step in range(6):
            loss = host(*models.batch(step))
            host.backward(loss)
            evaluations.append(_evaluation(host, modes[mode], 5 + step))
            host.step()
            losses.append(float(loss.detach()))
        found.append([losses, evaluations])
        if section is not None:
            host.sluice.unswap()
    return found


def _only_gates_learn(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("gate.wg" in name)


def _experts_are_frozen(model: Any) -> None:
    for moe in model.moes:
        moe.deepspeed_moe.experts.requires_grad_(False)


def _one_expert_is_frozen(model: Any) -> None:
    """Freezes one expert on rank 0 only, in the fused layer and in the layer that calls modules."""
    if dist.get_rank() == 0:
        for moe in model.moes:
            moe.deepspeed_moe.experts.deepspeed_experts[0].requires_grad_(False)


def _first_layer_has_no_gradient_to_give(model: Any) -> None:
    model.first.requires_grad_(False)


FROZEN = {
    "all but the gates": _only_gates_learn,
    "experts": _experts_are_frozen,
    "one expert": _one_expert_is_frozen,
    "what is before the experts": _first_layer_has_no_gradient_to_give,
}


def frozen(what: str) -> Any:
    """Returns [stock, through Sluice] with a part of the model frozen."""
    layers = [{"k": 2, "expert": "gated"}, {"k": 2, "expert": "tuple"}]
    return cases_parity.parity(layers, 5, prepare=FROZEN[what])


def shared_layer(sluice_section: dict[str, Any]) -> Any:
    """Returns losses of stock and of Sluice with one layer that the model calls twice in a forward."""
    found = []
    for section in (None, {**SLUICE, **sluice_section}):
        model = build([{"k": 2, "top2_2nd_expert_sampling": False}])
        model.moes.append(model.moes[0])
        host = engine(model, ds_config(), section)
        losses = []
        for step in range(6):
            loss = host(*models.batch(step))
            host.backward(loss)
            host.step()
            losses.append(float(loss.detach()))
        found.append(losses)
        if section is not None:
            assert len(host.sluice.layers) == 1
            host.sluice.unswap()
    return found


def swapped_again() -> Any:
    """Returns losses of stock, and of a training that is unswapped in the middle and swapped again by hand."""
    from sluice.adapters.deepspeed import swap
    from sluice.config import Options

    layers = [{"k": 2, "top2_2nd_expert_sampling": False}, {"ep_size": 1, "expert": "tuple"}]
    found = []
    for section in (None, SLUICE):
        host = engine(build(layers), ds_config(), section)
        losses = []
        handle = None
        for step in range(9):
            torch.manual_seed(step)
            if section is not None and step == 3:
                host.sluice.unswap()
            if section is not None and step == 6:
                handle = swap(host.module, Options(chunks=3, timeout=60))
                assert len(handle.layers) == 2
            loss = host(*models.batch(step))
            host.backward(loss)
            host.step()
            losses.append(float(loss.detach()))
        if handle is not None:
            handle.unswap()
        found.append(losses)
    return found
