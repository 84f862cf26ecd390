# SPDX-License-Identifier: Apache-2.0
"""Reads a MoE layer of Megatron, and finds whether Sluice can run it. It checks options of the host, never versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sluice.adapters.megatron import refusals
from sluice.adapters.megatron.experts import Form, form_of
from sluice.errors import Unsupported

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Finding:
    """Describes one layer."""

    ranks: tuple[int, ...]  # the global ranks of its expert-parallel group, in group order
    num_experts: int
    top_k: int
    dtype: torch.dtype
    device: torch.device
    form: Form

    def compared(self) -> dict[str, Any]:
        """Returns the values that must be equal on all ranks of the group."""
        return {
            "experts": self.num_experts,
            "top_k": self.top_k,
            "model_width": self.form.model_width,
            "hidden_width": self.form.hidden_width,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": self.device.type,
            "computed by": "Sluice" if self.form.fused else "the host's modules",
        }


def probe(layer: Any) -> Finding:
    """Describes a layer that the host has just built, or raises Unsupported. Runs nothing of the model."""
    tensor_parallel = getattr(layer.experts, "tp_group", None)
    size = 1 if tensor_parallel is None else tensor_parallel.size()
    for reason in refusals.against(lambda name: getattr(layer.config, name, None), size):
        raise Unsupported(reason)
    form = form_of(layer.experts)
    if getattr(layer.config, "delay_wgrad_compute", False) and not form.fused:
        raise Unsupported(
            "delay_wgrad_compute delays weight gradients of modules, but here these run in their own backward "
            f"({form.why}): leave it out"
        )
    sample = next(layer.experts.parameters())
    if sample.dtype not in DTYPES:
        raise Unsupported(f"its experts are in {sample.dtype}; float32, bfloat16 and float16 are supported")
    if sample.device.type not in ("cpu", "cuda"):
        raise Unsupported(f"its experts are on {sample.device}; Sluice computes on the CPU and on CUDA devices")
    return Finding(
        ranks=tuple(torch.distributed.get_process_group_ranks(layer.ep_group)),
        num_experts=int(layer.config.num_moe_experts),
        top_k=int(layer.config.moe_router_topk),
        dtype=sample.dtype,
        device=sample.device,
        form=form,
    )
