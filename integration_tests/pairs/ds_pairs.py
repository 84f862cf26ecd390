# SPDX-License-Identifier: Apache-2.0
"""Rank-side: what the trainings of ds_moe_ranks.py and ds_pipe_ranks.py share: engines and their checkpoints."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import cpuinfo
import deepspeed
import ds_models
import pair_compare
import sluice.optim
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # DeepSpeed's CPU Adam calls it, which starts processes
EPSILON = 1e-2  # as large as gradients: with a small one Adam's updates do not depend on the scale of gradients


def initialized(row: dict[str, str], section: Any, model: Any, rate: float, has_experts: bool, **fields: Any) -> Any:
    """Returns the engine of a row. fields: other fields of the ds_config."""
    is_key = section is not None and row["optimizer"] in ("keyadam", "offload")
    adam = {"lr": rate, "weight_decay": 0.01, "eps": EPSILON, **({} if is_key else {"torch_adam": True})}
    zero: dict[str, Any] = {"stage": int(row["zero"][-1])}
    if row["optimizer"] == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    config = ds_models.ds_config(
        zero_optimization=zero,
        zero_force_ds_cpu_optimizer=False,
        zero_allow_untested_optimizer=True,
        optimizer={"type": "AdamW", "params": adam},
        **({"bf16": {"enabled": True}} if row["dtype"] == "bf16" else {}),
        **({} if section is None else {"sluice": section}),
        **fields,
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    client = None
    if row["optimizer"] == "suboptim":
        del config["optimizer"]
        kind = torch.optim.AdamW if section is None else sluice.optim.AdamW
        groups: Any = trained
        if has_experts:
            groups = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
        client = kind(groups, lr=rate, weight_decay=0.01, eps=EPSILON)
    return deepspeed.initialize(model=model, model_parameters=trained, optimizer=client, config=config)[0]


def saved_and_loaded(row: dict[str, str], host: Any, other: Callable[[], Any], folder: str, run: Any) -> Any:
    """Saves a checkpoint, and returns another engine that has loaded it. Rank 0 keeps its tensors in run.saved, by file
    and path in it: those of the optimizer if both trainings have the same class, since each has its own file format."""
    host.save_checkpoint(folder, tag="x")
    dist.barrier()
    new = other()
    end(host)
    path, _ = new.load_checkpoint(folder, tag="x")
    assert path is not None
    if dist.get_rank() == 0:
        is_one_class = row["optimizer"] in ("torchadam", "suboptim")
        for file in sorted(os.listdir(os.path.join(folder, "x"))):
            data = torch.load(os.path.join(folder, "x", file), weights_only=False, map_location="cpu")
            tensors = pair_compare.tensors_in(data, file)
            run.saved.update((k, v) for k, v in tensors.items() if is_one_class or "optim" not in k)
    return new


def end(host: Any) -> None:
    if hasattr(host, "sluice"):
        with contextlib.suppress(Exception):  # the failure itself is reported
            host.sluice.unswap()
    host.destroy()
