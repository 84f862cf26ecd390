# SPDX-License-Identifier: Apache-2.0
"""Small models with DeepSpeed's own MoE, and a function that trains them with stock DeepSpeed or through Sluice."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import nn

WIDTH = 16
HIDDEN = 24
TOKENS = (2, 12)  # batch, length


class ClassExpert(nn.Module):
    """The usual way of writing an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.up(x), approximate="tanh")
        return self.down(h)


class GatedExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TupleExpert(nn.Module):
    """Returns (output, bias), as Megatron's modules do. Checks the rank of the tensor that the host passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert x.dim() == 4 and x.shape[1] == 1, x.shape
        if x.shape[2] > 10**9:  # an expert with a branch is never fused
            raise AssertionError
        return torch.tanh(self.linear(x)) * self.scale, None


def expert(kind: str) -> nn.Module:
    """Returns an expert by name."""

    def around(*middle: nn.Module, hidden: int = HIDDEN) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, hidden), *middle, nn.Linear(hidden, WIDTH))

    kinds: dict[str, Callable[[], nn.Module]] = {
        "relu": lambda: around(nn.ReLU()),
        "gelu": lambda: around(nn.GELU()),
        "silu": lambda: around(nn.SiLU()),
        "plain_linears": around,
        "dropout": lambda: around(nn.ReLU(), nn.Dropout(0.1)),
        "wide": lambda: around(nn.ReLU(), hidden=2048),
        "class": ClassExpert,
        "gated": GatedExpert,
        "tuple": TupleExpert,
        "single": lambda: nn.Linear(WIDTH, WIDTH),
        "batchnorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm2d(1)),
    }
    return kinds[kind]()


class Model(nn.Module):
    """Linear, one MoE per entry of `layers`, Linear; a regression loss and the gates' auxiliary losses."""

    def __init__(self, layers: list[dict[str, Any]], checkpointing: str | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.moes = nn.ModuleList(_moe(dict(layer)) for layer in layers)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.checkpointing = checkpointing

    def _moe(self, moe: MoE, x: torch.Tensor, used: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, aux, _ = moe(x, used)
        return out, aux

    def forward(self, x: torch.Tensor, target: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        total = h.new_zeros((), dtype=torch.float32)
        for moe in self.moes:
            if self.checkpointing == "deepspeed" and self.training:
                out, aux = deepspeed.checkpointing.checkpoint(self._moe, moe, h, used)
            elif self.checkpointing and self.training:
                out, aux = torch.utils.checkpoint.checkpoint(
                    self._moe, moe, h, used, use_reentrant=self.checkpointing == "reentrant"
                )
            else:
                out, aux = self._moe(moe, h, used)
            h = h + out.to(h.dtype)
            total = total + 0.01 * aux
        return F.mse_loss(self.last(h).float(), target.float(), reduction="sum") / 64 + total


def _moe(options: dict[str, Any]) -> MoE:
    return MoE(WIDTH, expert(options.pop("expert", "relu")), **{"num_experts": 4, "ep_size": 2, **options})


def fill_experts(moe: MoE) -> None:
    """Fills experts with numbers that depend on their global numbers alone."""
    experts = moe.deepspeed_moe.experts.deepspeed_experts
    for index, expert in enumerate(experts):
        generator = torch.Generator().manual_seed(1000 + (dist.get_rank() % moe.ep_size) * len(experts) + index)
        with torch.no_grad():
            for parameter in expert.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def build(layers: list[dict[str, Any]], checkpointing: str | None = None, seed: int = 0) -> Model:
    """Returns the same model on every call. Experts differ by their global number."""
    torch.manual_seed(seed)
    model = Model(layers, checkpointing)
    for moe in model.moes:
        fill_experts(moe)
        with torch.no_grad():
            moe.deepspeed_moe.gate.wg.weight.mul_(4)  # sharper gates, for unequal counts and drops
    return model


def ds_config(**changes: Any) -> dict[str, Any]:
    """Returns a ds_config for which DeepSpeed compiles no op."""
    return {
        "train_micro_batch_size_per_gpu": TOKENS[0],
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        **changes,
    }


SLUICE = {"enabled": True, "chunks": 2, "timeout": 120}


def engine(model: nn.Module, config: dict[str, Any], sluice: dict[str, Any] | None = None) -> Any:
    """Calls only deepspeed.initialize."""
    config = copy.deepcopy(config)
    if sluice is not None:
        config["sluice"] = sluice
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def batch(step: int, length: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Inputs and targets of this rank and step. length: for ranks with unequal batches."""
    generator = torch.Generator().manual_seed(10_000 * (dist.get_rank() + 1) + step)
    shape = (TOKENS[0], TOKENS[1] if length is None else length, WIDTH)
    x = torch.randn(shape, generator=generator) + 0.3
    return x.to(dtype), torch.roll(x, 1, dims=-1).sin()


def losses_of(
    host: Any,
    steps: range,
    forward: Callable[[Any, int], torch.Tensor],
    autocast: str | None = None,
    before: Callable[[Any, int], None] | None = None,
    check: Callable[[Any, int], None] | None = None,
    after: Callable[[Any, int], None] | None = None,
) -> list[float]:
    """Trains an engine, and returns the losses. before, check, after: called with engine and step before each forward,
    and before and after each update."""
    nothing, losses = (lambda host, step: None), []
    for step in steps:
        (before or nothing)(host, step)
        with torch.autocast("cpu", getattr(torch, autocast)) if autocast else contextlib.nullcontext():
            loss = forward(host, step)
        host.backward(loss)
        (check or nothing)(host, step)
        host.step()
        losses.append(float(loss.detach()))
        (after or nothing)(host, step)
    return losses


def train(
    layers: list[dict[str, Any]],
    steps: int,
    sluice: dict[str, Any] | None,
    config: dict[str, Any] | None = None,
    checkpointing: str | None = None,
    autocast: str | None = None,
    used: bool = False,
    dtype: str = "float32",
    evaluate: bool = False,
    check: Any = None,
    before: Any = None,
    at_end: Any = None,
    prepare: Any = None,
    data: Any = batch,
) -> dict[str, Any]:
    """Trains, and returns values for the comparison of two runs. prepare: called with the model before the engine is
    made. check, before: of `losses_of`. at_end: called with the engine after the last update; its result is "end"."""
    model = build(layers, checkpointing)
    if prepare is not None:
        prepare(model)
    host = engine(model, {**ds_config(), **(config or {})}, sluice)
    if sluice is not None:
        assert len(host.sluice.layers) == len(layers), host.sluice.refused
    counts, evaluations = [], []

    def forward(host: Any, step: int) -> torch.Tensor:
        torch.manual_seed(77 * step + dist.get_rank())  # both runs use the same random numbers
        x, target = data(step, None, getattr(torch, dtype))
        mask = (torch.arange(x.shape[0] * x.shape[1]) % 5 != 0).int() if used else None
        loss = host(x, target, mask)
        counts.append([moe.deepspeed_moe.exp_counts.tolist() for moe in host.module.moes])
        return loss

    def after(host: Any, step: int) -> None:
        if evaluate and step % 3 == 1:
            host.eval()
            with torch.no_grad():
                evaluations.append(float(host(*data(step, None, getattr(torch, dtype)))))
            host.train()

    losses = losses_of(host, range(steps), forward, autocast, before, check, after)
    result = {
        "losses": losses,
        "counts": counts,
        "evaluations": evaluations,
        "l_aux": [float(moe.deepspeed_moe.l_aux) for moe in host.module.moes],
        "weights": {name: tensor.detach().double().norm().item() for name, tensor in host.module.named_parameters()},
        "random": torch.random.get_rng_state().sum().item(),
    }
    if at_end is not None:
        result["end"] = at_end(host)
    if sluice is not None:
        result["stats"] = [state["computed_by"] for state in host.sluice.stats()["layers"]]
        contexts = host.sluice.stats()["contexts"]
        result["passes_in_place"] = max((each["passes_in_place"] for each in contexts), default=0)
        result["peaks"] = {str(each["ranks"]): each["peak_bytes"] for each in contexts}
        result["peak_bytes"] = max(result["peaks"].values(), default=0)
        host.sluice.unswap()
    host.destroy()
    return result


def go_home(host: Any) -> None:
    """Moves all experts to their own ranks."""
    with host.sluice.at_home(False):
        pass


def said(action: Callable[[], Any]) -> str:
    """Returns "TYPE: MESSAGE" of the error of a call, or "" without an error."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained_by_trainer(model: Model, config: dict[str, Any], folder: str, steps: int, **arguments: Any) -> Any:
    """Returns transformers' Trainer after a training of the model, and its losses."""
    from transformers import Trainer, TrainingArguments

    class Named(Model):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x, labels)}

    model.__class__ = Named
    torch.manual_seed(1)
    data = [{"x": torch.randn(12, WIDTH), "labels": torch.randn(12, WIDTH)} for _ in range(64)]
    arguments |= {"output_dir": folder, "max_steps": steps, "deepspeed": config, "learning_rate": 1e-2, "seed": 0}
    arguments |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1}
    quiet = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    run = Trainer(model=model, args=TrainingArguments(**arguments, **quiet), train_dataset=data)
    run.train()
    return run, [float(entry["loss"]) for entry in run.state.log_history if "loss" in entry]
