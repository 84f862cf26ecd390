"""Rank-side: ZeRO-Offload's optimizer, computed by the library where the section says so."""

from __future__ import annotations

import copy
from typing import Any

import cases_parity  # noqa: F401  (chooses the backend)
import ds_models as models
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, cpu_adam
from ds_models import SLUICE, build, ds_config, engine

STEPS = 4


class _Forbidden:
    """In place of the builder of the stock op: what asks for it would compile."""

    def load(self, verbose: bool = True) -> Any:
        raise AssertionError("the stock op was asked for")


def _train(stage: int, dtype: str, section: dict[str, Any], optimizer: dict[str, Any]) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    values = {
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        **({} if dtype == "float32" else {"bf16": {"enabled": True}}),
    }
    host = engine(build([{"k": 2}]), ds_config(**values), section)
    losses = []
    for step in range(STEPS):
        loss = host(*models.batch(step, dtype=getattr(torch, dtype)))
        host.backward(loss)
        host.step()
        losses.append(loss.item())
    return host, losses


def _cpu_adam_of(host: Any) -> DeepSpeedCPUAdam:
    found = getattr(host.optimizer, "optimizer", host.optimizer)
    assert isinstance(found, DeepSpeedCPUAdam), type(found)
    return found


def _wrote_its_parameters(zero: Any) -> bool:
    """Whether each partition was written by the update, and is its master, rounded."""
    found = []
    for group, buffer in enumerate(zero.param_buffer_of_bit16_for_cpu_offload_groups):
        rank = torch.distributed.get_rank(group=zero.real_dp_process_group[group])
        mine = zero.parallel_partitioned_bit16_groups[group][rank]
        found.append(type(buffer) is not torch.Tensor and buffer.data_ptr() == mine.data_ptr())
        found.append(torch.equal(mine, zero.single_partition_of_fp32_groups[group].data.to(mine.dtype)))
    return bool(found) and all(found)


def offloaded(stage: int, dtype: str) -> dict[str, Any]:
    """Losses by the library and by torch, updates of the library and by which op; nothing was compiled."""
    numbers = {"lr": 1e-2, "weight_decay": 0.1}
    stock = cpu_adam.CPUAdamBuilder
    cpu_adam.CPUAdamBuilder = _Forbidden
    try:
        host, mine = _train(stage, dtype, {**SLUICE, "optimizer": True}, {"type": "AdamW", "params": numbers})
        assert cpu_adam.CPUAdamBuilder is _Forbidden  # put back as it was
    finally:
        cpu_adam.CPUAdamBuilder = stock
    op = _cpu_adam_of(host).ds_opt_adam
    updates, kind = op.updates, type(op).__name__
    one_pass = _wrote_its_parameters(host.optimizer)
    host.sluice.unswap()
    other, theirs = _train(stage, dtype, SLUICE, {"type": "AdamW", "params": {**numbers, "torch_adam": True}})
    other.sluice.unswap()
    return {"mine": mine, "torch": theirs, "updates": updates, "op": kind, "one_pass": one_pass}


def made_by_the_script() -> dict[str, Any]:
    """A DeepSpeedCPUAdam whose op was another one when the script made it."""
    calls: list[str] = []

    class Op:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: calls.append(name)

    class Builder:
        def load(self, verbose: bool = True) -> Any:
            return Op()

    import deepspeed

    model = build([{}])
    stock = cpu_adam.CPUAdamBuilder
    cpu_adam.CPUAdamBuilder = Builder
    try:
        given = DeepSpeedCPUAdam(list(model.parameters()), lr=1e-2)
    finally:
        cpu_adam.CPUAdamBuilder = stock
    config = copy.deepcopy(ds_config(zero_optimization={"stage": 0}))
    del config["optimizer"]
    config["sluice"] = {**SLUICE, "optimizer": True}
    host = deepspeed.initialize(model=model, optimizer=given, config=config)[0]
    before = [p.detach().clone() for p in model.parameters()]
    host.backward(host(*models.batch(0)))
    host.step()
    moved = sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    host.sluice.unswap()
    return {"calls": calls, "updates": given.ds_opt_adam.updates, "moved": moved}


def trainer(is_ours: bool, folder: str) -> dict[str, Any]:
    """transformers' Trainer with ZeRO-Offload by its ds_config alone, with values that it fills in itself ("auto")."""
    from transformers import Trainer, TrainingArguments

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
        config["sluice"] = {**SLUICE, "optimizer": True}
    else:
        config["optimizer"]["params"]["torch_adam"] = True

    class Named(models.Model):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x, labels)}

    torch.manual_seed(0)
    model = build([{"k": 2}])
    model.__class__ = Named
    torch.manual_seed(1)
    data = [{"x": torch.randn(12, models.WIDTH), "labels": torch.randn(12, models.WIDTH)} for _ in range(64)]
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=0,
        deepspeed=config,
        disable_tqdm=True,
    )
    stock = cpu_adam.CPUAdamBuilder
    cpu_adam.CPUAdamBuilder = _Forbidden
    try:
        run = Trainer(model=model, args=arguments, train_dataset=data)
        run.train()
    finally:
        cpu_adam.CPUAdamBuilder = stock
    losses = [float(entry["loss"]) for entry in run.state.log_history if "loss" in entry]
    updates = 0
    if is_ours:
        updates = _cpu_adam_of(run.deepspeed).ds_opt_adam.updates
        run.deepspeed.sluice.unswap()
    return {"losses": losses, "updates": updates}
