# SPDX-License-Identifier: Apache-2.0
"""Rank-side: cases in which one rank communicates, skips, refuses or grows alone. The cases assert here, and return
values for the comparison of ranks."""

from typing import Any

import ds_models as models
import sluice
import torch
import torch.distributed as dist
from cases_traps import _layer, _swapped


def alone_never_communicates() -> int:
    """Trap 10: only rank 0 runs a layer with ep_size 1. No rank waits, and no group is made."""
    from sluice.adapters.torch import group

    host = _swapped([{"ep_size": 1}])
    known = set(group._groups)
    if dist.get_rank() == 0:
        layer = _layer(host)
        x = torch.randn(8, models.WIDTH, requires_grad=True)
        layer(x, None).sum().backward()
        layer(x, None)
    assert set(group._groups) == known
    sent = sluice.stats(_layer(host))["contexts"][0]["bytes_sent"]
    host.sluice.unswap()
    return sent


def host_collectives_in_between() -> None:
    """Trap 10: the host has its own messages on the layer's ep_group in flight during Sluice's passes, at a different
    time on each rank. gloo matches messages in order of issue, so in a shared group messages would be mixed."""
    host = _swapped([{"k": 2, "top2_2nd_expert_sampling": False}], {"gemm": "native"})
    layer, rank = _layer(host), dist.get_rank()
    x = torch.randn(12, models.WIDTH, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    alone = layer(x, None)
    alone.sum().backward()
    wanted, gradient = alone.detach().clone(), x.grad.clone()
    mine = layer._sluice.backend.context.ep_group._joined.group
    assert mine is not layer.ep_group and mine is not dist.group.WORLD
    for step in range(6):
        x.grad = None
        total = torch.full((1000,), float(rank + 1 + step))
        got, sent = torch.full((50,), -1.0), torch.full((50,), 10.0 * step + rank)
        works = []

        def start(total: Any = total, got: Any = got, sent: Any = sent, works: Any = works) -> None:
            works.append(dist.all_reduce(total, group=layer.ep_group, async_op=True))
            works.append(dist.isend(sent, 1 - rank, group=layer.ep_group))
            works.append(dist.irecv(got, 1 - rank, group=layer.ep_group))

        at = (step + 2 * rank) % 3  # before, between or after the passes
        if at == 0:
            start()
        out = layer(x, None)
        if at == 1:
            start()
        out.sum().backward()
        if at == 2:
            start()
        for work in works:
            work.wait()
        assert torch.equal(out.detach(), wanted) and torch.equal(x.grad, gradient)
        assert (total == 2 * step + 3).all() and (got == 10 * step + 1 - rank).all()
    host.sluice.unswap()


def one_rank_skips(drop: bool, how: str) -> None:
    """Trap 11: rank 1 omits the layer, or calls another layer. Rank 0 raises."""
    host = _swapped([{"drop_tokens": drop}, {"drop_tokens": drop}], {"timeout": 10})  # also covers the swap
    x = torch.randn(12, models.WIDTH)
    with torch.no_grad():
        _layer(host)(x, None)
    if dist.get_rank() == 0:
        _layer(host)(x, None)
    elif how == "other layer":
        _layer(host, 1)(x, None)


def one_rank_refuses(**config: Any) -> str:
    """Rank 1 has a wrong width. It gets its own error, rank 0 an error that names rank 1, and the group continues."""
    host = _swapped([{}], **config)
    layer = _layer(host)
    width = models.WIDTH + (4 if dist.get_rank() == 1 else 0)
    try:
        layer(torch.randn(8, width), None)
        raise AssertionError("no error")
    except (RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    layer(torch.randn(8, models.WIDTH), None)
    host.sluice.unswap()
    return text


def one_rank_doubles_its_experts(after_steps: int) -> str:
    """Rank 1's experts become f64 after the swap, which no engine layer supports. Rank 0 gets an error at once."""
    host = _swapped([{}], {"timeout": 120})
    layer = _layer(host)
    x = torch.randn(8, models.WIDTH)
    for _ in range(after_steps):
        layer(x, None)
    if dist.get_rank() == 1:
        layer.experts.double()
    try:
        layer(x, None)
        raise AssertionError("no error")
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    layer.experts.float()
    layer(x, None)
    host.sluice.unswap()
    return text
