# SPDX-License-Identifier: Apache-2.0
"""Rank-side: stories, each of which uses several features together."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import ds_models as models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.sharded_moe import MOELayer
from ds_models import SLUICE, build, ds_config, engine


def _steps(host: Any, first: int, count: int, lengths: list[int] | None = None) -> list[float]:
    """Returns losses of `count` micro-steps. The engine steps its optimizer when an accumulation is complete."""
    losses = []
    for step in range(first, first + count):
        torch.manual_seed(31 * step + dist.get_rank())
        x, target = models.batch(step, None if lengths is None else lengths[dist.get_rank()])
        loss = host(x.to(next(host.module.parameters()).dtype), target)
        host.backward(loss)
        host.step()
        losses.append(float(loss.detach()))
    return losses


@contextlib.contextmanager
def _unswapped_in_the_end(host: Any) -> Iterator[Any]:
    """Unswaps and destroys the engine in any case. An engine is part of reference cycles, and autograd holds its model
    through hooks. Otherwise two runs of the garbage collector would free the context, at a different time on each rank.
    """
    try:
        yield host
    finally:
        host.sluice.unswap()


def contexts_alive() -> list[int]:
    """Returns identifying fields of the adapter's live contexts."""
    from sluice.adapters.torch import context

    return [id(each) for each in context._alive if each.alive]


def train_save_leave(
    folder: str, layers: list[dict[str, Any]], checkpointing: str, config: dict[str, Any], sluice: dict[str, Any]
) -> dict[str, Any]:
    """Trains under a budget, saves, unswaps and continues. A stock engine loads the checkpoint and continues too.

    {"stock": losses without Sluice, "sluice": losses of the same steps, begun on Sluice and ended without it,
    "loaded": losses of the last steps of the stock engine with the checkpoint, "peak", "classes", "left"}
    """
    config = ds_config(gradient_accumulation_steps=2, **config)
    stock = engine(build(layers, checkpointing), config)
    wanted = _steps(stock, 0, 12)
    stock.destroy()

    host = engine(build(layers, checkpointing), config, {**SLUICE, **sluice})
    found = _steps(host, 0, 8)
    peak = sum(each["peak_bytes"] for each in host.sluice.stats()["contexts"])
    host.save_checkpoint(folder, tag="x")
    dist.barrier()
    host.sluice.unswap()
    classes = sorted({type(module).__name__ for module in host.module.modules() if isinstance(module, MOELayer)})
    left = [name for name, module in host.module.named_modules() if "_sluice" in vars(module)]
    found += _steps(host, 8, 4)

    reader = engine(build(layers, checkpointing, seed=5), config)
    path, _ = reader.load_checkpoint(folder, tag="x")
    assert path is not None
    loaded = _steps(reader, 8, 4)
    dist.barrier()
    return {"stock": wanted, "sluice": found, "loaded": loaded, "peak": peak, "classes": classes, "left": left}


def uneven_against_plain(lengths: list[int], hot: bool, sluice: dict[str, Any], expert: str = "relu") -> dict[str, Any]:
    """Compares unequal batches through one layer with a plain loop over all experts on this rank's tokens.

    Returns the largest differences of output, input gradient, gate gradient and expert gradients (summed over ranks).
    """
    layers = [{"ep_size": 4, "num_experts": 8, "k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}]
    layers[0]["expert"] = expert
    with _unswapped_in_the_end(engine(build(layers), ds_config(), {**SLUICE, "chunks": None, **sluice})) as host:
        return _beside_a_plain_loop(host, lengths, hot)


def _beside_a_plain_loop(host: Any, lengths: list[int], hot: bool) -> dict[str, Any]:
    layer = host.module.moes[0].deepspeed_moe
    rank, local = dist.get_rank(), layer.experts.deepspeed_experts
    if hot:  # every token chooses expert 5, on rank 2
        with torch.no_grad():
            layer.gate.wg.weight[5] = 2.0
    own = [parameter for module in local for parameter in module.parameters()]
    gathered = [[torch.empty_like(parameter) for _ in range(4)] for parameter in own]
    for parameter, into in zip(own, gathered):
        dist.all_gather(into, parameter.detach())
    per_expert = len(own) // len(local)
    everyone = []
    for number in range(8):
        owner, index = divmod(number, len(local))
        module = copy.deepcopy(local[0])
        with torch.no_grad():
            for at, parameter in enumerate(module.parameters()):
                parameter.copy_(gathered[index * per_expert + at][owner])
        everyone.append(module)

    generator = torch.Generator().manual_seed(rank)
    x = (torch.randn(lengths[rank], models.WIDTH, generator=generator) + 0.5).requires_grad_()
    pull = torch.randn(lengths[rank], models.WIDTH, generator=generator)
    twin = x.detach().clone().requires_grad_()
    wg = layer.gate.wg.weight.detach().clone().requires_grad_()

    out = layer(x, None)
    (out * pull).sum().backward()
    scores = F.softmax(F.linear(twin, wg), dim=1)
    chosen = scores.topk(2, dim=1)
    weights = chosen.values / chosen.values.sum(1, keepdim=True)
    plain = torch.zeros_like(twin)
    for slot in range(2):
        for number, module in enumerate(everyone):
            mine = (chosen.indices[:, slot] == number).nonzero().squeeze(1)
            rows = module(twin[mine].view(1, 1, -1, models.WIDTH))
            rows = rows[0] if isinstance(rows, tuple) else rows
            plain = plain.index_add(0, mine, weights[mine, slot, None] * rows.view(-1, models.WIDTH))
    (plain * pull).sum().backward()

    def gap(found: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
        if wanted is None:
            return 0.0 if found is None or not found.any() else float("inf")
        assert found is not None and found.shape == wanted.shape
        return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)) if found.numel() else 0.0

    experts = 0.0
    for number, module in enumerate(everyone):
        owner, index = divmod(number, len(local))
        for mine, parameter in zip(local[index].parameters(), module.parameters()):
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            dist.all_reduce(wanted)
            if owner == rank:
                experts = max(experts, gap(mine.grad, wanted))
    return {
        "output": gap(out.detach(), plain.detach()),
        "tokens": gap(x.grad, twin.grad),
        "gate": gap(layer.gate.wg.weight.grad, wg.grad),
        "experts": experts,
        "counts": layer.exp_counts.tolist(),
        "peak": host.sluice.stats()["contexts"][0]["peak_bytes"],
    }


def one_expert_stops(where: str, how: str) -> dict[str, Any]:
    """Rank 1 stops or kills itself inside an expert that Sluice calls, while rows are in flight. Returns the errors of
    the other ranks.

    The other ranks then unswap and run a layer on a new group.
    """
    from datetime import timedelta

    from sluice.adapters.torch import Context, EpGroup, MoeConfig, MoeLayer

    layers = [{"num_experts": 3, "ep_size": 3, "k": 2, "expert": "tuple"}]
    host = engine(build(layers), ds_config(), {**SLUICE, "timeout": 20})
    _steps(host, 0, 1)  # sets up connections, lanes and memory, because the next steps have a short deadline
    plain = models.TupleExpert.forward

    def end() -> None:
        os.kill(os.getpid(), signal.SIGSTOP if how == "stops" else signal.SIGKILL)

    def forward(self: Any, x: torch.Tensor) -> Any:
        out, bias = plain(self, x)
        if where == "forward":
            end()
        else:
            out.register_hook(lambda _gradient: end())
        return out, bias

    if dist.get_rank() == 1:
        models.TupleExpert.forward = forward
    began = time.monotonic()
    try:
        _steps(host, 1, 1)
        return {"error": "none"}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "peer": getattr(error, "peer", None)}
    found["s"] = time.monotonic() - began
    began = time.monotonic()
    host.sluice.unswap()
    found["unswap_s"] = time.monotonic() - began
    group = EpGroup.for_ranks([0, 2], timedelta(seconds=60))
    layer = MoeLayer(
        Context(group), MoeConfig(model_width=8, hidden_width=8, num_experts=2, top_k=1, activation="relu")
    )
    weights = {"w1": torch.eye(8).requires_grad_(), "w2": torch.eye(8).requires_grad_()}
    tokens = torch.rand(6, 8, requires_grad=True)
    out = layer(tokens, torch.arange(6).view(6, 1) % 2, torch.ones(6, 1), [weights])
    out.sum().backward()
    found["goes_on"] = torch.equal(out, tokens) and bool((tokens.grad == 1).all())
    return found


class WithoutAux(models.Model):
    """A model without the gates' auxiliary loss: gates get gradients only through route weights."""

    def _moe(self, moe: Any, x: torch.Tensor, used: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, aux = super()._moe(moe, x, used)
        return out, aux.detach()


def no_tokens_without_aux(lengths: list[int], config: dict[str, Any]) -> dict[str, Any]:
    """Trains with ranks that have no tokens. Returns also the parameters without a gradient after a bare backward."""
    model = build([{"k": 2}, {"ep_size": 1, "drop_tokens": False}])
    model.__class__ = WithoutAux
    host = engine(model, ds_config(**config), SLUICE)
    x, target = models.batch(0, lengths[dist.get_rank()])
    if not config:
        host.module(x, target).backward()  # not through the engine, whose reduction would fill in zeros
    without = [name for name, parameter in host.module.named_parameters() if parameter.grad is None]
    losses = _steps(host, 0, 3, lengths) if config else []
    gates = [float(moe.deepspeed_moe.gate.wg.weight.detach().double().sum()) for moe in host.module.moes]
    host.sluice.unswap()
    return {"without": without, "losses": losses, "gates": gates}


def refused_in_the_second_group() -> str:
    """With two expert-parallel groups of two, global rank 3, the second rank of its group, has a wrong width."""
    host = engine(build([{"ep_size": 2}]), ds_config(), SLUICE)
    layer = host.module.moes[0].deepspeed_moe
    width = models.WIDTH + (4 if dist.get_rank() == 3 else 0)
    text = models.said(lambda: layer(torch.randn(8, width), None))
    host.sluice.unswap()
    return text


def decides_and_leaves(folder: str, tuner: dict[str, Any]) -> dict[str, Any]:
    """Trains until n is decided, and unswaps. SLUICE_LOG=decision makes the first rank print each decision on stderr.
    Each rank has its own cache folder, as on separate machines.

    {"why": of all decisions, "race_passes", "chunks": of the last decision, "exported": number of answers}
    """
    import sluice as package

    own = {"SLUICE_CACHE_DIR": os.path.join(folder, f"cache{dist.get_rank()}"), "SLUICE_LOG": "decision"}
    os.makedirs(own["SLUICE_CACHE_DIR"], exist_ok=True)
    section = {**SLUICE, "chunks": None, "tuner": tuner}
    layers = [{"ep_size": 2, "k": 2, "expert": "gated"}]
    with patch.dict(os.environ, own):
        with _unswapped_in_the_end(engine(build(layers), ds_config(), section)) as host:
            for step in range(100):  # until the decision, which all ranks make at the same step
                _steps(host, step, 1)
                if package.decisions(host):
                    break
            decided = package.decisions(host)
            context = next(iter(host.sluice.backends.values())).context
            count = package.export_decisions(os.path.join(folder, f"exported{dist.get_rank()}.json"))
            races = context.tuner_stats()["race_passes"]
        dist.barrier()  # waits until the first rank has written its decisions
    return {
        "why": [entry["why"] for entry in decided],
        "race_passes": races,
        "chunks": decided[-1]["num_chunks"],
        "exported": count,
    }
