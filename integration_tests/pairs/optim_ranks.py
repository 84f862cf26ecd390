# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trains one row of optim_table.py with torch's optimizer and with the library's."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pair_compare
import sluice.optim
import torch
import torch.distributed as dist
from pair_compare import Run, Tolerance
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVED_AFTER, WIDTH = 6, 3, 12
EPSILON = 1e-3  # as large as gradients: with a small one Adam's updates do not depend on the scale of gradients
# F32 is the tolerance of adapters/torch/test/test_optim*.py. torch keeps moments of bf16 parameters in bf16, so ROUNDED
# is the tolerance of DeepSpeed's rows in 16 bits.
F32 = Tolerance(loss=1e-5, gradient=1e-5, norm=1e-5, tensor=1e-4)
ROUNDED = Tolerance(loss=0.02, gradient=0.05, norm=0.02, tensor=None)


def tolerance(row: dict[str, str]) -> Tolerance:
    """Returns the tolerance of the row's dtype."""
    return F32 if row["dtype"] == "f32" else ROUNDED


class _Model(nn.Module):
    """Has three layers. Some steps omit the last layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to(dtype)

    def forward(self, x: torch.Tensor, is_whole: bool) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.third(x) if is_whole else x


class _Job:
    """Trains one model with its optimizer, its scaler and its learning rates."""

    def __init__(self, row: dict[str, str], is_stock: bool, folder: str) -> None:
        self.row, self.is_stock = row, is_stock
        self.dtype = torch.bfloat16 if row["dtype"] == "bf16" else torch.float32
        self.model = _Model(self.dtype)
        if row["gradients"] == "fzpart":
            self.model.second.weight.requires_grad_(False)
        self.called: Any = self.model
        if row["ranks"] == "ddp":
            self.called = DistributedDataParallel(self.model, find_unused_parameters=row["gradients"] == "missing")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trained}]
        if row["groups"] == "twogroups":
            groups = [{"params": trained[:2]}, {"params": trained[2:], "lr": 2e-2, "weight_decay": 0.1}]
        numbers: dict[str, Any] = {"lr": 1e-2, "eps": EPSILON}
        numbers.update({"plain": {}, "fused": {"fused": True}}.get(row["variant"], {row["variant"]: True}))
        if not is_stock:
            numbers["check_finite"] = row["checking"] == "checked"
            numbers["max_norm"] = 0.1 if row["clipping"] == "maxnorm" else 0.0
            if row["ranks"] == "group":
                numbers["process_group"] = dist.group.WORLD
            if row["states"] == "file":
                numbers["state_file"] = os.path.join(folder, f"states{dist.get_rank()}-{len(os.listdir(folder))}")
        kinds: Any = torch.optim if is_stock else sluice.optim
        self.optimizer = {"adamw": kinds.AdamW, "adam": kinds.Adam}[row["kind"]](groups, **numbers)
        scaler: Any = torch.amp.GradScaler if is_stock else sluice.optim.GradScaler
        self.scaler = scaler("cpu", init_scale=8.0)
        decay = 0.7 if row["rate"] == "decaying" else 1.0
        self.rates = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, decay)

    def step(self, number: int, run: Run) -> None:
        """Runs one step of the optimizer."""
        parts = 2 if self.row["accumulation"] == "twosteps" else 1
        is_scaled = self.row["scaler"] == "scaler"
        is_bad = self.row["gradients"] == "infinite" and number == 2
        for part in range(parts):
            loss = self._loss(parts * number + part, self.row["gradients"] != "missing" or number != 2)
            run.losses.append(float(loss.detach()))
            given = loss * float("inf") if is_bad and dist.get_rank() == 1 else loss
            (self.scaler.scale(given) if is_scaled else given).backward()
        self._update(run, is_scaled)
        self.optimizer.zero_grad(set_to_none=self.row["zeroing"] == "tonone")
        self.rates.step()

    def _loss(self, number: int, is_whole: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x = torch.randn(8, WIDTH, generator=generator).to(self.dtype)
        is_rounded = self.row["dtype"] == "autocast"
        with torch.autocast("cpu", torch.bfloat16) if is_rounded else contextlib.nullcontext():
            out = self.called(x, is_whole)
        return (out.float() - x.float().roll(1, 1)).square().mean()

    def _update(self, run: Run, is_scaled: bool) -> None:
        held = [p for p in self.model.parameters() if p.grad is not None]
        if self.row["ranks"] == "byhand" or (self.row["ranks"] == "group" and self.is_stock):
            for p in held:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        is_finite = all(bool(p.grad.isfinite().all()) for p in held)
        if self.row["clipping"] == "clipgrad" or (self.row["clipping"] == "maxnorm" and self.is_stock):
            if is_scaled:
                self.scaler.unscale_(self.optimizer)
            norm = float(nn.utils.clip_grad_norm_(held, 0.1))
            run.norms += [norm] if is_finite else []
        skipped = 0 if self.is_stock else self.optimizer.skipped_steps
        if is_scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            run.counts.append(self.scaler.get_scale())
        elif is_finite or not self.is_stock:  # the library itself skips the step; with torch the caller does
            self.optimizer.step()
        if (
            not self.is_stock
            and self.row["clipping"] == "maxnorm"
            and is_finite
            and self.optimizer.skipped_steps == skipped
        ):
            run.norms.append(self.optimizer.norm)

    def load(self, path: str, other: _Job, folder: str) -> _Job:
        """Loads the state of `other`; "crossed": through a job of the other kind and back."""
        torch.save([other.model.state_dict(), other.optimizer.state_dict(), other.rates.state_dict()], path)
        model, state, rates = torch.load(path, weights_only=False)
        if self.row["saving"] == "crossed":
            crossed = _Job({**self.row, "states": "memory"}, not self.is_stock, folder)
            crossed.optimizer.load_state_dict(state)
            state = crossed.optimizer.state_dict()
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(state)
        self.rates.load_state_dict(rates)
        self.scaler.load_state_dict(other.scaler.state_dict())
        return self


def train(row: dict[str, str], section: Any, folder: str) -> Run:
    run, job = Run(), _Job(row, section is None, folder)
    for step in range(STEPS):
        job.step(step, run)
        if step == SAVED_AFTER - 1 and row["saving"] != "unsaved":
            job = _Job(row, section is None, folder).load(os.path.join(folder, f"saved{dist.get_rank()}"), job, folder)
    run.parameters = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    if row["dtype"] != "bf16":  # torch's moments have other dtypes
        run.saved = {
            k: v for k, v in pair_compare.tensors_in(job.optimizer.state_dict()["state"]).items() if "exp_" in k
        }
    return run
