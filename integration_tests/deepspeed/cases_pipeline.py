# SPDX-License-Identifier: Apache-2.0
"""Rank-side: DeepSpeed's pipeline engine with MoE blocks in its stages and several outstanding forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import deepspeed
import ds_models as models
import sluice as package
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.pipe import PipelineModule
from sluice.errors import InvalidArgument
from sluice.planning.layer_moves import LayerDecider
from torch import nn

UNCLIPPED = {"gradient_clipping": 0.0}
State = tuple[
    torch.Tensor, torch.Tensor
]  # data passed between stages: hidden rows, and the gates' losses so far as [1]


class Dense(nn.Module):
    """A layer without experts: the first of the pipe, the last one, or one between them."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(models.WIDTH, models.WIDTH)

    def forward(self, state: Any) -> State:
        if self.place == "first":
            h = torch.tanh(self.linear(state))
            return h, h.new_zeros(1) + 0.0 * h.sum()  # with a graph: each received tensor gets a gradient
        h, aux = state
        return self.linear(h) if self.place == "last" else h + torch.tanh(self.linear(h)), aux


class Block(nn.Module):
    """DeepSpeed's MoE as a layer of a pipeline."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.moe = models._moe(dict(options))

    def forward(self, state: State) -> State:
        h, aux = state
        out, own, _ = self.moe(h)
        return h + out, aux + 0.01 * own


def _loss(outputs: State, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs[0], target, reduction="sum") / 64 + outputs[1].sum()


def _module(blocks: list[dict[str, Any] | None], stages: int) -> PipelineModule:
    """Returns a pipe of dense layers with these blocks between them (None: a dense layer). Experts differ, and are the
    same in every run."""
    torch.manual_seed(0)
    between = (Dense("between") if block is None else Block(block) for block in blocks)
    layers: list[nn.Module] = [Dense("first"), *between, Dense("last")]
    for layer in layers:
        if isinstance(layer, Block):
            experts = layer.moe.deepspeed_moe.experts.deepspeed_experts
            for index, expert in enumerate(experts):
                number = (dist.get_rank() % layer.moe.ep_size) * len(experts) + index
                generator = torch.Generator().manual_seed(1000 + number)
                with torch.no_grad():
                    for parameter in expert.parameters():
                        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return PipelineModule(layers, num_stages=stages, loss_fn=_loss, partition_method="uniform")


def _batches(stages: int, micro_batches: int, step: int) -> Any:
    """Yields the data of the first and last stages, with the same rows on all ranks of one pipe."""
    pipe = dist.get_rank() % (dist.get_world_size() // stages)
    for micro in range(micro_batches):
        generator = torch.Generator().manual_seed(10_000 * (pipe + 1) + 100 * step + micro)
        x = torch.randn(*models.TOKENS, models.WIDTH, generator=generator) + 0.3
        yield x, torch.roll(x, 1, dims=-1).sin()


def _train(
    blocks: list[dict[str, Any] | None],
    stages: int,
    micro_batches: int,
    steps: int,
    section: dict[str, Any] | None,
    config: dict[str, Any],
    before: Callable[[Any, int], None] = lambda host, step: None,
) -> dict[str, Any]:
    """Trains one side. before: called with the engine and the step number before each step."""
    module = _module(blocks, stages)
    values = {**models.ds_config(gradient_accumulation_steps=micro_batches), **config}
    if section is not None:
        values["sluice"] = section
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    host, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=values)
    outstanding = _watch_outstanding(module)
    losses = []
    for step in range(steps):
        before(host, step)
        torch.manual_seed(77 * step + dist.get_rank())
        losses.append(float(host.train_batch(_batches(stages, micro_batches, step))))
    found: dict[str, Any] = {
        "losses": losses,
        "kinds": [type(each).__name__ for each in module.modules() if isinstance(each, MOELayer)],
        "parts": [int(bound) for bound in module.parts],
        "norms": {name: float(tensor.detach().double().norm()) for name, tensor in module.named_parameters()},
        "most_outstanding": outstanding["most"],
    }
    if section is not None:
        stats = host.sluice.stats()
        found["asked"] = [_asked(given) == stats for given in (host, host.module)]
        found["computed_by"] = [each["computed_by"] for each in stats["layers"]]
        found["plans"] = [each.get("plan") for each in stats["layers"]]
        found["peak_bytes"] = max((each["peak_bytes"] for each in stats["contexts"]), default=0)
        if "pipeline" in section:
            found["pipeline"] = host.sluice.pipeline.stats()
        host.sluice.unswap()
    host.destroy()
    return found


def _asked(given: Any) -> Any:
    """Returns the output of `sluice.stats`, or the text of an error, because the other stages continue."""
    try:
        package.decisions(given)
        return package.stats(given)
    except InvalidArgument as error:
        return error.message


def _watch_outstanding(module: nn.Module) -> dict[str, int]:
    """Tracks the largest number of outstanding forwards of the first MoE layer of `module`."""
    seen = {"now": 0, "most": 0}

    def entered(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            seen["now"] += 1
            seen["most"] = max(seen["most"], seen["now"])
            output.register_hook(Left())

    class Left:
        """Runs when the backward begins. Counts only once, because a graph may be walked several times."""

        def __init__(self) -> None:
            self.again = False

        def __call__(self, _gradient: torch.Tensor) -> None:
            seen["now"] -= not self.again
            self.again = True

    for each in module.modules():
        if isinstance(each, MOELayer):
            each.register_forward_hook(entered)
            break
    return seen


def parity(
    blocks: list[dict[str, Any] | None],
    stages: int,
    micro_batches: int = 4,
    steps: int = 10,
    sluice: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Returns [stock, through Sluice]."""
    section = {**models.SLUICE, **(sluice or {})}
    return [_train(blocks, stages, micro_batches, steps, each, config or {}) for each in (None, section)]


def moving(
    blocks: list[dict[str, Any] | None],
    stages: int,
    moves: dict[str, Any],
    refused: list[list[int]],
    live: bool,
    sluice: dict[str, Any],
    seconds: list[float] | None = None,
) -> list[Any]:
    """Returns [without moves, with moves, errors]. moves: partitions by step, applied before the step. refused:
    partitions tried before each step. seconds: times of layers that an adaptive pipeline uses instead of its own."""
    errors: list[str] = []

    def before(host: Any, step: int) -> None:
        for parts in refused:
            errors.append(models.said(lambda: host.sluice.move_layers(parts, live=live)))  # noqa: B023
        if str(step) in moves:
            host.sluice.move_layers(moves[str(step)], live=live)

    section = {**models.SLUICE, **sluice}
    by_hand = {name: value for name, value in section["pipeline"].items() if name != "plan"}
    still = _train(blocks, stages, 4, 6, {**section, "pipeline": by_hand}, UNCLIPPED)
    original = LayerDecider.after_batch

    def given(self: Any, measured: Any, *rest: Any) -> Any:
        return original(self, seconds or measured, *rest)

    with patch.object(LayerDecider, "after_batch", given):
        return [still, _train(blocks, stages, 4, 6, section, UNCLIPPED, before), errors]


def once(blocks: list[dict[str, Any] | None], stages: int, steps: int, with_sluice: bool) -> dict[str, Any]:
    """Runs one side of `parity`.

    A stage without experts makes no expert groups, and torch counts groups on each rank separately. So the process
    cannot make a second engine afterwards, also with stock.
    """
    return _train(blocks, stages, 4, steps, models.SLUICE if with_sluice else None, {})
