# SPDX-License-Identifier: Apache-2.0
"""Rank-side: experts that move between ranks during training, compared with the same training without moves."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import sluice
import torch
import torch.distributed as dist
from cases_traps import _one_step
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime import utils
from ds_models import SLUICE, batch, build, ds_config, engine, go_home, said, train
from shuffles import PROMISES_BITS, bits, copied, said_while_away, shuffled, state_bits, ways_of_torch
from sluice.adapters.common.migration import moving as moves
from sluice.adapters.common.migration import shipments
from sluice.adapters.common.migration.background import BackgroundMove
from sluice.adapters.common.migration.placement import Placement
from sluice.adapters.deepspeed.moe import moving
from sluice.adapters.deepspeed.moe.layer import LayerState
from sluice.errors import Unsupported
from torch.distributed.distributed_c10d import _get_default_store

SECTION = {**SLUICE, **PROMISES_BITS}
UNCLIPPED = {"gradient_clipping": 0.0}


def shuffle(host: Any, seed: int) -> None:
    """Moves the experts of every layer to random places, the same on all ranks."""
    for number, layer in enumerate(host.sluice.layers):
        host.sluice.move_experts(layer, *shuffled(layer._sluice, 100 * seed + number))


def kept_bits(host: Any) -> dict[str, dict[str, int]]:
    """Checksums of the parameters, of the tensors that the optimizer updates (under ZeRO parts of masters), and of
    their optimizer states."""
    base = getattr(host.optimizer, "optimizer", host.optimizer)
    updated = {f"{g} {i}": p for g, group in enumerate(base.param_groups) for i, p in enumerate(group["params"])}
    parameters = bits(dict(host.module.named_parameters()))
    return {"parameters": parameters, "optimizer": {**bits(updated), **state_bits(updated, base)}}


def still_and_moved(
    train: Callable[..., dict[str, Any]],
    steps: int,
    every: int,
    config: dict[str, Any] | None = None,
    frozen: tuple[int, int] = (-1, -1),
) -> list[dict[str, Any]]:
    """Returns [unmoved, moved]: the results of `train`. Experts move before the optimizer's step, so that gradients
    move too. Under ZeRO and the bf16 optimizers they move before the next forward, when there are no gradients. At the
    end they are home. frozen: experts are frozen from the first step until the second."""
    config = {**UNCLIPPED, **(config or {})}
    after_update = config.get("zero_optimization", {}).get("stage", 0) > 0 or "bf16" in config
    micro_steps = config.get("gradient_accumulation_steps", 1) if after_update else 1
    moves = 0

    def move(host: Any, step: int) -> None:
        nonlocal moves
        update, rest = divmod(step, micro_steps)
        if rest:
            return
        if update == steps // micro_steps - 1:
            go_home(host)
        elif update % every == every - 1:
            shuffle(host, step)
            moves += all(moving.has_moved(layer) for layer in host.sluice.layers)

    def freeze(host: Any, step: int) -> None:
        if step in frozen:
            for layer in host.sluice.layers:
                layer.experts.requires_grad_(step == frozen[1])

    def freeze_and_move(host: Any, step: int) -> None:
        freeze(host, step)
        if after_update:
            move(host, step)

    still = train(config=config, before=freeze)
    moved = train(config=config, before=freeze_and_move, check=None if after_update else move)
    return [still, {**moved, "moves": moves}]


def moved_training(
    layers: list[dict[str, Any]],
    steps: int,
    every: int,
    dtype: str = "float32",
    options: dict[str, Any] | None = None,
    **how: Any,
) -> list[dict[str, Any]]:
    """Runs `still_and_moved` with DeepSpeed's own layers."""
    section = {**SECTION, **(options or {})}
    training = functools.partial(train, layers, steps, section, dtype=dtype, at_end=kept_bits)
    return still_and_moved(training, steps, every, **how)


def _same(one: Any, other: Any) -> bool:
    """Returns whether nested values are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other))
    return True  # ignores names, versions and paths


def checkpoints(folder: str, layers: list[dict[str, Any]], config: dict[str, Any]) -> Any:
    """Runs `checkpoint_files` with DeepSpeed's own layers."""

    def make(section: dict[str, Any] | None) -> Any:
        return engine(build(layers), ds_config(**UNCLIPPED, **config), section)

    return checkpoint_files(make, _one_step, folder)


def checkpoint_files(
    make: Callable[[dict[str, Any] | None], Any], step: Callable[[Any, int], torch.Tensor], folder: str
) -> tuple[list[str], list[str], dict[str, list[float]]]:
    """Returns checkpoint files, those that differ if experts have moved, and later losses, also of engines that have
    loaded the files. make: makes an engine with this section; step: runs a forward and a backward"""
    names = ("still", "moved", "stock", "back")
    hosts = {name: make(None if name == "stock" else SECTION) for name in names}
    for number in range(4):
        for name in ("still", "moved"):
            step(hosts[name], number)
            hosts[name].step()
        shuffle(hosts["moved"], number)
    lay = [layer._sluice.placement for layer in hosts["moved"].sluice.layers]
    for name in ("still", "moved"):
        hosts[name].save_checkpoint(os.path.join(folder, name), tag="x")
    assert [layer._sluice.placement for layer in hosts["moved"].sluice.layers] == lay, "they did not go back"
    dist.barrier()
    files = sorted(os.listdir(os.path.join(folder, "still", "x")))
    read = functools.partial(torch.load, weights_only=False, map_location="cpu")
    pairs = {file: [read(os.path.join(folder, name, "x", file)) for name in ("still", "moved")] for file in files}
    shuffle(hosts["back"], 9)  # the load must move the experts home
    for name in ("stock", "back"):
        path, _ = hosts[name].load_checkpoint(os.path.join(folder, "moved"), tag="x")
        assert path is not None
    assert not any(moving.has_moved(layer) for layer in hosts["back"].sluice.layers)
    losses: dict[str, list[float]] = {name: [] for name in names}
    for number in range(4, 8):
        for name, host in hosts.items():
            losses[name].append(float(step(host, number)))
            host.step()
    go_home(hosts["moved"])
    for name, host in hosts.items():
        if name != "stock":
            host.sluice.unswap()
        host.destroy()
    dist.barrier()
    return files, [file for file, pair in pairs.items() if not _same(*pair)], losses


def refusals() -> list[str]:
    """Returns the errors of invalid moves on all ranks, after which nothing has moved."""
    found: list[str] = []
    host = engine(build([{}]), ds_config(), SECTION)
    layer = host.sluice.layers[0]
    rank, slot = (list(numbers) for numbers in layer._sluice.home)
    turned = [1 - s for s in slot]

    def refuse(*lists: Any) -> None:
        found.append(said(lambda: host.sluice.move_experts(layer, *lists)))
        assert not moving.has_moved(layer)

    refuse([0] * len(rank), list(range(len(rank))))
    torch.manual_seed(0)
    x, target = torch.randn(2, 12, 16), torch.randn(2, 12, 16)
    loss = host(x, target)
    refuse(rank, turned)
    host.backward(loss)
    host.step()
    host.sluice.move_experts(layer, rank, turned)
    found.append(said(host.sluice.unswap))
    host.sluice.move_experts(layer, rank, slot)
    if dist.get_rank() == 0:
        next(layer.experts.parameters()).requires_grad_(False)
    refuse(rank, turned)  # a parameter of one of rank 0's experts is frozen
    layer.experts.requires_grad_(True)
    host.sluice.unswap()
    host.destroy()
    host = engine(build([{}]), ds_config(zero_optimization={"stage": 1}), SECTION)
    layer = host.sluice.layers[0]
    host.backward(host(x, target))
    refuse(rank, turned)
    host.step()
    host.sluice.unswap()
    host.destroy()
    return found


def refused_optimizer(placement: str | None) -> list[str]:
    """Returns errors with DeepSpeed's FusedAdam over 16-bit parameters without ZeRO, from moves or from the start."""
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    config = ds_config(**UNCLIPPED, bf16={"enabled": True}, optimizer=adam)
    model, found = build([{}]), []
    swapped = {**SECTION, "optimizer": True, **({} if placement is None else {"placement": placement})}
    try:
        host = engine(model, config, swapped)
    except Unsupported as error:
        assert not any(hasattr(moe, "_sluice") for moe in model.moes)
        return [str(error)]
    for step in range(2):
        x, target = batch(step, None, torch.bfloat16)
        host.backward(host(x, target))
        host.step()
        before, layer = kept_bits(host), host.sluice.layers[0]
        found.append(said(lambda: shuffle(host, step)))  # noqa: B023
        assert kept_bits(host) == before and not moving.has_moved(layer)
    host.sluice.unswap()
    host.destroy()
    return found


def _ways(host: Any) -> dict[str, Any]:
    """Returns all calls that read or load a state dict, but save_16bit_model. Loads use the present state."""
    module, optimizer = host.module, host.optimizer
    weights, states = copied(module.state_dict()), copied(optimizer.state_dict())

    of_all: Any = [None] * dist.get_world_size()  # ZeRO loads the states of all ranks
    dist.all_gather_object(of_all, states)

    return {
        **ways_of_torch(module, getattr(optimizer, "optimizer", optimizer)),
        "module_state_dict": host.module_state_dict,
        "load_module_state_dict": lambda: host.load_module_state_dict({"module": weights}),
        "zero.state_dict": optimizer.state_dict,
        "zero.load_state_dict": lambda: optimizer.load_state_dict(of_all if host.zero_optimization_stage() else states),
    }


def state_dicts(folder: str, layers: list[dict[str, Any]], config: dict[str, Any], dtype: str = "float32") -> Any:
    """Returns for each call of `_ways` its error while experts are away, and within `experts_at_home`, where the state
    is that before the move. A file that is written while they are away is that of home."""
    host = engine(build(layers), ds_config(**UNCLIPPED, **config), SECTION)
    for step in range(2):
        x, target = batch(step, None, getattr(torch, dtype))
        host.backward(host(x, target))
        host.step()

    def file(name: str) -> Any:
        host.save_16bit_model(folder, f"{name}.bin")
        dist.barrier()
        return torch.load(os.path.join(folder, f"{name}.bin"))

    ways, home, wanted = _ways(host), kept_bits(host), file("home")
    shuffle(host, 1)
    away = kept_bits(host)
    found = {name: [text] for name, text in said_while_away(ways).items()}
    assert _same(file("away"), wanted)
    assert kept_bits(host) == away and all(map(moving.has_moved, host.sluice.layers))
    with sluice.experts_at_home(host):
        for name, text in said_while_away(ways).items():
            found[name].append(text)
        assert kept_bits(host) == home
    go_home(host)
    host.sluice.unswap()
    host.destroy()
    dist.barrier()
    return found


def derived(config: dict[str, Any], dtype: str, overflows: bool = False) -> list[dict[str, Any]]:
    """DeepSpeed's results of a first step: with stock, with experts at home and away, and the latter two with the true
    norm. All rows go to experts whose home is the first rank. overflows: only gradients of expert 1 are infinite."""
    spread = [0, 1] * 2, [0, 0, 1, 1]
    found = []
    for section, places in (
        (None, None),
        (SECTION, None),
        (SECTION, spread),
        ({**SECTION, "clip_norm": "true"}, None),
        ({**SECTION, "clip_norm": "true"}, spread),
    ):
        model = build([{"num_experts": 4, "drop_tokens": False}])
        with torch.no_grad():
            model.moes[0].deepspeed_moe.gate.wg.weight[2:] -= 100 * model.moes[0].deepspeed_moe.gate.wg.weight[:2]
        host = engine(model, ds_config(**config), section)
        if places is not None:
            host.sluice.move_experts(host.sluice.layers[0], *places)
        if overflows:
            _make_infinite(host, 1, *(places or ([0, 0, 1, 1], [0, 1] * 2)))
        profiler = FlopsProfiler(host.module)
        profiler.start_profile()
        norms: list[float] = []
        with noted_norms(norms):
            for step in range(config.get("gradient_accumulation_steps", 1)):
                x, target = batch(step, None, getattr(torch, dtype))
                loss = host(x, target)
                host.backward(loss)
                host.step()
        moe = host.module.moes[0].deepspeed_moe
        flops = profiler.get_total_flops()
        profiler.end_profile()
        norm = 0.0 if overflows else host.get_global_grad_norm() if not norms else norms[-1]
        found.append(
            {
                "norm": float(norm),
                "loss": float(loss.detach()),
                "l_aux": float(moe.l_aux.detach()),
                "exp_counts": moe.exp_counts.tolist(),
                "skipped": host.skipped_steps,
                "was_applied": host.was_step_applied(),
                "loss_scale": float(getattr(host.optimizer, "cur_scale", getattr(host.optimizer, "loss_scale", 1.0))),
                "flops": flops,
                "parameter_bytes": sum(p.numel() * p.element_size() for p in host.module.parameters()),
            }
        )
        if section is not None:
            go_home(host)
            host.sluice.unswap()
        host.destroy()
    return found


def _make_infinite(host: Any, expert: int, expert_rank: list[int], expert_slot: list[int]) -> None:
    if dist.get_rank() == expert_rank[expert]:
        module = host.module.moes[0].deepspeed_moe.experts.deepspeed_experts[expert_slot[expert]]
        for param in module.parameters():
            param.register_hook(lambda grad: grad * float("inf") + grad.new_full((), float("inf")))


@contextlib.contextmanager
def noted_norms(norms: list[float]) -> Iterator[None]:
    """Records the return values of DeepSpeed's function that clips f32 gradients."""
    original = utils.clip_grad_norm_

    def noted(**given: Any) -> Any:
        norm = original(**given)
        norms.append(float(norm))
        return norm

    with patch.object(utils, "clip_grad_norm_", noted), patch.object(engine_module, "clip_grad_norm_", noted):
        yield


@contextlib.contextmanager
def _failing(step: str, rank: int) -> Iterator[None]:
    """Makes a function of a move fail on this rank. step: NAME for the first call, or NAME:N for the N-th call."""
    name, _, nth = step.partition(":")
    owner = {"replace_experts": LayerState, "_begin": shipments}.get(name, moves)
    if not name:
        yield
        return
    original, calls = getattr(owner, name), 0

    def fails(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(nth or 1) and dist.get_rank() == rank:
            if owner is LayerState:  # with an invalid placement the engine fails, and informs the other ranks
                return original(given[0], Placement((0,), (0,)))
            if name == "_exchange":
                original(*given)
            raise RuntimeError(f"{name} has failed")
        if name == "_begin" and calls == 1:
            time.sleep(0.3)  # until the rank that failed has closed its connections
        return original(*given)

    with patch.object(owner, name, fails):
        yield


def broken_moves(steps: list[str], config: dict[str, Any]) -> Any:
    """Returns (this rank's error for each failing step, whether the state was unchanged, whether losses and final state
    equal those of a training without moves)."""
    errors: list[str] = []
    as_before: list[bool] = []

    def move(host: Any, step: int) -> None:
        if not 0 < step <= len(steps):
            return
        layer = host.sluice.layers[0]
        before, lay = kept_bits(host), layer._sluice.placement
        with _failing(steps[step - 1], rank=1):
            errors.append(said(lambda: host.sluice.move_experts(layer, *shuffled(layer._sluice, step))))
        as_before.append(kept_bits(host) == before and layer._sluice.placement == lay and not layer._sluice.torn)

    def end(host: Any) -> Any:
        go_home(host)
        return kept_bits(host)

    common: dict[str, Any] = {"config": {**UNCLIPPED, **config}, "at_end": end}
    layers = [{"k": 2, "num_experts": 8, "expert": "gelu"}]
    still = train(layers, len(steps) + 3, SECTION, **common)
    moved = train(layers, len(steps) + 3, SECTION, before=move, **common)
    return errors, as_before, [still[name] == moved[name] for name in ("losses", "end")]


def lost_rank(step: str) -> Any:
    """Kills the last rank in this step of a move. Returns the error on the other ranks, whether everything is in its
    old place, and whether the layer is torn."""
    host = engine(build([{}]), ds_config(), SECTION)
    layer = host.sluice.layers[0]
    _one_step(host, 0)
    host.step()
    before, lay = kept_bits(host), layer._sluice.placement
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with patch.object(moves, step, (lambda *_: os._exit(9)) if is_last else getattr(moves, step)):
        error = said(lambda: host.sluice.move_experts(layer, *shuffled(layer._sluice, 1)))
    return error, kept_bits(host) == before and layer._sluice.placement == lay, layer._sluice.torn


def hung_rank(step: str, wait_s: float) -> Any:
    """Makes the last rank hang in this step of a move until the others have an error. Returns the error, the seconds
    until then, whether the error left everything in its place, and whether later training has the bits of none."""
    section = {**SECTION, "timeout": wait_s}
    last, store = dist.get_world_size() - 1, _get_default_store()
    found: list[Any] = []

    def move(host: Any, step_number: int) -> None:
        if step_number != 1:
            return
        layer = host.sluice.layers[0]
        before, lay = kept_bits(host), layer._sluice.placement
        owner = moves if hasattr(moves, step) else shipments
        original, begun = getattr(owner, step), time.monotonic()

        def hangs(*given: Any) -> Any:
            store.wait([f"hung {step} {rank}" for rank in range(last)], timedelta(seconds=100))
            return original(*given)

        places = shuffled(layer._sluice, 1)

        def attempt() -> None:
            if step == "still_of":  # a move while training runs
                new = Placement(*map(tuple, places))
                BackgroundMove(range(last + 1)).begin(layer._sluice, moving.belongings_of(layer, host.optimizer), new)
            else:
                host.sluice.move_experts(layer, *places)

        with patch.object(owner, step, hangs if dist.get_rank() == last else original):
            found.append(said(attempt))
        store.set(f"hung {step} {dist.get_rank()}", "")
        found.append(time.monotonic() - begun)
        found.append(kept_bits(host) == before and layer._sluice.placement == lay and not layer._sluice.torn)

    common: dict[str, Any] = {"config": UNCLIPPED, "at_end": kept_bits}
    layers = [{"k": 2, "num_experts": 8, "expert": "gelu"}]
    still, moved = (train(layers, 4, section, before=before, **common) for before in (None, move))
    return [*found, [still[name] == moved[name] for name in ("losses", "end")]]


def torn_move() -> list[str]:
    """Returns the errors of a move that can neither continue nor be undone, and of later calls."""
    host = engine(build([{}]), ds_config(), SECTION)
    layer = host.sluice.layers[0]
    _one_step(host, 0)
    host.step()

    def move() -> None:
        host.sluice.move_experts(layer, *shuffled(layer._sluice, 1))

    def fails_on_the_last(*_: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("fill has failed")

    with patch.object(moves, "fill", fails_on_the_last):
        error = said(move)
    later = (lambda: _one_step(host, 1), move, host.sluice.at_home(False).__enter__, host.module.state_dict)
    return [error, *map(said, later)]
