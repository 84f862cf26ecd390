# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trains one row of ds_moe_table.py with stock DeepSpeed and with Sluice."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "deepspeed"))
import ds_models as models
import ds_pairs
import torch
import torch.distributed as dist
from cases_placement import noted_norms, shuffle
from pair_compare import Run, Tolerance
from sluice.adapters.deepspeed.moe import moving

STEPS, SAVED_AFTER = 6, 3
# The tolerances of integration_tests/deepspeed/test_ds_parity.py.
F32 = Tolerance(loss=1e-5, gradient=1e-5, norm=1e-4, tensor=1e-4)
ROUNDED = Tolerance(loss=0.02, gradient=0.05, norm=0.02, tensor=None, update=0.5, counts=False)


def tolerance(row: dict[str, str]) -> Tolerance:
    """Returns the tolerance. Rows that are exchanged in fewer bits differ by no more than in bf16."""
    return F32 if row["dtype"] == "f32" and row["wire"] == "wire32" else ROUNDED


def _layers(row: dict[str, str]) -> list[dict[str, Any]]:
    gate = {
        "top1": {"k": 1},
        "top2": {"k": 2},
        "nodrop": {"k": 2, "drop_tokens": False},
        "noisy": {"k": 1, "noisy_gate_policy": "RSample"},
    }[row["gate"]]
    sizes = {"ep2": (2, 2), "ep1": (1, 1), "ep1and2": (1, 2)}[row["ep"]]
    return [{"expert": row["experts"], "ep_size": size, **gate} for size in sizes]


def _freeze(model: Any, what: str) -> None:
    experts = [list(moe.deepspeed_moe.experts.deepspeed_experts) for moe in model.moes]
    frozen: list[Any] = {
        "trained": lambda: [],
        "fzsome": lambda: [p for layer in experts for p in layer[0].parameters()],
        "fzrank": lambda: [p for layer in experts for e in layer for p in e.parameters() if dist.get_rank() == 0],
        "fzhalf": lambda: [next(expert.parameters()) for layer in experts for expert in layer],
        "fzlayer": lambda: [p for expert in experts[1] for p in expert.parameters()],
        "fzgate": lambda: [moe.deepspeed_moe.gate.wg.weight for moe in model.moes],
        "fzdense": lambda: list(model.first.parameters()),
    }[what]()
    for parameter in frozen:
        parameter.requires_grad_(False)


def _leave_experts_idle(model: Any) -> None:
    """Sends all rows of the first layer to its first two experts, even after a few steps."""
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(models.WIDTH))
        model.first.bias.zero_()
        gate = model.moes[0].deepspeed_moe.gate.wg.weight
        gate[0], gate[1], gate[2:] = 1.0, 0.7, -1.0


def _decide_gates(model: Any) -> None:
    """Scales gates so that rounding changes no route, and both trainings have the same routes."""
    with torch.no_grad():
        for moe in model.moes:
            moe.deepspeed_moe.gate.wg.weight.mul_(4)


def _rate(row: dict[str, str]) -> float:
    return 1e-2 if tolerance(row) is F32 else 2e-3


def _engine(row: dict[str, str], section: dict[str, Any] | None, seed: int) -> Any:
    checkpointing = {"norepeat": None, "hostrepeats": "deepspeed"}.get(row["checkpointing"], row["checkpointing"])
    model = models.build(_layers(row), checkpointing, seed)
    if row["rows"] == "idle":
        _leave_experts_idle(model)
    if tolerance(row) is ROUNDED:
        _decide_gates(model)
    _freeze(model, row["frozen"])
    host = ds_pairs.initialized(
        *(row, section, model, _rate(row), True),
        gradient_clipping=0.5 if row["clipping"] == "clip" else 0.0,
        gradient_accumulation_steps=2 if row["accumulation"] == "twosteps" else 1,
    )
    if section is not None:
        assert len(host.sluice.layers) == 2, host.sluice.refused
    return host


def _batch(row: dict[str, str], step: int) -> Any:
    x, target = models.batch(step, dtype=torch.bfloat16 if row["dtype"] == "bf16" else torch.float32)
    return (x.abs() + 0.1 if row["rows"] == "idle" else x), target


def _own_norm(host: Any) -> float | None:
    """Returns the norm of the gradients that are stored in their parameters: without ZeRO, in f32."""
    squares = [p.grad.double().square().sum().item() for p in host.module.parameters() if p.grad is not None]
    return sum(squares) ** 0.5 if squares else None


def _step(row: dict[str, str], host: Any, step: int, run: Run) -> None:
    parts = host.gradient_accumulation_steps()
    for part in range(parts):
        torch.manual_seed(77 * (parts * step + part) + dist.get_rank())  # both trainings use the same random numbers
        rounded = torch.autocast("cpu", torch.bfloat16) if row["dtype"] == "autocast" else contextlib.nullcontext()
        with rounded:
            loss = host(*_batch(row, parts * step + part))
        run.counts.append([moe.deepspeed_moe.exp_counts.tolist() for moe in host.module.moes])
        run.losses.append(float(loss.detach()))
        host.backward(loss)
        if part == parts - 1 and host.zero_optimization_stage() == 0 and row["moves"] == "still":
            own = _own_norm(host)
            run.norms += [] if own is None else [own]
        host.step()
    norm = host.get_global_grad_norm()
    run.norms += [] if norm is None else [float(norm)]


def train(row: dict[str, str], section: dict[str, Any] | None, folder: str) -> Run:
    run, host = Run(), _engine(row, section, seed=0)
    run.start = {name: p.detach().clone() for name, p in host.module.named_parameters()}
    try:
        for step in range(STEPS):
            if section is not None and row["moves"] == "byhand" and step in (2, 4):
                shuffle(host, step)
                assert all(map(moving.has_moved, host.sluice.layers))
            with noted_norms(run.norms):  # in f32 without ZeRO the host does not report them
                _step(row, host, step, run)
            if step == SAVED_AFTER - 1 and row["saving"] == "saved":
                host = ds_pairs.saved_and_loaded(row, host, functools.partial(_engine, row, section, 1), folder, run)
        if section is not None:
            is_skewed = row["moves"] == "placed" and row["rows"] == "idle" and row["ep"] == "ep2"
            if is_skewed and row["frozen"] != "fzsome":  # its trained experts may have no valid placement
                assert sum(
                    migration.num_moves for watch in host.sluice.decider.watches for migration in watch.migrations
                )
            models.go_home(host)
        run.parameters = {name: p.detach().clone() for name, p in host.module.named_parameters()}
        host.eval()
        with torch.no_grad():
            run.evaluations.append(float(host(*_batch(row, 100))))
    finally:
        ds_pairs.end(host)
    return run
