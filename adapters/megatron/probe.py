"""What a MoE layer of Megatron is, and whether Sluice can run it. Options of the host are looked at, never versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sluice.adapters.megatron.experts import Form, form_of
from sluice.errors import Unsupported

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Finding:
    """One layer, understood."""

    ranks: tuple[int, ...]  # the global ranks of its expert-parallel group, in group order
    num_experts: int
    top_k: int
    dtype: torch.dtype
    device: torch.device
    form: Form

    def compared(self) -> dict[str, Any]:
        """What must be equal on all ranks of the group."""
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
    """Understands a layer that the host has just built, or raises Unsupported; runs nothing of the model."""
    for reason in _against(layer.config, layer.experts):
        raise Unsupported(reason)
    form = form_of(layer.experts)
    if getattr(layer.config, "delay_wgrad_compute", False) and not form.fused:
        raise Unsupported(
            "delay_wgrad_compute delays weight gradients of modules, which here run in a backward of their own "
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


def _against(config: Any, experts: Any) -> Iterator[str]:
    """What the host's options ask for that Sluice does not do, with what to do about it."""

    def asks(name: str) -> Any:
        return getattr(config, name, None)

    tensor_parallel = getattr(experts, "tp_group", None)
    if tensor_parallel is not None and tensor_parallel.size() > 1:
        yield (
            f"its experts are split over {tensor_parallel.size()} tensor-parallel ranks: "
            "set expert_tensor_parallel_size to 1"
        )
    if asks("fp8") or asks("fp4"):
        yield "fp8 and fp4 are not supported: train its experts in bf16"
    if asks("moe_token_dispatcher_type") == "flex":
        yield 'moe_token_dispatcher_type "flex" is another transport: use "alltoall"'
    if asks("moe_latent_size"):
        yield "moe_latent_size is not supported: leave it out"
    if asks("cuda_graph_impl") not in (None, "none"):
        yield f'cuda_graph_impl "{config.cuda_graph_impl}" is not supported: use "none"'
    if asks("transformer_impl") == "inference_optimized":
        yield 'transformer_impl "inference_optimized" is not supported: Sluice runs models in training'
    for name in ("overlap_moe_expert_parallel_comm", "overlap_dispatch_backward_with_experts_wgrad"):
        if asks(name):
            yield f"{name} is not supported: leave it out, Sluice overlaps chunks of one layer"
    if asks("moe_router_padding_for_quantization") or asks("moe_router_padding_for_fp8"):
        yield "router padding for quantised experts is not supported: leave it out"
    if asks("moe_expert_rank_capacity_factor") is not None:
        yield "moe_expert_rank_capacity_factor is not supported: leave it out, or use moe_expert_capacity_factor"
    if (asks("gtp_weight_remat_size") or 1) > 1:
        yield "gtp_weight_remat_size above 1 is not supported: set it to 1"
