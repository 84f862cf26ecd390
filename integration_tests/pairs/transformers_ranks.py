# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trains one row of transformers_table.py with transformers' own transport and with Sluice's."""

import contextlib
import copy
import os
import sys
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[1] / host) for host in ("transformers", "deepspeed"))
import sluice
import sluice.optim
import tf_ep_jobs
import tf_ep_moves
import tf_models
import torch
import torch.distributed as dist
from pair_compare import Run, Tolerance
from sluice.errors import Unsupported

STEPS, SAVED_AFTER = 6, 3
LAYOUTS = {"tp": {"tp_size": 2}, "fsdp2": {"fsdp_size": 2}}
EPSILON = 1e-2  # as large as gradients: with a small one Adam's updates do not depend on the scale of gradients
# Tolerances of losses are from the twenty steps of test_tf_parallel.py; in 16 bits, or if rows are exchanged in fewer
# bits, from the table of DeepSpeed.
F32 = Tolerance(loss=1e-4, gradient=1e-4, norm=1e-4, tensor=1e-4, counts=False)
ROUNDED = Tolerance(loss=0.02, gradient=0.05, norm=0.02, tensor=None, update=0.5, counts=False)
# Every token goes to all experts, so that rounding changes a route's weight, but never the route.
EVERY = {
    "qwen3_moe": {"num_experts_per_tok": 8},
    "mixtral": {"num_experts_per_tok": 4},
    "gpt_oss": {"num_experts_per_tok": 4},
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
}


def tolerance(row: dict[str, str]) -> Tolerance:
    """Returns the tolerance of the row's dtypes."""
    return F32 if row["dtype"] == "f32" and row["wire"] == "wire32" else ROUNDED


def _freeze(row: dict[str, str], model: Any) -> None:
    experts = tf_models.experts_of(model)
    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    frozen: list[Any] = {
        "trained": lambda: [],
        "fzlayer": lambda: list(experts[-1].parameters()),
        "fzhalf": lambda: [next(module.parameters()) for module in experts],
        "fzrank": lambda: [p for module in experts for p in module.parameters() if dist.get_rank() == 0],
        "fzrouter": lambda: [p for module in routers for p in module.parameters()],
        "fzdense": lambda: [model.model.embed_tokens.weight, model.lm_head.weight],
    }[row["frozen"]]()
    assert frozen or row["frozen"] in ("trained", "fzrank")
    for parameter in frozen:
        parameter.requires_grad_(False)


def _model(row: dict[str, str], path: str, is_stock: bool) -> Any:
    experts, transport = ("grouped_mm", "all_to_all") if is_stock else (row["experts"], "sluice")
    dtype = {"dtype": torch.bfloat16} if row["dtype"] == "bf16" else {}
    model = tf_ep_jobs.split(path, LAYOUTS[row["layout"]], experts, transport, **dtype).train()
    if row["checkpointing"] != "norepeat":
        is_reentrant = row["checkpointing"] == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    _freeze(row, model)
    return model


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _optimizer(row: dict[str, str], model: Any, is_stock: bool) -> Any:
    kind: Any = sluice.optim.AdamW if not is_stock and row["optimizer"] == "suboptim" else torch.optim.AdamW
    same = {} if kind is sluice.optim.AdamW else {"foreach": False}
    return kind([p for p in model.parameters() if p.requires_grad], lr=3e-3, eps=EPSILON, **same)


def _step(row: dict[str, str], model: Any, optimizer: Any, number: int, run: Run) -> None:
    parts = 2 if row["accumulation"] == "twosteps" else 1
    shared = LAYOUTS[row["layout"]].get("tp_size", 1)
    optimizer.zero_grad()
    for part in range(parts):
        ids = tf_models.batch(100 * (parts * number + part) + dist.get_rank() // shared)
        is_rounded = row["dtype"] == "autocast"
        with torch.autocast("cpu", torch.bfloat16) if is_rounded else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        run.losses.append(float(loss.detach()))
    # All parameters contribute, as every rank has a shard of each, frozen or not.
    grads = [_whole(torch.zeros_like(p) if p.grad is None else p.grad).double() for p in model.parameters()]
    norm = sum(float(grad.square().sum()) for grad in grads) ** 0.5
    run.norms.append(norm)
    if row["clipping"] == "clip":  # by the same norm on all ranks; each parameter alone, as DTensors have two meshes
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5 / norm)
    optimizer.step()


def train(row: dict[str, str], section: Any, folder: str) -> Run:
    sluice.configure(**({} if section is None else section))
    try:
        return _trained(row, section is None, folder)
    finally:
        sluice.configure()


def _trained(row: dict[str, str], is_stock: bool, folder: str) -> Run:
    path = os.path.join(folder, "model")
    if dist.get_rank() == 0:
        every = EVERY[row["model"]] if tolerance(row) is ROUNDED else {}
        tf_models.make(row["model"], "eager", **every).save_pretrained(path)
    dist.barrier()
    model = _model(row, path, is_stock)
    optimizer, run = _optimizer(row, model, is_stock), Run()
    started: list[Any] = []
    run.start = {name: _whole(p.detach()).clone() for name, p in model.named_parameters()}
    for number in range(STEPS):
        if not is_stock and row["moves"] == "byhand" and number in (2, 4):
            tf_ep_moves.shuffle(model, number, optimizer)
        if not is_stock and row["moves"] == "during" and number == 1:
            started = tf_ep_moves._start(model, number, optimizer)
        _step(row, model, optimizer, number, run)
        if number == SAVED_AFTER - 1 and row["saving"] == "saved":
            saved = os.path.join(folder, "saved")
            at_home = contextlib.nullcontext() if is_stock else sluice.experts_at_home(model, optimizer)
            with at_home:
                model.save_pretrained(saved)
                state = copy.deepcopy(optimizer.state_dict())  # its tensors are the optimizer's own, which move back
            dist.barrier()
            model = _model(row, saved, is_stock)
            optimizer = _optimizer(row, model, is_stock)
            optimizer.load_state_dict(state)
    for migration in started:
        if migration.why_not not in ("", "experts are moved at once"):  # the latter when a model is saved
            raise Unsupported(migration.why_not)
    if not is_stock:
        tf_ep_moves.go_home(model, optimizer)
    run.parameters = {name: _whole(p.detach()).clone() for name, p in model.named_parameters()}
    model.eval()
    with torch.no_grad():
        ids = tf_models.batch(3)
        run.evaluations.append(float(model(input_ids=ids, labels=ids).loss))
    return run
