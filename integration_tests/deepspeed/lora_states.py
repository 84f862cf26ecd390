# SPDX-License-Identifier: Apache-2.0
"""Compares PEFT's LoRA on the linears of experts, computed by the library, with the modules' own forward.

A forward hook that does nothing makes DeepSpeed's layer on Sluice call its experts as modules.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

# For each state of the adapters: the "computed_by" of `sluice.stats`.
COMPUTED_BY = {
    "one": "sluice",
    "eval with dropout": "sluice",
    "two": "sluice",
    "none active": "sluice",
    "disabled": "sluice",
    "merged": "sluice",
    "loaded": "sluice",
    "dropout": "host modules",
    "unequal ranks": "host modules",
}
REASONS = ("adapter dropout has dropout", "the adapters of its experts differ in number, rank or scale")
MOST_APART = 1e-5


def add(experts: nn.Module, name: str, **config: Any) -> None:
    """Puts an adapter on all linears. B is not zero, so that omitting an adapter changes results."""
    linears = [
        each
        for each, module in experts.named_modules()
        if getattr(module, "weight", None) is not None and "lora_" not in each and "base_layer" not in each
    ]
    inject_adapter_in_model(LoraConfig(target_modules=linears, **config), experts, adapter_name=name)
    torch.manual_seed(7)
    for which, parameter in experts.named_parameters():
        if f"lora_B.{name}." in which:
            nn.init.normal_(parameter, std=0.1)


def _states(experts: nn.Module) -> Iterator[str]:
    """Brings the adapters into each state in turn, and yields its name."""

    def layers() -> list[LoraLayer]:
        return [module for module in experts.modules() if isinstance(module, LoraLayer)]

    def activate(*names: str) -> None:
        for layer in layers():
            layer.set_adapter(list(names))

    add(experts, "default", r=3, lora_alpha=6)
    yield "one"
    add(experts, "dropout", r=2, lora_dropout=0.5)
    activate("dropout")
    experts.eval()
    yield "eval with dropout"
    experts.train()
    yield "dropout"
    add(experts, "second", r=2)
    activate("default", "second")
    yield "two"
    activate()
    yield "none active"
    activate("default")
    for layer in layers():
        layer.enable_adapters(False)
    yield "disabled"
    for layer in layers():
        layer.enable_adapters(True)
        layer.merge()
    yield "merged"
    for layer in layers():
        layer.unmerge()
    state = {key: value * 2 for key, value in get_peft_model_state_dict(experts, adapter_name="default").items()}
    set_peft_model_state_dict(experts, state, adapter_name="default")
    yield "loaded"
    first = next(module for module in experts.modules() if isinstance(module, LoraLayer))
    first.set_adapter(["default", "second"])
    yield "unequal ranks"


def compare(experts: nn.Module, called: list[nn.Module], call: Callable[[], tuple[torch.Tensor, str]]) -> None:
    """Asserts for each state "computed_by", and that results and gradients differ from the modules' by at most
    MOST_APART, relative to their largest value. Each warning appears once.

    experts  the module with the host's experts, whose linears get adapters
    called   the expert modules that the host calls
    call     runs a forward of the host's model; returns the output and "computed_by"
    """
    base = [parameter for name, parameter in experts.named_parameters() if "lora_" not in name]

    def step() -> tuple[str, list[torch.Tensor]]:
        experts.zero_grad(set_to_none=True)
        out, computed_by = call()
        out.sum().backward()
        assert all(parameter.grad is None for parameter in base), "a frozen weight has a gradient"
        # Called modules give zero gradients to parameters that were not used.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in experts.parameters() if p.requires_grad]
        return computed_by, [out.detach(), *(grad.clone() for grad in grads)]

    seen = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for state in _states(experts):
            for _ in range(2):
                computed_by, mine = step()
            handles = [module.register_forward_hook(lambda *_: None) for module in called]
            by_modules, wanted = step()
            for handle in handles:
                handle.remove()
            assert (computed_by, by_modules) == (COMPUTED_BY[state], "host modules"), state
            for a, b in zip(mine, wanted, strict=True):
                apart = float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
                assert apart < MOST_APART or state == "dropout", (state, apart)
            seen.append(state)
    assert set(seen) == set(COMPUTED_BY)
    told = [str(each.message) for each in said if "run as modules" in str(each.message)]
    assert [sum(reason in text for text in told) for reason in REASONS] == [1, 1], told
