# SPDX-License-Identifier: Apache-2.0
"""Tests PEFT's `target_parameters` on experts with Sluice: the results of transformers' eager loop, without W + BA."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tf_compare
import tf_models
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sluice.adapters.torch import StackedLayer
from sluice.adapters.transformers import low_rank

KINDS = ("qwen3_moe", "mixtral", "gpt_oss")
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
IDS = tf_models.batch(rows=2, length=9)


def stack_sized(model: torch.nn.Module) -> tuple[tf_compare.Watch, list[Any]]:
    """Returns what records the operations whose results are as large as a stack of experts: W + BA, BA, or a gradient
    of W. It also returns the list of them."""
    named, found = model.named_parameters(), []
    sizes = {p.numel() for n, p in named if n.endswith(("gate_up_proj", "down_proj")) and p.dim() == 3}

    def see(function: Any, _: Any, out: Any) -> None:
        for tensor in tf_compare.tensors_of(out):
            if tensor.dim() == 3 and tensor.numel() in sizes and not function.is_view:
                found.append(function)

    return tf_compare.Watch(see), found


def adapted(
    kind: str, implementation: str, *, adapters: int = 1, targets: tuple[str, ...] = STACKS, **made: Any
) -> Any:
    """Returns a model with adapters "default", "a1", ..., of different ranks, whose B is not zero."""
    return lora_on(tf_models.make(kind, implementation, **made), adapters, targets, made.get("seed", 1))


def lora_on(model: Any, adapters: int = 1, targets: tuple[str, ...] = STACKS, seed: int = 1, fill: bool = True) -> Any:
    """Adds LoRA. fill: with values for which no B is zero; otherwise with PEFT's."""
    lora = [
        LoraConfig(r=3 + 2 * n, lora_alpha=7, target_modules=["q_proj"], target_parameters=list(targets))
        for n in range(adapters)
    ]
    peft = get_peft_model(model, lora[0])
    for number, other in enumerate(lora[1:], 1):
        peft.add_adapter(f"a{number}", other)
    if fill:
        fill_lora(peft, seed)
    return peft


def fill_lora(model: Any, seed: int = 1) -> None:
    """Loads values for which no B is zero; a split model gets the same values."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: torch.empty(parameter.shape).normal_(0, 0.2, generator=generator).to(parameter.dtype)
        for name, parameter in sorted(model.named_parameters())
        if "lora_" in name
    }
    model.load_state_dict(values, strict=False)


def pair(kind: str = "qwen3_moe", **how: Any) -> tuple[Any, Any]:
    return adapted(kind, "sluice", **how), adapted(kind, "eager", **how)


def step(model: Any, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    """Returns the logits, and the gradients if there are any."""
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids)
    if out.loss.requires_grad:
        out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    values = {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in grads.items()}
    return {"logits": out.logits.detach(), **values}


def check(ours: Any, theirs: Any, bound: float = 1e-5, stacks: int | None = 0) -> None:
    """Compares a step, and the number of Sluice's results that are as large as a stack (None: any number)."""
    watch, sized = stack_sized(ours)
    with watch:
        found = step(ours)
    worst = tf_compare.gaps(found, step(theirs))
    assert max(worst.values()) < bound, max(worst.items(), key=lambda item: item[1])
    assert stacks is None or len(sized) == stacks, sized
    assert not low_rank._held and not low_rank._here.noted


def layers_of(model: Any) -> Any:
    return model.base_model.model.model.layers


def disable(model: Any) -> Any:
    stack = ExitStack()
    stack.enter_context(model.disable_adapter())
    return stack


def both_active(model: Any) -> None:
    model.base_model.set_adapter(["default", "a1"])


def one_of_two_merged(model: Any) -> None:
    both_active(model)
    model.merge_adapter(["a1"])


def merge_inner(model: Any) -> None:
    for layer in layers_of(model):
        layer.mlp.experts.base_layer.merge()


def checkpointed(reentrant: bool) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.train()
        model.enable_input_require_grads()
        model.base_model.model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    return change


# Uses of a model with adapters: how it is made, what is called, and whether a stack-sized tensor is made.
USES: dict[str, tuple[dict[str, Any], Callable[[Any], Any] | None]] = {
    "one adapter": ({}, None),
    "disabled": ({}, disable),
    "merged": ({}, lambda model: model.merge_adapter()),
    "unmerged": ({}, lambda model: (model.merge_adapter(), model.unmerge_adapter())),
    "checkpointed, reentrant": ({}, checkpointed(True)),
    "checkpointed": ({}, checkpointed(False)),
    "the second of two": ({"adapters": 2}, lambda model: model.set_adapter("a1")),
    "two active": ({"adapters": 2}, both_active),
    "one of two merged": ({"adapters": 2}, one_of_two_merged),
    "one of two deleted": ({"adapters": 2}, lambda model: model.delete_adapter("a1")),
    "up alone": ({"targets": STACKS[:1]}, None),
    "down alone": ({"targets": STACKS[1:]}, None),
    "inner merged, outer active": ({}, merge_inner),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", KINDS)
def test_Adapters_InEachUse_AsPeftOnEager(kind: str, use: str) -> None:
    made, change = USES[use]
    ours, theirs = pair(kind, **made)
    with ExitStack() as stack:
        for model in (ours, theirs):
            changed = None if change is None else change(model)
            if isinstance(changed, ExitStack):
                stack.enter_context(changed)
        check(ours, theirs, 1e-4 if "merged" in use else 1e-5)
    if use == "disabled":
        check(ours, theirs)


def unfreeze(model: Any) -> None:
    for layer in layers_of(model):
        layer.mlp.experts.get_base_layer().requires_grad_()


def vary(model: Any) -> None:
    """Marks adapters as a variant, as PEFT does. It refuses those that it has today for target_parameters."""
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            module.lora_variant["default"] = object()


# Adapters that run as PEFT runs them: on which model, what is changed, and what the warning says.
LEFT: dict[str, tuple[str, dict[str, Any], Callable[[Any], None], str]] = {
    "bias": (
        "gpt_oss",
        {"targets": (*STACKS, "mlp.experts.down_proj_bias")},
        lambda model: None,
        "down_proj_bias: PEFT adds .* two stacked matrices only",
    ),
    "trained weights": ("qwen3_moe", {}, unfreeze, "down_proj: PEFT adds .* own weights are trained, too"),
    "variant": ("qwen3_moe", {}, vary, "down_proj: PEFT adds .* the adapter is a variant of LoRA"),
}


@pytest.mark.parametrize("case", LEFT)
def test_AdaptersThatTheLibraryCannotAdd_AreLeftToPeft(case: str) -> None:
    kind, made, change, says = LEFT[case]
    models = pair(kind, **made)
    for model in models:
        change(model)
    with pytest.warns(UserWarning, match=says):
        check(*models, stacks=0 if case == "bias" else None)


def test_OneExpert_IsLeftToPeft() -> None:
    ours, theirs = pair("mixtral", num_local_experts=1, num_experts_per_tok=1)
    with pytest.warns(UserWarning) as warned:
        check(ours, theirs, stacks=None)
    said = {str(one.message).split("since ")[1] for one in warned if "W + BA" in str(one.message)}
    assert said == {"with one expert PEFT gives A and B other shapes", "PEFT adds another adapter of these experts"}


@pytest.mark.parametrize("kind", KINDS)
def test_Bfloat16_AgainstF64_NoFurtherThanPeft(kind: str) -> None:
    """Adapters stay f32. The test takes the mean over seeds, because rounding changes some routes of each seed."""
    sums = {"sluice": 0.0, "eager": 0.0}
    for seed in range(6):
        # If K is the number of experts, rounding changes no route.
        every = {"num_experts_per_tok": 8 if kind == "qwen3_moe" else 4}
        models = {name: adapted(kind, name, dtype=torch.bfloat16, seed=seed, **every) for name in sums}
        exact = step(copy.deepcopy(models["eager"]).double())
        for name, model in models.items():
            found = step(model)
            sums[name] += float((found["logits"].double() - exact["logits"]).norm() / exact["logits"].norm())
            sums[name] += sum(
                float((found[key].double() - exact[key]).norm() / exact[key].norm())
                for key in exact
                if "experts" in key
            )
    assert sums["sluice"] <= 1.02 * sums["eager"], sums


def test_Generate_WithAnAdapter_UsesIt(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()

    def generated(model: Any) -> torch.Tensor:
        return model.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)

    quick: list[bool] = []

    def counted(layer: Any, *arguments: Any) -> Any:
        found = whole(layer, *arguments)
        quick.append(found is not None and arguments[-1] is not None)
        return found

    whole = StackedLayer.quick
    monkeypatch.setattr(StackedLayer, "quick", counted)
    generated(ours)  # later calls take the fast path
    quick.clear()
    assert torch.equal(generated(ours), generated(theirs))
    assert len(quick) == 6 * 2 and all(quick)  # tokens, layers
    with ours.disable_adapter(), theirs.disable_adapter():
        without = generated(ours)
        assert torch.equal(without, generated(theirs)) and not torch.equal(
            without, generated(adapted("qwen3_moe", "eager"))
        )
    assert torch.equal(generated(ours), generated(theirs))
    assert torch.equal(generated(ours.unload()), without)


def test_SavedAndLoaded_ByStockPeft_IsTheSame(tmp_path: Path) -> None:
    ours, theirs = pair()
    before = step(ours)
    ours.save_pretrained(tmp_path)
    check(PeftModel.from_pretrained(tf_models.make("qwen3_moe"), tmp_path, is_trainable=True), theirs)
    check(copy.deepcopy(ours), theirs)
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    check(torch.load(buffer, weights_only=False), theirs)
    merged = copy.deepcopy(ours).merge_and_unload()
    assert not [module for module in merged.modules() if module._forward_pre_hooks]
    found = {"logits": merged(input_ids=IDS).logits.detach()}
    assert tf_compare.gaps(found, {"logits": before["logits"]})["logits"] < 1e-4


def test_ImplementationSwitched_AndBack_AsPeft() -> None:
    ours, theirs = pair()
    check(ours, theirs)
    ours.base_model.model.set_experts_implementation("eager")
    check(ours, theirs, stacks=None)
    ours.base_model.model.set_experts_implementation("sluice")
    check(ours, theirs)


def test_WrappersMadeBefore_AreAdopted() -> None:
    """If Sluice is imported after `get_peft_model`, PEFT's own code runs until adopt is called."""
    ours, theirs = pair()
    for module in ours.modules():
        if low_rank.is_lora(module):
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
    with pytest.raises(AssertionError):
        check(ours, theirs)
    low_rank.adopt(ours)
    low_rank.adopt(ours)  # again changes nothing
    check(ours, theirs)


def test_ErrorOrInterrupt_InTheExperts_LeavesPeftsFlags(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    check(ours, theirs)

    def fails(kind: type[BaseException]) -> Any:
        raise kind

    for error in (ValueError, KeyboardInterrupt):
        with monkeypatch.context() as patched:
            patched.setattr(low_rank, "take", lambda experts, kind=error: fails(kind))
            with pytest.raises(error):
                step(ours)
        check(ours, theirs)


def test_Threads_EachForwardHasItsOwnAdapters() -> None:
    ours, theirs = pair()
    with torch.no_grad():
        wanted = theirs(input_ids=IDS).logits

    def gap(_: int) -> float:
        with torch.no_grad():
            return float((ours(input_ids=IDS).logits - wanted).abs().max())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert max(pool.map(gap, range(80))) < 1e-4
    finally:
        sys.setswitchinterval(before)
    assert not low_rank._held


def test_ExpertsThatAreCalled_RunAsPeftDoes_WithOneWarning(recwarn: pytest.WarningsRecorder) -> None:
    ours, theirs = pair()
    for layer in layers_of(ours):
        layer.mlp.experts.get_base_layer().act_fn.register_forward_hook(lambda *_: None)
    with ours.disable_adapter(), theirs.disable_adapter():
        check(ours, theirs, stacks=None)
    assert not [w for w in recwarn if "W + BA" in str(w.message)]
    check(ours, theirs, stacks=None)
    check(ours, theirs, stacks=None)
    said = [str(w.message) for w in recwarn if "W + BA" in str(w.message)]
    assert len(said) == 2 and all("its act_fn has hooks" in text for text in said), said
