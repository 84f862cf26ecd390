# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trains one row of megatron_table.py with stock Megatron-Core and with Sluice's layers."""

from __future__ import annotations

import functools
import os
from typing import Any

import megatron_table
import mg_cases
import mg_models
import mg_moves
import sluice
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from pair_compare import Run, Tolerance

STEPS = 3  # before the checkpoint, and after it
EPSILON = 1e-2  # as large as gradients: with a small one Adam turns rounding errors into full updates
# Tolerances of losses (of 4.6) and norms are from test_mg_training.py; in 16 bits, or if rows are exchanged in fewer
# bits, from the table of DeepSpeed.
F32 = Tolerance(loss=1e-6, gradient=2e-5, norm=2e-4, tensor=None, update=0.05)
ROUNDED = Tolerance(loss=0.02, gradient=0.05, norm=0.02, tensor=None, update=0.5)


def tolerance(row: dict[str, str]) -> Tolerance:
    """Returns the tolerance of the row's dtypes."""
    return F32 if row["dtype"] == "f32" and row["wire"] == "wire32" else ROUNDED


def _freeze(row: dict[str, str], model: Any) -> None:
    layers = mg_cases.moe_layers(model)
    frozen: list[Any] = {
        "trained": lambda: [],
        "fzlayer": lambda: list(layers[-1].experts.parameters()),
        "fzhalf": lambda: [p for layer in layers for n, p in layer.experts.named_parameters() if "fc1" in n],
        "fzrank": lambda: [p for layer in layers for p in layer.experts.parameters() if dist.get_rank() == 0],
        "fzrouter": lambda: [layer.router.weight for layer in layers],
        "fzdense": lambda: list(model.embedding.parameters()),
    }[row["frozen"]]()
    for parameter in frozen:
        parameter.requires_grad_(False)


def _host(row: dict[str, str], section: dict[str, Any] | None) -> mg_models.Host:
    """Makes a host whose parameters are frozen before Megatron's DDP reads them."""
    fill = mg_models.fill

    def filled(model: Any, ep: int) -> None:
        fill(model, ep)
        _freeze(row, model)

    ddp = {
        "ddp": {},
        "overlapped": {"overlap_grad_reduce": True},
        "distributed": {"use_distributed_optimizer": True},
    }[row["ddp"]]
    how, clip = "stock" if section is None else "decorated", 1.0 if row["clipping"] == "clip" else 0.0
    changes = megatron_table.changes(row)
    if tolerance(row) is ROUNDED:  # so that rounding changes a route's weight, but never the route
        changes["moe_router_topk"] = 4
    config = mg_models.OptimizerConfig
    mg_models.fill, mg_models.OptimizerConfig = filled, functools.partial(config, adam_eps=EPSILON)
    try:
        return mg_models.Host(int(row["ep"][-1]), how, section or {}, ddp=ddp, clip=clip, **changes)
    finally:
        mg_models.fill, mg_models.OptimizerConfig = fill, config


def train(row: dict[str, str], section: dict[str, Any] | None, folder: str) -> Run:
    run, host = Run(), _host(row, section)
    run.start = host.parameters()
    is_moved = section is not None and row["moves"] == "byhand"

    def before_update(step: int) -> None:
        if is_moved and step == 1:
            mg_moves.shuffle(host, step + len(run.losses))

    for part in range(2):
        found = host.train(STEPS, microbatches=int(row["micro"][1:]), before_update=before_update)
        run.losses += found["losses"]
        run.norms += found["norms"]
        if part == 0 and row["saving"] == "saved":
            path = os.path.join(folder, "saved")
            if dist.get_rank() == 0:
                os.makedirs(path)
            dist.barrier()
            dist_checkpointing.save(mg_cases._state(host), path)
            host = _host(row, section)
            with torch.no_grad():
                for parameter in host.model.parameters():
                    parameter.zero_()
            loaded = dist_checkpointing.load(mg_cases._state(host, True), path)
            host.model.load_state_dict(loaded["model"])
            host.optimizer.load_state_dict(loaded["optimizer"])
    if is_moved:
        mg_moves.go_home(host)
    if section is not None:
        assert all(each["num_passes"] > 0 for each in sluice.stats(host.model)["contexts"])
    run.parameters = host.parameters()
    return run
