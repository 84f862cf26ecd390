# SPDX-License-Identifier: Apache-2.0
"""Refuses models without trainable parameters before the engine makes its optimizer. Otherwise one rank of the host
raises an unclear error, and the other ranks wait for that rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from sluice.adapters.common import agree
from sluice.adapters.deepspeed.pipeline import stage_module
from sluice.adapters.deepspeed.unsupported import UnsupportedError


def require_trained(engine: Any, client_optimizer: Any, given: Any, wait_s: float | None) -> None:
    """Raises UnsupportedError on all ranks if one has a reason. given: the engine's argument for its optimizer.
    Collective over all ranks."""
    own = {"refused": _reason(engine, client_optimizer, given), "experts": _experts(engine)}
    answers = agree.exchange(range(dist.get_world_size()), dist.get_rank(), own, wait_s)
    for rank, answer in answers.items():
        if answer["refused"]:
            raise UnsupportedError(f"{answer['refused']} (on rank {rank})")
    first: dict[str, tuple[int, bool]] = {}
    for rank, answer in answers.items():
        for name, trains in answer["experts"].items():
            other, other_trains = first.setdefault(name, (rank, trains))
            if trains != other_trains:
                raise UnsupportedError(
                    f"layer {name}: no expert of rank {other if trains else rank} has a trainable parameter, and "
                    f"those of rank {rank if trains else other} have: in 16 bits DeepSpeed's optimizer has a group "
                    "of experts only on ranks that train some, and these wait for all ranks: leave a parameter "
                    "trainable on each rank"
                )


def _experts(engine: Any) -> dict[str, bool]:
    """Returns, in 16 bits, for each layer with experts on several ranks, whether this rank trains any of them."""
    if not (engine.bfloat16_enabled() or engine.fp16_enabled()):
        return {}
    names = {id(module): name for name, module in engine.module.named_modules()}
    return {
        names[id(layer)]: any(parameter.requires_grad for parameter in layer.experts.parameters())
        for layer in engine.sluice.layers
        if getattr(layer, "ep_size", 1) > 1 and id(layer) in names
    }


def _reason(engine: Any, client_optimizer: Any, given: Any) -> str:
    """Returns why this rank's part cannot be trained; "": it can."""
    if client_optimizer is None and engine.sluice.pipeline is not None:
        if not any(len(each["params"]) if isinstance(each, dict) else True for each in given):
            return (
                f"{stage_module.named(engine.module)} has no trainable parameter: partition the model so that it "
                "gets a layer with some"
            )
    if engine.zero_optimization():
        for name, params in _groups(client_optimizer, given):
            if params and not any(parameter.requires_grad for parameter in params):
                return (
                    f"{name} has {len(params)} parameters, all of them frozen, but ZeRO needs a trainable one in "
                    "each group of the optimizer: pass only trainable parameters, or disable ZeRO"
                )
        everything = [parameter for _, params in _groups(client_optimizer, given) for parameter in params]
        if engine.has_moe_layers and all(getattr(parameter, "allreduce", True) for parameter in everything):
            return (
                "the optimizer gets no parameter of an expert, but ZeRO needs one on each rank of a model with MoE "
                "layers: leave one trainable, or disable ZeRO"
            )
    return ""


def _groups(client_optimizer: Any, given: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yields parameter groups, and the experts of each group of ranks, for which the host makes its own groups."""
    groups = getattr(client_optimizer, "param_groups", None) or [each for each in given if isinstance(each, dict)]
    for index, group in enumerate(groups):
        if isinstance(group["params"], (list, tuple)):
            name = f" ({group['name']})" if "name" in group else ""
            yield f"parameter group {index}{name} of the optimizer", list(group["params"])
    if groups:
        return
    found: dict[str, list[Any]] = {}
    for parameter in given:
        is_expert = not getattr(parameter, "allreduce", True)
        name = f"experts {getattr(parameter, 'group_name', '')}" if is_expert else "all parameters except experts"
        found.setdefault(f"the group of {name}", []).append(parameter)
    yield from found.items()
