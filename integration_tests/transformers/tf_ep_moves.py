# SPDX-License-Identifier: Apache-2.0
"""Rank-side: moves experts of a split model between ranks during training, and compares this with a training in which
no expert moves."""

from pathlib import Path
from typing import Any

import sluice
import torch
import torch.distributed as dist
from counted_memory import counted
from shuffles import PROMISES_BITS, bits, said_while_away, shuffled, state_bits, ways_of_torch
from sluice.adapters.common.migration.moving import has_moved
from sluice.adapters.transformers import experts as adapter
from sluice.errors import SluiceError
from test_tf_adapters import lora_on
from tf_ep_jobs import split
from tf_models import batch, experts_of
from transformers import AutoModelForCausalLM

OPTIONS = {**PROMISES_BITS, "chunks": 2}


def _optimizer(model: Any) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-3, foreach=False)


def modules_of(model: Any) -> list[Any]:
    """Returns the experts modules, without PEFT's wrappers."""
    return [getattr(module, "get_base_layer", lambda module=module: module)() for module in experts_of(model)]


def shuffle(model: Any, seed: int, optimizer: Any) -> None:
    """Permutes the experts of every module, in the same way on all ranks."""
    for number, module in enumerate(modules_of(model)):
        sluice.move_experts(module, *shuffled(adapter.kept_of(module), 100 * seed + number), optimizer)


def _start(model: Any, seed: int, optimizer: Any) -> list[Any]:
    """Starts moves of the experts of every module, during the next steps."""
    return [
        sluice.start_moving_experts(module, *shuffled(adapter.kept_of(module), 100 * seed + number), optimizer)
        for number, module in enumerate(modules_of(model))
    ]


def go_home(model: Any, optimizer: Any) -> None:
    """Moves all experts to the ranks where transformers expects them."""
    for module in modules_of(model):
        sluice.move_experts(module, *adapter.kept_of(module).home, optimizer)


def _step(model: Any, layout: dict[str, int], number: int) -> torch.Tensor:
    """Runs forward and backward, and returns the loss."""
    ids = batch(100 * number + dist.get_rank() // layout.get("tp_size", 1))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def _trained(
    path: str,
    layout: dict[str, int],
    steps: int,
    every: int,
    during_steps: bool = False,
    lora: bool = False,
    **how: Any,
) -> dict[str, Any]:
    """Returns the results of a training. every: steps between two shuffles, which move gradients too; 0: no shuffle.
    during_steps: moves begin in one step and continue in the next ones. lora: adapters on the experts and on attention
    are trained."""
    migrations: list[Any] = []
    hidden = 0
    sluice.configure(**OPTIONS)
    try:
        model = split(path, layout, **how).train()
        if lora:
            model = lora_on(model, adapters=2)
        optimizer = _optimizer(model)
        losses, moves = [], 0
        for number in range(steps):
            losses.append(float(_step(model, layout, number)))
            if every and number == steps - 1:
                go_home(model, optimizer)
            elif during_steps and number % every == 0:
                moves += sum(migration.has_ended and migration.num_moves > 0 for migration in migrations)
                hidden += sum(migration.hidden_bytes for migration in migrations)
                migrations = _start(model, number, optimizer)
            elif during_steps:
                pass
            elif every and number % every == every - 1:
                shuffle(model, number, optimizer)
                moves += all(has_moved(adapter.kept_of(module)) for module in modules_of(model))
            optimizer.step()
            if number < steps - 1:
                optimizer.zero_grad()
    finally:
        sluice.configure()
    named = dict(model.named_parameters())
    grads = bits({name: p.grad for name, p in named.items() if p.grad is not None})
    fused = [adapter.kept_of(module).stats()["computed_by"] for module in modules_of(model)]
    return {
        "losses": losses,
        "parameters": bits(named),
        "grads": grads,
        "optimizer": state_bits(named, optimizer),
        "moves": moves,
        "hidden": hidden,
        "computed_by": sorted(set(fused)),
    }


def moved(
    path: str, layout: dict[str, int], steps: int, every: int, during_steps: bool = False, **how: Any
) -> list[Any]:
    """Returns the results of [a training without moves, one with moves]."""
    return [
        _trained(path, layout, steps, 0, **how),
        _trained(path, layout, steps, every, during_steps, **how),
    ]


def _norm(model: Any) -> float:
    """Returns the norm of all gradients as a training script computes it, over all shards of each DTensor. torch's own
    clip_grad_norm_ refuses the host's two meshes."""
    parts = [torch.linalg.vector_norm(p.grad) for p in model.parameters() if hasattr(p.grad, "full_tensor")]
    return float(torch.stack([part.full_tensor() for part in parts]).norm()) if parts else 0.0


def derived(path: str, layout: dict[str, int]) -> list[dict[str, Any]]:
    """Returns values that depend on the experts of a rank, with experts at home and away: the norm of gradients, and an
    average of weights that is computed at home."""
    found = []
    for seed in (None, 4):
        sluice.configure(**OPTIONS)
        try:
            model = split(path, layout).train()
            optimizer = _optimizer(model)
            average = {name: p.detach().clone() for name, p in model.named_parameters()}
            if seed is not None:
                shuffle(model, seed, optimizer)
                assert all(has_moved(adapter.kept_of(module)) for module in modules_of(model))
            losses, norms = [], []
            for number in range(2):
                losses.append(float(_step(model, layout, number)))
                norms.append(_norm(model))
                optimizer.step()
                optimizer.zero_grad()
                with sluice.experts_at_home(model, optimizer), torch.no_grad():
                    for name, parameter in model.named_parameters():
                        average[name].lerp_(parameter, 0.25)
        finally:
            sluice.configure()
        found.append({"losses": losses, "norms": norms, "average": bits(average)})
    return found


def counted_moves(path: str, layout: dict[str, int]) -> dict[str, int]:
    """Returns the host memory that moves during steps have taken on this rank."""
    with counted() as count:
        _trained(path, layout, steps=14, every=6, during_steps=True)
    return {name: value for name, value in vars(count).items() if not name.startswith("_")}


def saved(path: str, layout: dict[str, int], folder: str) -> dict[str, Any]:
    """Saves while experts are away, which is refused, and within experts_at_home, which writes the unmoved model."""
    model = split(path, layout)
    optimizer = _optimizer(model)
    _step(model, layout, 0)
    ways = ways_of_torch(model, optimizer)
    ways["experts_at_home without the optimizer"] = sluice.experts_at_home(model).__enter__
    shuffle(model, 4, optimizer)
    said = said_while_away(ways)
    del ways["experts_at_home without the optimizer"]
    with sluice.experts_at_home(model, optimizer):
        at_home = said_while_away(ways)
        model.save_pretrained(folder)
    away = all(has_moved(adapter.kept_of(module)) for module in modules_of(model))
    go_home(model, optimizer)
    model.state_dict()
    dist.barrier()
    before, after = (AutoModelForCausalLM.from_pretrained(Path(each)).state_dict() for each in (path, folder))
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return {"said": said, "at_home": at_home, "away": away, "same": same}


def refusals(path: str) -> list[str]:
    """Returns the errors of moves that all ranks refuse; no expert moves."""
    model = split(path, {"fsdp_size": dist.get_world_size()}).train()
    module = modules_of(model)[0]
    rank, slot = map(list, adapter.kept_of(module).home)
    said = []

    def refuse(module: Any, *arguments: Any) -> None:
        try:
            sluice.move_experts(module, *arguments)
            said.append("")
        except SluiceError as error:
            said.append(f"{type(error).__name__}: {error}")

    refuse(module, [0] * len(rank), list(range(len(rank))))
    refuse(module, rank, slot, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    part = next(module.parameters())
    part.requires_grad_(dist.get_rank() > 0)  # freezes this tensor for all experts of the first rank
    refuse(module, rank[::-1], slot)
    part.requires_grad_(True)
    ids = batch(dist.get_rank())
    loss = model(input_ids=ids, labels=ids).loss
    refuse(module, rank, slot[::-1])
    loss.backward()
    assert not has_moved(adapter.kept_of(module))
    refuse(model.model.embed_tokens, rank, slot)
    whole = AutoModelForCausalLM.from_pretrained(path, experts_implementation="sluice")
    whole(input_ids=ids)
    refuse(experts_of(whole)[0], rank, slot)
    return said
