"""Rank-side: experts that move between ranks in a training, beside the same training in which none moves."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from cases_traps import _one_step
from ds_models import SLUICE, build, ds_config, engine, train
from shuffles import PROMISES_BITS, bits, forgetting, shuffled, state_bits
from sluice.adapters.deepspeed import moving
from sluice.errors import InvalidState, Unsupported

# DeepSpeed clips by a norm that sums over the experts in the order of their places, by default.
SECTION = {**SLUICE, **PROMISES_BITS}
UNCLIPPED = {"gradient_clipping": 0.0}


def _shuffle(host: Any, seed: int) -> None:
    """Every layer's experts change places, alike on all ranks."""
    for number, layer in enumerate(host.sluice.layers):
        host.sluice.move_experts(layer, *shuffled(layer._sluice, 100 * seed + number))


def kept_bits(host: Any) -> dict[str, dict[str, int]]:
    """Of the parameters, of the tensors that the optimizer updates (ZeRO's are parts of masters), and of what it keeps
    of them."""
    base = getattr(host.optimizer, "optimizer", host.optimizer)
    updated = {f"{g} {i}": p for g, group in enumerate(base.param_groups) for i, p in enumerate(group["params"])}
    parameters = bits(dict(host.module.named_parameters()))
    return {"parameters": parameters, "optimizer": {**bits(updated), **state_bits(updated, base)}}


def moved_training(
    layers: list[dict[str, Any]],
    steps: int,
    every: int,
    config: dict[str, Any] | None = None,
    dtype: str = "float32",
    forget: str = "",
) -> Any:
    """[unmoved, moved]: what `train` gives. They are home at the end. Experts move before the optimizer's step, so that
    gradients go too; under ZeRO and the bf16 optimizers, which have none behind an update, in front of the next
    forward. forget: what of an expert a bad host would leave behind."""
    config = {**UNCLIPPED, **(config or {})}
    behind = config.get("zero_optimization", {}).get("stage", 0) > 0 or "bf16" in config
    micro_steps = config.get("gradient_accumulation_steps", 1) if behind else 1
    moves = 0

    def move(host: Any, step: int) -> None:
        nonlocal moves
        update, rest = divmod(step, micro_steps)
        if rest:
            return
        if update == steps // micro_steps - 1:
            with host.sluice.at_home(False):
                pass
        elif update % every == every - 1:
            _shuffle(host, step)
            moves += all(moving.has_moved(layer) for layer in host.sluice.layers)

    common: dict[str, Any] = {"config": config, "dtype": dtype, "at_end": kept_bits}
    still = train(layers, steps, SECTION, **common)
    with forgetting(forget, is_left_out=True):
        moved = train(layers, steps, SECTION, **common, **{"before" if behind else "check": move})
    return [still, {**moved, "moves": moves}]


def _same(one: Any, other: Any) -> bool:
    """Equal to the bit, however deep."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other))
    return True  # names, versions, paths


def checkpoints(folder: str, layers: list[dict[str, Any]], config: dict[str, Any] | None = None) -> Any:
    """Files of a run whose experts have moved beside those of one in which none has, and how all of them go on."""
    names = ("still", "moved", "stock", "back")
    hosts = {
        name: engine(build(layers), ds_config(**UNCLIPPED, **(config or {})), None if name == "stock" else SECTION)
        for name in names
    }
    for step in range(4):
        for name in ("still", "moved"):
            _one_step(hosts[name], step)
            hosts[name].step()
        _shuffle(hosts["moved"], step)
    lay = [layer._sluice.placement for layer in hosts["moved"].sluice.layers]
    for name in ("still", "moved"):
        hosts[name].save_checkpoint(os.path.join(folder, name), tag="x")
    assert [layer._sluice.placement for layer in hosts["moved"].sluice.layers] == lay, "they did not go back"
    dist.barrier()
    files, differ = sorted(os.listdir(os.path.join(folder, "still", "x"))), []
    for file in files:
        one, other = (
            torch.load(os.path.join(folder, name, "x", file), weights_only=False, map_location="cpu")
            for name in ("still", "moved")
        )
        if not _same(one, other):
            differ.append(file)
    _shuffle(hosts["back"], 9)  # before a load, which finds them home
    for name in ("stock", "back"):
        path, _ = hosts[name].load_checkpoint(os.path.join(folder, "moved"), tag="x")
        assert path is not None
    assert not any(moving.has_moved(layer) for layer in hosts["back"].sluice.layers)
    losses: dict[str, list[float]] = {name: [] for name in names}
    for step in range(4, 8):
        for name, host in hosts.items():
            losses[name].append(float(_one_step(host, step)))
            host.step()
    with hosts["moved"].sluice.at_home(False):
        pass
    for name, host in hosts.items():
        if name != "stock":
            host.sluice.unswap()
        host.destroy()
    dist.barrier()
    return [files, differ, losses]


def refusals() -> list[str]:
    """What cannot be moved says so on all ranks, and nothing has moved."""
    said = []
    host = engine(build([{}]), ds_config(), SECTION)
    layer = host.sluice.layers[0]
    rank, slot = (list(numbers) for numbers in layer._sluice.home)
    turned = [1 - s for s in slot]

    def refuse(error_type: type[Exception], *lists: Any) -> None:
        try:
            host.sluice.move_experts(layer, *lists)
        except error_type as error:
            said.append(str(error))
        else:
            said.append("")
        assert not moving.has_moved(layer)

    refuse(Unsupported, [0] * len(rank), list(range(len(rank))))
    torch.manual_seed(0)
    x, target = torch.randn(2, 12, 16), torch.randn(2, 12, 16)
    loss = host(x, target)
    refuse(InvalidState, rank, turned)
    host.backward(loss)
    host.step()
    host.sluice.move_experts(layer, rank, turned)
    try:
        host.sluice.unswap()
        said.append("")
    except InvalidState as error:
        said.append(str(error))
    host.sluice.move_experts(layer, rank, slot)
    host.sluice.unswap()
    host.destroy()
    zero = engine(build([{}]), ds_config(zero_optimization={"stage": 1}), SECTION)
    layer, host = zero.sluice.layers[0], zero
    host.backward(host(x, target))
    refuse(InvalidState, rank, turned)
    host.step()
    zero.sluice.unswap()
    zero.destroy()
    return said
