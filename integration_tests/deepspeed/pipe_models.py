# SPDX-License-Identifier: Apache-2.0
"""Models for DeepSpeed's pipeline engine, with every kind of data that stages can pass to each other."""

import os
import random
import time
from typing import Any, ClassVar

import ds_models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WIDTH = 24
WORDS = 32
ROWS = 3
MOST_WAIT_S = 0.004
SLOW_S = 0.03


class Block(nn.Module):
    """A residual layer with optional dropout."""

    def __init__(self, dropout: float = 0.0, is_frozen: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.requires_grad_(not is_frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


_waits = random.Random(os.getpid())  # different on each rank, and separate from torch's random state


class _Sleep(torch.autograd.Function):
    """The identity, which sleeps for given seconds in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Delayed(Block):
    """A block with random delays, so that messages arrive in any order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(super().forward(x), *(_waits.random() * MOST_WAIT_S for _ in range(2)))


class Slow(Block):
    """A slow block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_S)
        return super().forward(x)


class Switched(Slow):
    """A slow layer that is switched off in some steps: it returns its input."""

    off: ClassVar[set[int]] = set()

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.number in self.off else super().forward(x)


class SlowBackward(Block):
    """A block with a slow backward only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(super().forward(x), 0.0, 3 * SLOW_S)


class Experts(nn.Module):
    """DeepSpeed's MoE with different experts, whose gate draws no random numbers."""

    def __init__(self, hidden: int = 32, ep_size: int = 2) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=4, ep_size=ep_size, k=2, top2_2nd_expert_sampling=False)
        ds_models.fill_experts(self.moe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


# Data between the stages of the kind "moe": hidden rows, and the gates' losses so far as [1].
State = tuple[torch.Tensor, torch.Tensor]


class MoeBlock(nn.Module):
    """DeepSpeed's MoE of ds_models, or without options a dense layer, between the ends of the kind "moe"."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        super().__init__()
        self.moe = None if options is None else ds_models._moe(dict(options))
        self.linear = nn.Linear(ds_models.WIDTH, ds_models.WIDTH) if options is None else None

    def forward(self, state: State) -> State:
        h, aux = state
        if self.moe is None:
            return h + torch.tanh(self.linear(h)), aux
        out, own, _ = self.moe(h)
        return h + out, aux + 0.01 * own


class MoeEnd(nn.Module):
    """The first or the last layer of the kind "moe"."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.is_first, self.linear = is_first, nn.Linear(ds_models.WIDTH, ds_models.WIDTH)

    def forward(self, state: Any) -> State:
        if not self.is_first:
            return self.linear(state[0]), state[1]
        h = torch.tanh(self.linear(state))
        return h, h.new_zeros(1) + 0.0 * h.sum()  # with a graph: each received tensor gets a gradient


class Words(nn.Module):
    """Embeds ids, and passes on the rows, a scalar shift, the ids and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.table(ids)
        return rows, rows.mean().reshape(1), ids, ids % 3 != 0


class Reader(nn.Module):
    """A layer on the outputs of `Words`, so that every stage reads the ids and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows, shift, ids, mask = state
        assert ids.dtype == torch.int64 and mask.dtype == torch.bool, (ids.dtype, mask.dtype)
        new = torch.tanh(self.linear(rows) + self.bias(ids)) * mask.unsqueeze(-1)
        return rows + new, shift + new.mean(), ids, mask


class Head(nn.Module):
    """The last layer after `Words` and `Reader`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.linear(state[0]) + state[1]


class Tied(nn.Module):
    """A matrix that the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _transposed(tied: Tied, x: torch.Tensor) -> torch.Tensor:
    return x @ tied.weight.t()


def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns a regression loss."""
    return F.mse_loss(outputs.float(), target.float())


def _layers(kind: str, stages: int = 4) -> list[Any]:
    plain: dict[str, list[type[nn.Module]]] = {
        "words": [Words, *[Reader] * 4, Head],
        "slow ones first": [*[Slow] * 2, *[Block] * 4],
        "slow backwards first": [*[SlowBackward] * 2, *[Block] * 4],
        "between experts": [Block, Experts, Block, Block, Experts, Block],
    }
    if kind in plain:
        return [LayerSpec(each) for each in plain[kind]]
    if kind == "ends tied":  # both tied layers are in the first stage
        ends = [TiedLayerSpec("ends", Tied, tied_weight_attr="weight") for _ in range(2)]
        return [LayerSpec(Block), *ends, *(LayerSpec(Block) for _ in range(3))]
    if kind == "switched":
        return [LayerSpec(Switched, number) for number in range(6)]
    if kind == "slow frozen ones first":
        return [LayerSpec(each, is_frozen=at < 2) for at, each in enumerate((Slow, Slow, Slow, Slow, Block, Block))]
    if kind.startswith("frozen "):  # "frozen 0 1 2"
        frozen = {int(number) for number in kind.split()[1:]}
        return [LayerSpec(Block, is_frozen=number in frozen) for number in range(6)]
    if kind.startswith("experts"):  # on both stages, even after all layers but the ends moved
        first, second = {
            "experts": ({}, {}),
            "experts as modules": ({}, {}),
            "experts alone": ({"ep_size": 1}, {"ep_size": 1}),
            "experts of two widths": ({}, {"hidden": 40}),
        }[kind]
        ends = [LayerSpec(Experts, **first), LayerSpec(Experts, **second)]
        specs = [ends[0], LayerSpec(Block), ends[0], ends[1], LayerSpec(Block), ends[1]]
        return [each.build() for each in specs] if "modules" in kind else specs
    words = kind.split()
    kinds = [Delayed if "delays" in words else Block] * (2 * stages - 2 if "deep" in words else 4)
    between = [LayerSpec(each, 0.2 if "dropout" in words else 0.0) for each in kinds]
    if "tied" in words:
        ends = [
            TiedLayerSpec("ends", Tied, tied_weight_attr="weight"),
            TiedLayerSpec("ends", Tied, forward_fn=_transposed, tied_weight_attr="weight"),
        ]
        return [ends[0], *between, ends[1]]
    return [*between, between[0], between[1]]


class Cut(PipelineModule):
    """A pipeline with a configured partition, for which the host has no option."""

    parts_wanted: Any = None

    def _partition_layers(self, method: str = "uniform") -> None:
        super()._partition_layers(method)
        if self.parts_wanted is not None:
            self.parts = list(self.parts_wanted)
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


def module(kind: str, stages: int, parts: Any = None, **options: Any) -> PipelineModule:
    """Returns the same pipeline on every call.

    kind   "plain", "words", "ends tied", "slow ones first", "slow backwards first", "slow frozen ones first",
           "switched", "frozen 0 1" (layers 0 and 1 of six), "experts" (also "alone": ep_size 1; "of two widths":
           another width on the second stage; "as modules", not specs), "between experts" (on both sides of layers
           2 and 3 of six), "moe" (with `blocks`, in the options), or some of "dropout", "tied", "delays",
           "deep" (two layers per stage)
    parts  the first layer of each stage, and the number of layers; None: even
    """
    if kind == "moe":
        return _moe_module(stages=stages, **options)
    torch.manual_seed(0)
    Cut.parts_wanted = parts
    return Cut(
        _layers(kind, stages), num_stages=stages, loss_fn=loss, partition_method="uniform", seed_layers=True, **options
    )


def _moe_module(blocks: list[dict[str, Any] | None], stages: int, **options: Any) -> PipelineModule:
    """Returns a pipe with these blocks, of ds_models, between two dense layers. Experts differ, and are the same in
    every run."""
    torch.manual_seed(0)
    layers = [MoeEnd(True), *map(MoeBlock, blocks), MoeEnd(False)]
    for layer in layers:
        if getattr(layer, "moe", None) is not None:
            ds_models.fill_experts(layer.moe)

    def moe_loss(outputs: State, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs[0], target, reduction="sum") / 64 + outputs[1].sum()

    return PipelineModule(layers, num_stages=stages, loss_fn=moe_loss, partition_method="uniform", **options)


def batches(kind: str, stages: int, count: int, step: int, dtype: torch.dtype, varied: bool = False) -> Any:
    """Yields the data of the first and last stages, the same on all ranks of one pipe. varied: micro-batches have
    different lengths."""
    pipe = dist.get_rank() % (dist.get_world_size() // stages)
    for micro in range(count):
        generator = torch.Generator().manual_seed(10_000 * (pipe + 1) + 100 * step + micro)
        length = 4 + (step + 3 * micro) % 5 if varied else 6
        shape = (ROWS, length)
        if kind == "moe":
            x = torch.randn(*ds_models.TOKENS, ds_models.WIDTH, generator=generator) + 0.3
            yield x.to(dtype), torch.roll(x, 1, dims=-1).sin()
            continue
        if kind == "words":
            x = torch.randint(WORDS, shape, generator=generator)
        else:
            x = (torch.randn(*shape, WIDTH, generator=generator) + 0.3).to(dtype)
        yield x, torch.randn(*shape, WIDTH, generator=generator).to(dtype)
