# SPDX-License-Identifier: Apache-2.0
"""Rank-side: DeepSpeed's Adam optimizers, offloaded or not, computed by the library if the section says so."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import ds_models as models
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam, cpu_adam, fused_adam
from ds_models import SLUICE, build, ds_config, engine
from host_release import IS_OLD

STEPS = 4


class _Forbidden:
    """Replaces the builder of the stock op, which would compile the op."""

    def load(self, verbose: bool = True) -> Any:
        raise AssertionError("the stock op was asked for")


@contextlib.contextmanager
def _no_stock_op() -> Iterator[None]:
    """Forbids the stock builders, and checks that the code under test restores the replaced builders."""
    builders = (cpu_adam, "CPUAdamBuilder"), (fused_adam, "FusedAdamBuilder")
    with patch.object(*builders[0], _Forbidden), patch.object(*builders[1], _Forbidden):
        yield
        assert cpu_adam.CPUAdamBuilder is fused_adam.FusedAdamBuilder is _Forbidden


def _wrote_its_parameters(zero: Any) -> bool:
    """Returns whether each partition equals its rounded master, and the update wrote it directly, which it cannot in
    DeepSpeed 0.15.4: that has no buffer of these parameters in host memory."""
    found = []
    buffers = None if IS_OLD else zero.param_buffer_of_bit16_for_cpu_offload_groups
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(group=zero.real_dp_process_group[group])
        mine = zero.parallel_partitioned_bit16_groups[group][rank]
        found.append(torch.equal(mine, master.data.to(mine.dtype)))
        if buffers is not None:
            found.append(type(buffers[group]) is not torch.Tensor and buffers[group].data_ptr() == mine.data_ptr())
    return bool(found) and all(found)


def skipped(stage: int, is_offloaded: bool) -> dict[str, Any]:
    """Runs a step with infinite gradients only on rank 1. Returns the state that the step changed on this rank, and the
    losses of this run and of a run without the step."""

    def run(bad_step: int | None) -> tuple[list[str], list[float], Any]:
        torch.manual_seed(0)
        offload = {"offload_optimizer": {"device": "cpu"}} if is_offloaded else {}
        values = {
            "zero_optimization": {"stage": stage, **offload},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_max_lr": 1e-2}},
        }
        with _no_stock_op():
            host = engine(build([{"k": 2}]), ds_config(**values), {**SLUICE, "optimizer": True})
        changed, losses = [], []
        for step in range(STEPS):
            batches = [True, False] if step == bad_step else [False]
            for is_bad in batches:
                torch.manual_seed(step)  # the gate uses random numbers
                loss = host(*models.batch(step, dtype=torch.bfloat16))
                before = _bytes_of(host) if is_bad else {}
                bad = is_bad and torch.distributed.get_rank() == 1
                host.backward(loss * float("inf") if bad else loss)
                host.step()
                if is_bad:
                    after = _bytes_of(host)
                    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
                else:
                    losses.append(loss.item())
        host.sluice.unswap()
        return changed, losses, host

    changed, losses, host = run(bad_step=2)
    _, others, _ = run(bad_step=None)
    return {"changed": changed, "losses": losses, "others": others, "skipped": host.skipped_steps}


class _Three(torch.nn.Module):
    """Three layers. A step can omit the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = (torch.nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor, is_left_out: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.third(x if is_left_out else torch.tanh(self.second(x)))
        return ((x.float() - 1.0) ** 2).mean()

    def groups(self, count: int) -> list[dict[str, Any]]:
        layers = [self.first, self.second, self.third]
        if count == 1:
            return [{"params": list(self.parameters())}]
        return [{"params": list(each.parameters()), "name": f"layer {at}"} for at, each in enumerate(layers)]


def _three_batch(step: int, micro: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + micro))


LEFT_OUT = (1, 2, 4)  # the steps, of STEPS + 3, that omit the second layer


def left_out(stage: int, dtype: str, clipping: float, groups: int, micro_batches: int) -> dict[str, Any]:
    """Some steps give a layer no gradient, with an offloaded optimizer: norms of parameters after each step, the same
    with torch, which does not update the layer then, and for each such step whether the layer's state changed."""
    steps, numbers = STEPS + 3, {"lr": 1e-2, "weight_decay": 0.1}
    config: dict[str, Any] = {
        **ds_config(gradient_clipping=clipping, gradient_accumulation_steps=micro_batches),
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": numbers},
        "sluice": {"enabled": True, "optimizer": True},
        **({} if dtype == "float32" else {"bf16": {"enabled": True}}),
    }
    import deepspeed

    net, other = _Three(), _Three()
    with _no_stock_op():
        host = deepspeed.initialize(model=net, model_parameters=net.groups(groups), config=config)[0]
    reference = torch.optim.AdamW(other.groups(groups), **numbers)
    found: dict[str, Any] = {"mine": [], "torch": [], "changed": [], "one_pass": True}
    for step in range(steps):
        is_left_out = step in LEFT_OUT
        before = _states_of(host, net.second)
        reference.zero_grad()
        for micro in range(micro_batches):
            x = _three_batch(step, micro)
            # In an accumulation, either only the first micro-batch uses the layer, or all others do.
            out = is_left_out or (micro_batches > 1 and (micro > 0) == (step % 2 == 1))
            host.backward(host(x.to(getattr(torch, dtype)), out))
            host.step()
            (other(x, out) / micro_batches).backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(other.parameters(), clipping)
        reference.step()
        if is_left_out:
            found["changed"].append(before != _states_of(host, net.second))
            for param in other.second.parameters():  # the host has one step count per group
                reference.state[param]["step"] += 1
        found["one_pass"] &= _wrote_its_parameters(host.optimizer)
        found["mine"].append([float(each.detach().float().norm()) for each in net.parameters()])
        found["torch"].append([float(each.detach().norm()) for each in other.parameters()])
    return found


def _states_of(host: Any, layer: torch.nn.Module) -> list[bytes]:
    """Returns a layer's parameters, and this rank's part of its masters and moments."""
    zero, found = host.optimizer, [_raw(each) for each in layer.parameters()]
    for param in layer.parameters():
        place = zero.grad_position.get(zero.get_param_id(param))
        if place is None:
            continue
        group, _, begin, count = place
        master = zero.single_partition_of_fp32_groups[group]
        state = zero.optimizer.state.get(master, {})
        for each in (master, state.get("exp_avg"), state.get("exp_avg_sq")):
            if each is not None:
                found.append(_raw(each.detach()[begin : begin + count]))
    return found


def frozen_group(stage: int, by_script: bool) -> str:
    """Returns the error if a whole parameter group is frozen."""
    import deepspeed

    net = _Three()
    net.second.requires_grad_(False)
    config = {
        **ds_config(),
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "sluice": {"enabled": True, "optimizer": True},
    }
    given: dict[str, Any] = {"model_parameters": net.groups(3)}
    if by_script:
        del config["optimizer"]
        given = {"optimizer": torch.optim.AdamW(net.groups(3), lr=1e-2)}
    return models.said(lambda: deepspeed.initialize(model=net, config=config, **given))


def unchecked(stage: int) -> dict[str, Any]:
    """Without overflow checks, after an infinite gradient: updates, skipped steps, and the number of finite parameters
    (stock writes NaN)."""
    values = {
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    with _no_stock_op():
        host = engine(build([{"k": 2}]), ds_config(**values), {**SLUICE, "optimizer": True})
        host.backward(host(*models.batch(0, dtype=torch.bfloat16)) * float("inf"))
        host.step()
    updates = host.basic_optimizer.ds_opt_adam.updates
    host.sluice.unswap()
    numbers = [bool(torch.isfinite(param).all()) for param in host.module.parameters()]
    return {"updates": updates, "skipped": host.skipped_steps, "finite": sum(numbers), "of": len(numbers)}


def _bytes_of(host: Any) -> dict[str, Any]:
    """Returns parameters, masters, moments, step counts and the scheduler's state, each as bytes."""
    found: dict[str, Any] = {"scheduler": pickle.dumps(host.lr_scheduler.state_dict())}
    for name, param in host.module.named_parameters():
        found[name] = _raw(param)
    for index, group in enumerate(host.basic_optimizer.param_groups):
        found[f"numbers {index}"] = {k: v for k, v in group.items() if k != "params"}
        for at, param in enumerate(group["params"]):
            found[f"master {index}.{at}"] = _raw(param)
            state = host.basic_optimizer.state.get(param, {})
            found[f"state {index}.{at}"] = {k: _raw(v) if torch.is_tensor(v) else v for k, v in state.items()}
    return found


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def made_by_the_script(kind: str) -> dict[str, Any]:
    """Trains with a DeepSpeed Adam that the script made with another op."""
    calls: list[str] = []

    class Op:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: calls.append(name)

    class Builder:
        def load(self, verbose: bool = True) -> Any:
            return Op()

    import deepspeed

    model = build([{}])
    with _no_stock_op():
        cpu_adam.CPUAdamBuilder = fused_adam.FusedAdamBuilder = Builder
        given = {"cpu": DeepSpeedCPUAdam, "fused": FusedAdam}[kind](list(model.parameters()), lr=1e-2)
        cpu_adam.CPUAdamBuilder = fused_adam.FusedAdamBuilder = _Forbidden
    config = copy.deepcopy(ds_config(zero_optimization={"stage": 0}))
    del config["optimizer"]
    config["sluice"] = {**SLUICE, "optimizer": True}
    host = deepspeed.initialize(model=model, optimizer=given, config=config)[0]
    before = [p.detach().clone() for p in model.parameters()]
    host.backward(host(*models.batch(0)))
    host.step()
    moved = sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    host.sluice.unswap()
    op = given.ds_opt_adam if kind == "cpu" else given.multi_tensor_adam
    return {"calls": calls, "updates": op.updates, "moved": moved}


def trainer(is_ours: bool, folder: str) -> dict[str, Any]:
    """Runs transformers' Trainer with MoE layers under a budget and ZeRO-Offload from its ds_config only, whose "auto"
    values the Trainer sets."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    }
    if is_ours:
        config["sluice"] = {**SLUICE, "chunks": None, "memory_budget": "16MiB", "optimizer": True}
    else:
        config["optimizer"]["params"]["torch_adam"] = True

    torch.manual_seed(0)
    model = build([{"k": 2}, {"drop_tokens": False}])
    arguments = {"weight_decay": 0.1, "warmup_steps": 2}
    with _no_stock_op():
        run, losses = models.trained_by_trainer(model, config, folder, STEPS, **arguments)
    updates, kinds = 0, [type(moe.deepspeed_moe).__name__ for moe in model.moes]
    if is_ours:
        updates = run.deepspeed.basic_optimizer.ds_opt_adam.updates
        run.deepspeed.sluice.unswap()
    return {"losses": losses, "updates": updates, "kinds": kinds}
