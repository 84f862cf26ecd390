# SPDX-License-Identifier: Apache-2.0
"""Rank-side: stories, each of which uses several features together."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import ds_models as models
import torch
import torch.distributed as dist
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


def contexts_alive() -> list[int]:
    """Returns identifying fields of the adapter's live contexts."""
    from sluice.adapters.torch import context

    return [id(each) for each in context._alive if each.alive]


class WithoutAux(models.Model):
    """A model without the gates' auxiliary loss: gates get gradients only through route weights."""

    def _moe(self, moe: Any, x: torch.Tensor, used: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, aux = super()._moe(moe, x, used)
        return out, torch.zeros_like(aux)


def spread(lengths: list[int], hot: bool, sluice: dict[str, Any], expert: str = "relu") -> list[dict[str, Any]]:
    """Trains on the same tokens with `lengths` of them on the ranks, and spread evenly. hot: all choose expert 5.

    Returns for each [losses and routes to each expert over all ranks, norms of parameters, the peak of this rank].
    """
    layer = {"ep_size": 4, "num_experts": 8, "k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
    rank, world, total = dist.get_rank(), dist.get_world_size(), sum(lengths)
    found = []
    for split in (lengths, [total // world + (each < total % world) for each in range(world)]):
        model = build([{**layer, "expert": expert}])
        model.__class__ = WithoutAux
        with torch.no_grad():
            model.first.weight.copy_(torch.eye(models.WIDTH))
            model.moes[0].deepspeed_moe.gate.wg.weight[5] += 2.0 * hot
        section = {**SLUICE, "chunks": None, **sluice}
        host = engine(model, ds_config(gradient_clipping=0.0), section)
        try:
            losses, counts = [], torch.zeros(8, dtype=torch.int64)
            for step in range(3):
                x = torch.randn(1, total, models.WIDTH, generator=torch.Generator().manual_seed(step)) + 0.5
                mine = x.split(split, dim=1)[rank]
                loss = host(mine, torch.roll(mine, 1, dims=-1).sin())
                counts += host.module.moes[0].deepspeed_moe.exp_counts
                host.backward(loss)
                host.step()
                losses.append(loss.detach())
            for each in (*losses, counts):
                dist.all_reduce(each)
            norms = {name: float(each.detach().double().norm()) for name, each in host.module.named_parameters()}
            peak = host.sluice.stats()["contexts"][0]["peak_bytes"]
        finally:  # an engine is part of reference cycles, which each rank would free at another time
            host.sluice.unswap()
        found.append({"losses": list(map(float, losses)), "counts": counts.tolist(), "norms": norms, "peak": peak})
    return found


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
