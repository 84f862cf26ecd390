"""What DeepSpeed's optimizers keep of an expert's parameters (adapters/host/kept.py). One keeper for each kind, chosen
when experts move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.adapters.host.kept import Content, Gradient, Keeper, Masters, Piece, mastered, plain
from torch import nn


class Partitioned:
    """Masters and moments lie in flat buffers, each of which is cut over the ranks with replicas of the expert: ZeRO
    stages 1 and 2, and the bf16 optimizer. What is counted by buffer and not by parameter (steps) is alike on all
    ranks, since all buffers take every step. Gradients are in flat buffers too, and nothing moves while there are
    any."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._keys = sorted(
            {
                key
                for flat, kept in optimizer.optimizer.state.items()
                for key, value in kept.items()
                if isinstance(value, torch.Tensor) and value.shape == flat.shape
            }
        )

    def obstacle(self, parameters: Sequence[nn.Parameter]) -> str:
        """See Keeper."""
        held = [getattr(self._optimizer, buffers, {}) for buffers in ("averaged_gradients", "all_grad_tensors")]
        has_any = any(value is not None for buffers in held for value in buffers.values())
        has_any |= any(any(flags) for flags in getattr(self._optimizer, "fp32_groups_has_gradients", ()))
        if has_any or any(parameter.grad is not None for parameter in parameters):
            return (
                f"{type(self._optimizer).__name__} has gradients: move behind engine.step(), before the next backward"
            )
        return ""

    def bytes_of(self, piece: Piece) -> int:
        """See Keeper."""
        size = piece.parameter.numel() // piece.count * 4
        return size * (1 + len(self._keys)) if piece.parameter.requires_grad else 0

    def read(self, piece: Piece) -> Content:
        """See Keeper."""
        if not piece.parameter.requires_grad:
            return {}
        content = {"master": self._gathered(piece, None)}
        for key in self._keys:
            content[f"state {key}"] = self._gathered(piece, key)
        return content

    def write(self, piece: Piece, content: Content) -> None:
        """See Keeper."""
        for key in (None, *self._keys):
            value = content.get("master" if key is None else f"state {key}")
            part = None if value is None else self._part(piece, key)
            if part is not None:
                start, own = part
                own.copy_(value.view(-1).narrow(0, start, own.numel()))

    def _part(self, piece: Piece, key: str | None) -> tuple[int, torch.Tensor] | None:
        """Where this rank's part of a piece begins in it, and the part of its master (key None) or of a moment, as a
        view; None: this rank has none. DeepSpeed's own views of moments are made when there are none yet."""
        mapping = getattr(piece.parameter, "_hp_mapping", None)
        if mapping is None:
            return None
        start = mapping.lp_fragment_address.start
        if key is None:
            own = mapping.hp_fragment
        else:
            base = self._optimizer.optimizer
            flat = base.param_groups[mapping.param_group_index]["params"][0]
            where = mapping.hp_fragment_address
            own = base.state[flat][key].narrow(0, where.start, where.numel)
        size = piece.parameter.numel() // piece.count
        first, last = max(start, size * piece.index), min(start + own.numel(), size * (piece.index + 1))
        return (
            None if first >= last else (first - size * piece.index, own.view(-1).narrow(0, first - start, last - first))
        )

    def _gathered(self, piece: Piece, key: str | None) -> torch.Tensor:
        parameter = piece.parameter
        whole = torch.zeros(parameter.numel() // piece.count, dtype=torch.float32, device=parameter.device)
        part = self._part(piece, key)
        if part is not None:
            start, own = part
            whole.narrow(0, start, own.numel()).copy_(own)
        dist.all_reduce(whole, group=parameter._dp_group)  # type: ignore[attr-defined]
        return whole


def keeper_of(name: str, parameters: Sequence[nn.Parameter], optimizer: Any) -> Keeper:
    """By what the optimizer can do. UnsupportedError where it keeps things of experts nobody knows where."""
    if optimizer is None:
        return Gradient()
    trained = [p for p in parameters if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if isinstance(optimizer, torch.optim.Optimizer) and {id(p) for p in trained} <= held:
        return plain(optimizer)
    base = getattr(optimizer, "optimizer", None)
    if isinstance(base, torch.optim.Optimizer) and hasattr(optimizer, "fp16_groups"):
        # The unfused optimizer, which 16-bit experts have without ZeRO.
        lists = zip(optimizer.fp16_groups, optimizer.fp32_groups)
        masters = Masters([pair for own, copies in lists for pair in zip(own, copies)])
        if masters.holds(trained):
            return mastered(masters, base.state)
    has_parts = all(hasattr(p, "_hp_mapping") for p in trained)
    if has_parts and isinstance(base, torch.optim.Optimizer):
        return Partitioned(optimizer)
    raise UnsupportedError(
        f"MoE layer '{name}': experts cannot move under {type(optimizer).__name__}, which keeps copies or moments of "
        "parameters where they are not found: use ZeRO stage 0 with float32 parameters, stage 1 or 2, or bf16"
    )
