# SPDX-License-Identifier: Apache-2.0
"""Rank-side: cases that switch Sluice on and off, and errors."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ds_models as models
import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts
from deepspeed.moe.sharded_moe import MOELayer
from ds_models import SLUICE, WIDTH, build, ds_config, engine
from sluice.adapters.deepspeed.moe.layer import SluiceMOELayer
from torch import nn


def start(
    section: Any = None,
    environment: str | None = None,
    layers: list[dict[str, Any]] | None = None,
    extra: dict[str, Any] | None = None,
    per_rank: list[Any] | None = None,
    form: str = "",
    folder: str = "",
) -> list[str]:
    """Calls deepspeed.initialize with this section and trains; returns the classes of the layers. form: how launchers
    pass the config, as a "path" or in "base64"."""
    config: Any = ds_config(**(extra or {}))
    section = per_rank[dist.get_rank()] if per_rank is not None else section
    if section is not None:
        config["sluice"] = section
    text = json.dumps(config)
    if form == "path":
        config = os.path.join(folder, f"ds_config{dist.get_rank()}.json")
        Path(config).write_text(text)
    elif form == "base64":
        config = base64.urlsafe_b64encode(text.encode()).decode()
    with patch.dict(os.environ, {} if environment is None else {"SLUICE": environment}):
        host = engine(build(layers if layers is not None else [{}]), config)
    kinds = [type(moe.deepspeed_moe).__name__ for moe in host.module.moes]
    for step in range(2):
        loss = host(*models.batch(step))
        host.backward(loss)
        host.step()
    if hasattr(host, "sluice"):
        host.sluice.unswap()
    return kinds


def one_does_not_swap() -> None:
    """Rank 1 does not swap, as if Sluice was not installed or switched off there."""
    from sluice.adapters.deepspeed import swap
    from sluice.config import Options

    model = build([{}])
    engine(model, ds_config())
    if dist.get_rank() == 0:
        swap(model, Options(timeout=2))


class OwnLayer(MOELayer):
    """A user's subclass with its own forward."""

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        return super().forward(*input, **kwargs)


class TwoRanksOfTensors:
    """An mpu with tensor-parallel size 2."""

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        return 2

    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def refused(what: str, policy: str) -> Any:
    """Swaps layers that cannot be swapped: the message, or with "warn" the classes after two steps."""
    from deepspeed.utils import groups
    from sluice.adapters.deepspeed import swap
    from sluice.config import Options

    layers: list[dict[str, Any]] = [{"expert": what} if what in ("batchnorm", "dropout") else {}, {}]
    model = build(layers)
    host = engine(model, ds_config())
    layer = model.moes[0].deepspeed_moe
    gate_of_others = {"forward": lambda self, tokens, mode: None}
    size_of_experts = groups._get_expert_model_parallel_world_size
    changes = {
        "subclass": lambda: setattr(layer, "__class__", OwnLayer),
        "gate": lambda: setattr(layer.gate, "__class__", type("OtherGate", (type(layer.gate),), gate_of_others)),
        "container": lambda: layer.experts.register_forward_hook(lambda *_: None),
        "own container": lambda: setattr(layer.experts, "__class__", type("OwnExperts", (Experts,), {})),
        "tensor parallel": lambda: setattr(groups, "mpu", TwoRanksOfTensors()),
        "tensor-parallel experts": lambda: setattr(groups, "_get_expert_model_parallel_world_size", lambda: 2),
        "partitioned": lambda: setattr(layer.gate.wg.weight, "ds_id", 7),  # the mark of deepspeed.zero.Init
        "one rank only": lambda: dist.get_rank() == 1 and layer.experts.register_forward_hook(lambda *_: None),
        # The host's constructor asserts this, but a layer assembled by hand can have it.
        "experts do not divide": lambda: setattr(layer.gate, "wg", nn.Linear(WIDTH, 5, bias=False)),
        "float64": layer.experts.double,
    }
    changes.get(what, lambda: None)()
    try:
        handle = swap(model, Options(on_unsupported=policy, timeout=60))
    except Exception as error:
        assert not any(isinstance(moe.deepspeed_moe, SluiceMOELayer) for moe in model.moes), "something stayed swapped"
        return [type(error).__name__, str(error)]
    finally:
        groups.mpu, groups._get_expert_model_parallel_world_size = None, size_of_experts
    kinds = [type(moe.deepspeed_moe).__name__ for moe in model.moes]
    if what in ("batchnorm", "dropout", "one rank only"):
        host.backward(host(*models.batch(0)))
    refusals = handle.refused
    handle.unswap()
    return [kinds, refusals]


class DrawsInForward(nn.Module):
    """Dropout without a Dropout module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(self.linear(x), 0.5, self.training)


OUTSIDE = torch.ones(WIDTH, requires_grad=True)


class ReadsOutside(nn.Module):
    """An expert that gives a gradient to a tensor which is not its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * OUTSIDE


def seen_when_called(kind: str, policy: str, evaluates: bool = False) -> Any:
    """Runs an expert that turns out to be unsupported at its first call, on every rank. evaluates: the first call is in
    eval mode."""
    with patch.object(models, "expert", lambda _: {"draws": DrawsInForward, "outside": ReadsOutside}[kind]()):
        host = engine(build([{"ep_size": 1}]), ds_config(), {**SLUICE, "on_unsupported": policy})
    try:
        if evaluates:
            host.eval()
            host(*models.batch(1))  # with gradients
            host.train()
        host.backward(host(*models.batch(0)))
    except Exception as error:
        cause = error.__cause__
        return [type(error).__name__, f"{type(cause).__name__}: {cause}"]
    finally:
        host.sluice.unswap()
    return "ran"


def policy_for_modules(policy: Any, on_unsupported: str) -> Any:
    """Runs a fused layer and a layer of modules with one policy. Returns the error, or why layers keep their rows."""
    section = {**SLUICE, "policy": policy, "on_unsupported": on_unsupported}
    try:
        host = engine(build([{}, {"expert": "tuple"}]), ds_config(), section)
    except Exception as error:
        return [type(error).__name__, str(error)]
    host.backward(host(*models.batch(0)))
    kept = host.sluice.kept
    host.sluice.unswap()
    return kept


def tutel_wanted(k: int) -> Any:
    """Returns [stock without Tutel, Sluice with a layer that would use Tutel]: losses of a few steps."""

    def uses_it(model: nn.Module) -> None:
        model.moes[0].deepspeed_moe.use_tutel = True  # as the constructor does if Tutel is installed

    layers = [{"k": k, "use_tutel": True}]
    stock = models.train(layers, 4, None)
    return [stock["losses"], models.train(layers, 4, SLUICE, prepare=uses_it)["losses"]]
