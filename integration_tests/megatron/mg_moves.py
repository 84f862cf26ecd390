# SPDX-License-Identifier: Apache-2.0
"""Rank-side: moves experts between ranks during training, and compares this with a training without moves."""

from typing import Any

import mg_models
import sluice
import torch
from megatron.core import dist_checkpointing, parallel_state
from mg_cases import _said, _state, environment, moe_layers
from shuffles import PROMISES_BITS, bits, said_while_away, shuffled, state_bits, ways_of_torch
from sluice.adapters.common.migration.moving import has_moved
from sluice.adapters.megatron.moving import MARK

OPTIONS = {**PROMISES_BITS, "chunks": 2}


def shuffle(host: mg_models.Host, seed: int) -> None:
    """Permutes the experts of every layer, in the same way on all ranks."""
    for number, layer in enumerate(moe_layers(host.model)):
        sluice.move_experts(layer, *shuffled(layer._sluice, 100 * seed + number), host.optimizer)


def go_home(host: mg_models.Host) -> None:
    for layer in moe_layers(host.model):
        sluice.move_experts(layer, *layer._sluice.home, host.optimizer)


def _trained(ep: int, steps: int, every: int, **changes: Any) -> dict[str, Any]:
    """Trains, and returns the results. every: steps between two shuffles, before which gradients exist; 0: never."""
    host = mg_models.Host(ep, "decorated", OPTIONS, clip=0.0, **changes)
    moves = 0

    def before_update(step: int) -> None:
        nonlocal moves
        if every and step == steps - 1:
            go_home(host)
        elif every and step % every == every - 1:
            shuffle(host, step)
            moves += all(has_moved(layer._sluice) for layer in moe_layers(host.model))

    found: dict[str, Any] = {"losses": host.train(steps, before_update=before_update)["losses"], "moves": moves}
    named = dict(host.model.named_parameters())
    found["parameters"] = bits(named)
    found["grads"] = bits({name: parameter.main_grad for name, parameter in named.items()})
    for each in host.optimizer.chained_optimizers:
        kept = {name: getattr(parameter, "main_param", parameter) for name, parameter in named.items()}
        found.setdefault("optimizer", {}).update(state_bits(kept, each.optimizer))
        found["optimizer"].update(bits({f"{name} master": value for name, value in kept.items()}))
    assert any("exp_avg_sq" in name for name in found["optimizer"])
    return found


def derived() -> list[dict[str, Any]]:
    """Returns Megatron's values of a first step that depend on the experts of a rank, with experts at home and away."""
    found = []
    for seed in (None, 7):
        host = mg_models.Host(2, "decorated", OPTIONS, clip=0.01)
        steps: list[Any] = []
        take = host.optimizer.step
        for each in (host.optimizer, *host.optimizer.chained_optimizers):
            each.config.log_num_zeros_in_grad = True
        host.optimizer.step = lambda take=take, steps=steps: (steps.append(take()), steps[-1])[1]
        if seed is not None:
            shuffle(host, seed)
            assert all(has_moved(layer._sluice) for layer in moe_layers(host.model))
        losses = host.train(1)["losses"]
        (was_taken, norm, zeros) = steps[0]
        if seed is not None:
            go_home(host)
        weights = mg_models.Host.parameters(host)
        found.append({"losses": losses, "norm": float(norm), "zeros": float(zeros), "was_taken": bool(was_taken)})
        found[-1]["sums"] = [float(weights[name].double().norm()) for name in sorted(weights)]
    return found


def moved(ep: int, steps: int, every: int, **changes: Any) -> list[dict[str, Any]]:
    """Returns [unmoved, moved]."""
    return [_trained(ep, steps, 0, **changes), _trained(ep, steps, every, **changes)]


def _unwrapped(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the state in the form in which it is loaded: with the objects of marked entries."""
    return {key: value.obj if str(key).endswith(MARK) else value for key, value in found.items()}


def checkpoint(folder: str, loaded_by: str) -> dict[str, Any]:
    """Saves while experts are away, loads by stock or by Sluice with experts on other ranks, and compares the resumed
    training with the original run."""
    first = mg_models.Host(2, "decorated", OPTIONS, clip=0.0)
    first.train(2)
    ways = ways_of_torch(first.model, first.optimizer)
    sharded = _state(first)
    shuffle(first, 3)
    ways["experts_at_home"] = sluice.experts_at_home(first.model).__enter__
    elsewhere = _state(first)
    refused = said_while_away(ways)
    del ways["experts_at_home"]
    with sluice.experts_at_home(first.model, first.optimizer):
        assert set(said_while_away(ways).values()) == {""}
        assert _state(first)["model"].keys() == sharded["model"].keys()
        others = {
            "model": lambda: first.model.load_state_dict(_unwrapped(elsewhere["model"])),
            "optimizer": lambda: first.optimizer.load_state_dict(_unwrapped(elsewhere["optimizer"])),
        }
        refused.update(said_while_away(others))
        names = list(first.model.state_dict())
        assert not any(has_moved(layer._sluice) for layer in moe_layers(first.model))
    assert names and all(has_moved(layer._sluice) for layer in moe_layers(first.model))
    dist_checkpointing.save(_state(first), folder)
    options = OPTIONS if loaded_by == "decorated" else {}
    second = mg_models.Host(2, loaded_by, options, clip=0.0)
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    if loaded_by == "decorated":
        second.train(1)  # so that the optimizer has state to move
        shuffle(second, 5)
    loaded = dist_checkpointing.load(_state(second, True), folder)
    second.model.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    found = {"resumed": second.train(3), "whole": first.train(3), "refused": refused}
    for host in (first, second):
        if host is first or loaded_by == "decorated":
            go_home(host)
    return {**found, "gap": mg_models.gaps(second.parameters(), first.parameters())}


def keys_of_moved(**metadata: Any) -> list[Any]:
    """Returns global keys with their offsets, and local ones by expert, unmoved and moved. Over all ranks both must be
    the same."""
    host = mg_models.Host(2, "decorated", OPTIONS)
    found = []
    whole = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    for seed in (None, 7):
        if seed is not None:
            shuffle(host, seed)
        state = host.model.sharded_state_dict(metadata=whole)
        marks = [name for name in state if name.endswith(MARK)]
        assert bool(marks) == (seed is not None)
        experts = {name: entry for name, entry in state.items() if "local_experts" in name}
        found.append(
            {
                "local": sorted(state.keys() - set(marks)),
                "global": sorted(
                    [entry.key, list(map(int, getattr(entry, "global_offset", ()) or ()))] for entry in experts.values()
                ),
            }
        )
    go_home(host)
    return found


def grouped_stays_at_home_for_checkpoints() -> str:
    """Saves GroupedMLP's checkpoint while its experts are away."""
    host = mg_models.Host(2, "decorated", OPTIONS, moe_grouped_gemm=True, params_dtype="bfloat16")
    shuffle(host, 3)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return _said(lambda: host.model.sharded_state_dict(metadata=metadata))


def refusals() -> list[str]:
    """Moves experts of layers that refuse it: all ranks get an error, and nothing has moved."""
    said = []

    def refuse(host: Any, *lists: Any, optimizer: Any = None) -> None:
        layer = moe_layers(host.model)[0]
        said.append(_said(lambda: sluice.move_experts(layer, *lists, optimizer or host.optimizer)))
        assert not has_moved(layer._sluice)

    host = mg_models.Host(2, "decorated", OPTIONS)
    rank, slot = map(list, moe_layers(host.model)[0]._sluice.home)
    refuse(host, [0] * len(rank), list(range(len(rank))))
    refuse(host, rank, slot, optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    part = list(moe_layers(host.model)[0].experts.parameters())[-1]
    part.requires_grad_(False)  # freezes a part of the last expert of each rank
    refuse(host, rank, slot[::-1])
    part.requires_grad_(True)
    tokens, *_ = mg_models.batches(1, 1)
    output, _ = mg_models.forward_step(iter([tokens]), host.parts[0])
    refuse(host, rank, slot[::-1])
    output.sum().backward()
    parts = mg_models.Host(2, "decorated", OPTIONS, ddp={"use_distributed_optimizer": True})
    refuse(parts, rank, slot[::-1])
    with environment(SLUICE="0"):
        off = mg_models.Host(2, "decorated")
    return [*said, _said(lambda: sluice.move_experts(moe_layers(off.model)[0], rank, slot))]
