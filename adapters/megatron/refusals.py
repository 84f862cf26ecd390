# SPDX-License-Identifier: Apache-2.0
"""Finds options of the host that Sluice does not support. It needs neither Megatron nor torch, because the doctor
checks scripts with it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def against(asks: Callable[[str], Any], expert_tensor_parallel: int) -> Iterator[str]:
    """Yields the reasons against the options, each with what to do about it.

    asks                    returns the value of an option of TransformerConfig by its name; None: there is none
    expert_tensor_parallel  the number of ranks over which an expert is split
    """
    if expert_tensor_parallel > 1:
        yield (
            f"its experts are split over {expert_tensor_parallel} tensor-parallel ranks: "
            "set expert_tensor_parallel_size to 1"
        )
    if asks("fp8") or asks("fp4"):
        yield "fp8 and fp4 are not supported: train its experts in bf16"
    if asks("moe_token_dispatcher_type") == "flex":
        yield 'moe_token_dispatcher_type "flex" is not supported, because Sluice exchanges rows itself: use "alltoall"'
    if asks("moe_latent_size"):
        yield "moe_latent_size is not supported: leave it out"
    if asks("cuda_graph_impl") not in (None, "none"):
        yield f'cuda_graph_impl "{asks("cuda_graph_impl")}" is not supported: use "none"'
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
