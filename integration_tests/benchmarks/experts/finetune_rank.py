# SPDX-License-Identifier: Apache-2.0
"""Measures one side of finetune.py: seconds of its steps, under the names that finetune.MARKS uses.

Seconds are the CPU time of one thread, which other processes of the machine disturb less.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import sluice  # must come before PEFT wraps experts
import torch
from peft import LoraConfig, get_peft_model
from sluice.adapters.torch import Format, quantise
from sluice.adapters.transformers.packed_stack import PackedStack

from integration_tests.benchmarks.experts.experts_block import SHAPES, Shape, make_module
from integration_tests.benchmarks.measuring.rank import Rank, balanced_ids

STACKS = ("gate_up_proj", "down_proj")
CALLS = 4  # short calls without gradients are timed this many times as often as steps


def block(plan: dict[str, Any], shape: Shape) -> Any:
    """The experts of a side, with its adapters or packed weights. Only adapters are trained."""
    module, dtype = make_module(shape, getattr(torch, plan["dtype"])), getattr(torch, plan["dtype"])
    module.requires_grad_(False)
    if plan["side"] == "packed":
        form = Format("mxfp4")
        for name in STACKS:
            packed = PackedStack(*quantise(getattr(module, name), form), form, False, dtype)
            module._parameters[name] = torch.nn.Parameter(packed, requires_grad=False)
    if plan["side"] not in ("lora", "stock"):
        return module
    if plan["side"] == "stock":
        module.config._experts_implementation = "grouped_mm"
    whole = torch.nn.Module()
    whole.experts = module
    names = [f"experts.{name}" for name in STACKS]
    get_peft_model(whole, LoraConfig(r=plan["rank"], target_parameters=names))
    for name, parameter in whole.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return whole.experts


def rows_of(shape: Shape, tokens: int, dtype: torch.dtype) -> Callable[[Any], Any]:
    """A function that runs a step of `tokens` tokens, or only the forward if gradients are off."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(tokens, shape.model, generator=generator).to(dtype) for _ in range(2))
    ids, weights = balanced_ids(tokens, shape.experts, shape.top_k), torch.full((tokens, shape.top_k), 1 / shape.top_k)

    def step(module: Any) -> None:
        if not torch.is_grad_enabled():
            module(x, ids, weights)
            return
        module.zero_grad(set_to_none=True)
        module(x.detach().requires_grad_(), ids, weights).backward(grad)

    return step


def main() -> None:
    rank = Rank()
    plan = rank.plan
    full = SHAPES[plan["shape"]]
    shape = dataclasses.replace(full, experts=plan["experts"] or full.experts)
    module, dtype = block(plan, shape), getattr(torch, plan["dtype"])

    def median(tokens: int, count: int) -> float:
        step, took = rows_of(shape, tokens, dtype), []
        for _ in range(2 + count):
            began = time.process_time()
            step(module)
            took.append(time.process_time() - began)
        return statistics.median(took[2:])

    found = {}
    if plan["side"] != "packed":
        found["step"] = median(plan["tokens"] * shape.experts // full.experts, plan["steps"])
    if plan["side"] in ("frozen", "packed"):
        for rows in (64, 8):
            found[f"rows_{rows}"] = median(rows * shape.experts // shape.top_k, plan["steps"])
        with torch.no_grad():
            found["rows_1"] = median(shape.experts // shape.top_k, CALLS * plan["steps"])
    sluice.give_back()
    rank.leave(found)


main()
