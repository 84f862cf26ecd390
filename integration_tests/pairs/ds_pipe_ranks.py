# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trains one row of ds_pipe_table.py with DeepSpeed's own schedule and with Sluice's."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "deepspeed"))
import ds_pairs
import pipe_models
import torch
import torch.distributed as dist
from pair_compare import BITS, Run, Tolerance

STEPS, SAVED_AFTER, STAGES = 6, 3, 2
# Tolerances of experts are from test_ds_pipe_experts.py, of Adam from test_ds_optimizer.py. NORM: after layers have
# moved, the norm sums squares in another order (docs/deepspeed-pipeline.md, Layers that move between stages).
NORM = 1e-6
F32 = Tolerance(loss=1e-5, gradient=1e-5, norm=1e-4, tensor=1e-4)
ROUNDED = Tolerance(loss=0.02, gradient=0.05, norm=0.02, tensor=None, update=0.5)


def tolerance(row: dict[str, str]) -> Tolerance:
    """Returns the tolerance, which is zero unless sums run in another order."""
    other_norm = row["clipping"] == "clip" and (row["moves"] != "still" or row["plan"] != "asbuilt")
    if row["model"] != "experts" and row["optimizer"] == "torchadam" and not other_norm:
        return BITS if row["moves"] == "still" and row["plan"] == "asbuilt" else BITS._replace(gradient=NORM)
    return F32 if row["dtype"] == "f32" else ROUNDED


def _linears(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns all Linears but gates, because stock fails on only one rank if an auxiliary loss has no gradient."""
    named = layer.named_modules()
    return [part for name, part in named if isinstance(part, torch.nn.Linear) and "gate" not in name]


def _kind(row: dict[str, str]) -> str:
    """Returns the kind of model in pipe_models."""
    return {"blocks": "plain", "experts": "moe"}.get(row["model"], row["model"])


def _net(row: dict[str, str], seed: int) -> Any:
    options: dict[str, Any] = {} if row["checkpointing"] == "norepeat" else {"activation_checkpoint_interval": 1}
    if row["model"] == "experts":
        options["blocks"] = [{"ep_size": 1, "k": 2}, None, {"ep_size": 1}]
    elif row["sizes"] == "varied":
        options["dynamic_shape"] = True
    net = pipe_models.module(_kind(row), STAGES, **options)
    own = [layer for layer in net.forward_funcs if isinstance(layer, torch.nn.Module) and list(layer.parameters())]
    frozen = {
        "trained": lambda: [],
        "fzlayer": lambda: own[1:2],
        "fzpart": lambda: [parts[0] for layer in own for parts in [_linears(layer)] if parts],
    }[row["frozen"]]()
    for layer in frozen:
        layer.requires_grad_(False)
    if seed:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.5)
    return net


def _engine(row: dict[str, str], section: dict[str, Any] | None, seed: int) -> Any:
    net = _net(row, seed)
    return ds_pairs.initialized(
        *(row, section, net, 1e-2, row["model"] == "experts"),
        train_micro_batch_size_per_gpu=pipe_models.ROWS,
        gradient_accumulation_steps=int(row["batches"][1:]),
        gradient_clipping=0.1 if row["clipping"] == "clip" else 0.0,
        pipeline={"use_reentrant": row["checkpointing"] == "reentrant"},
    )


def _data(row: dict[str, str], step: int, count: int) -> Any:
    dtype = torch.bfloat16 if row["dtype"] == "bf16" else torch.float32
    return pipe_models.batches(_kind(row), STAGES, count, step, dtype, row["sizes"] == "varied")


def _step(row: dict[str, str], host: Any, step: int, run: Run) -> None:
    torch.manual_seed(77 * step + dist.get_rank())
    rounded = torch.autocast("cpu", torch.bfloat16) if row["dtype"] == "autocast" else contextlib.nullcontext()
    with rounded:
        run.losses.append(float(host.train_batch(_data(row, step, int(row["batches"][1:])))))
        if row["evaluating"] == "evaluated" and step % 2:
            found = host.eval_batch(_data(row, 100 + step, 3), num_micro_batches=3)
            if row["model"] != "experts" or row["dtype"] == "f32":  # else rounding changes routes, and losses by 0.02
                run.evaluations.append(float(found))
    norm = host.get_global_grad_norm()
    run.norms += [] if norm is None else [float(norm)]


def train(row: dict[str, str], section: dict[str, Any] | None, folder: str) -> Run:
    run, host = Run(), _engine(row, section, seed=0)
    home = list(host.module.parts)
    run.start = {name: p.detach().clone() for name, p in host.module.named_parameters()}
    try:
        for step in range(STEPS):
            if section is not None and row["moves"] != "still" and step in (1, 4):
                middle = home[1] - 1 if step == 1 else home[1]
                host.sluice.move_layers([0, middle, home[2]], live=row["moves"] == "live")
            _step(row, host, step, run)
            if step == SAVED_AFTER - 1 and row["saving"] == "saved":
                if section is not None and list(host.module.parts) != home:  # stock's new model has these parts
                    host.sluice.move_layers(home)
                host = ds_pairs.saved_and_loaded(row, host, functools.partial(_engine, row, section, 1), folder, run)
        if section is not None:
            assert host.sluice.pipeline.stats()["batches"] > 0
            if list(host.module.parts) != home:
                host.sluice.move_layers(home)
        run.parameters = {name: p.detach().clone() for name, p in host.module.named_parameters()}
    finally:
        ds_pairs.end(host)
    return run
