# SPDX-License-Identifier: Apache-2.0
"""The layer in plain torch, as a reference for Sluice, with the interface of EngineBackend.

The layer uses uneven all-to-alls through autograd and real rows only, without chunks and without overlap.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sluice.adapters.deepspeed.moe.engine_backend import CallExpert, LayerSpec
from sluice.adapters.deepspeed.moe.experts import linears
from sluice.config import Options
from torch import nn

_groups: dict[tuple[int, ...], Any] = {}
_ACTIVATION = {
    "identity": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.arguments = (receive, send, group)
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return _all_to_all(gradient, *ctx.arguments), None, None, None


def _all_to_all(rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    if group is None:
        return rows.clone()
    out = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out


class ReferenceRunner:
    """One layer."""

    def __init__(self, spec: LayerSpec, group: Any, world: int) -> None:
        self._spec, self._group, self._world = spec, group, world

    def run(
        self,
        tokens: torch.Tensor,
        expert_ids: torch.Tensor,
        route_weights: torch.Tensor,
        experts: Sequence[nn.Module],
        call_expert: CallExpert,
    ) -> torch.Tensor:
        num_tokens, k = expert_ids.shape
        flat = expert_ids.reshape(-1).long()
        order = torch.where(flat >= 0, flat, self._spec.num_experts).argsort(stable=True)[: int((flat >= 0).sum())]
        counts = torch.bincount(flat[order], minlength=self._spec.num_experts)
        received = _all_to_all(counts, *[[len(experts)] * self._world] * 2, self._group).view(self._world, -1)
        send = counts.view(self._world, -1).sum(1).tolist()
        receive = received.sum(1).tolist()
        rows = _Exchange.apply(tokens[order // k], send, receive, self._group)
        # From (source, expert) to expert order and back.
        owner = torch.arange(len(experts)).repeat(self._world).repeat_interleave(received.reshape(-1))
        by_expert = owner.argsort(stable=True)
        parts = rows[by_expert].split(received.sum(0).tolist())
        outputs = torch.cat([self._expert(experts, i, part, call_expert) for i, part in enumerate(parts)])
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert))
        returned = _Exchange.apply(outputs[back], receive, send, self._group)
        weighted = returned.float() * route_weights.reshape(-1)[order].unsqueeze(1)
        total = torch.zeros(num_tokens, tokens.shape[1], dtype=torch.float32).index_add(0, order // k, weighted)
        return total.to(self._spec.dtype)

    def refuse(self, message: str) -> None:
        """Raises the error on this rank only. The reference has no header, so its peers fail at the deadline."""

    def _expert(self, experts: Sequence[nn.Module], index: int, rows: torch.Tensor, call: CallExpert) -> torch.Tensor:
        form = self._spec.form
        if form is None:
            return call(index, rows)
        cast = [
            (m.weight.to(rows.dtype), None if m.bias is None else m.bias.to(rows.dtype))
            for m in linears(experts[index], form)
        ]
        with torch.autocast("cpu", enabled=False):
            hidden = _ACTIVATION[form.activation](F.linear(rows, *cast[0]))
            if form.gated:
                hidden = hidden * F.linear(rows, *cast[1])
            return F.linear(hidden, *cast[-1])


class ReferenceBackend:
    """All layers of one list of ranks."""

    def __init__(self, ranks: Sequence[int], options: Options, device: torch.device) -> None:
        key = tuple(ranks)
        if len(key) > 1 and key not in _groups:
            _groups[key] = dist.new_group(list(key), use_local_synchronization=True)
        self._group, self._world = _groups.get(key), len(key)

    def layer(self, spec: LayerSpec) -> ReferenceRunner:
        """Returns a layer."""
        return ReferenceRunner(spec, self._group, self._world)

    def stats(self) -> dict[str, Any]:
        """Returns no numbers, since nothing is measured."""
        return {"bytes_sent": 0, "comm_ns": 0, "gemm": "torch", "passes_in_place": 0}

    def close(self) -> None:
        """Keeps the groups, because the process ends soon."""
