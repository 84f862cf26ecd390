# SPDX-License-Identifier: Apache-2.0
"""Adds gradients to `main_grad`, if the host's own linears do so (gradient_accumulation_fusion).

DDP keeps a `main_grad` for each parameter, in f32 if it is configured so, and adds autograd's gradients to it. With the
host's fusion a linear adds to it itself, marks the parameter, and returns a dummy gradient that is never read. Here the
library adds, so that bf16 weights have f32 gradients without a second copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sluice.adapters.torch import CastingLayer, PackedLayer, StackedLayer, Sums, parameters_behind


class _MainGrads(CastingLayer):
    """Adds gradients under gradient_accumulation_fusion, as a base of layers."""

    def sums_for(self, ctx: Any, work: Any, reads: Sequence[torch.Tensor]) -> Sums | None:
        """See MoeLayer."""
        leaves = parameters_behind(ctx)
        fuses = work.experts is None and self.accumulate == "in_place" and all(map(self._takes_sums, leaves))
        fuses = fuses and len({leaf.main_grad.dtype for leaf in leaves}) == 1
        for leaf in leaves:
            if hasattr(leaf, "grad_added_to_main_grad"):
                # An earlier backward may have set it: then autograd's gradient of this one would be left out.
                leaf.grad_added_to_main_grad = fuses
        if not fuses:
            return None
        grads = [leaf.main_grad for leaf in leaves]
        marked = [hasattr(leaf, "grad_added_to_main_grad") for leaf in leaves]
        stand_ins = [torch.empty_like(leaf) if is_marked else None for leaf, is_marked in zip(leaves, marked)]
        return Sums(grads, grads, stand_ins)

    def _takes_sums(self, leaf: Any) -> bool:
        grad = getattr(leaf, "main_grad", None)
        return (
            type(grad) is torch.Tensor
            and grad.dtype in (self.dtype, torch.float32)
            and grad.shape == leaf.shape
            and grad.is_contiguous()
            and leaf.dtype == self.dtype
            and grad.is_cpu
            and not hasattr(leaf, "__fsdp_param__")
        )


class MainGradPackedLayer(_MainGrads, PackedLayer):
    """See PackedLayer."""


class MainGradStackedLayer(_MainGrads, StackedLayer):
    """See StackedLayer."""


class MainGradModulesLayer(_MainGrads):
    """Calls experts as modules: their linears add to main_grad themselves, or autograd does."""
