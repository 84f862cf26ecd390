# SPDX-License-Identifier: Apache-2.0
"""Counts the MoE layers of a rank, and the most forwards of them that wait for their backward, for a memory budget.

Megatron's schedules, with S pipeline stages, V parts of the model on each (virtual pipeline) and this rank's number r:

    no pipeline     one micro-batch
    1F1B            S - r micro-batches
    interleaved     2 (S - r - 1) + (V - 1) G + 1 forwards of parts, with G = microbatch_group_size_per_vp_stage: the
                    warm-up and the forward after it. On the last stage these are more than one of each part, where
                    1F1B has one micro-batch
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


class InFlight(NamedTuple):
    """Has the counts of this rank."""

    layers: int  # MoE layers that it builds
    forwards: int  # most of their forwards without a backward at one time


def of_config(config: Any) -> InFlight:
    """Returns the counts for a TransformerConfig, before any layer exists."""
    frequency = config.moe_layer_freq
    pattern = frequency if isinstance(frequency, list) else [i % frequency == 0 for i in range(config.num_layers)]
    stages = config.pipeline_model_parallel_size
    if stages == 1:
        layers = max(1, sum(map(bool, pattern)))
        return InFlight(layers, layers)
    is_known = parallel_state.model_parallel_is_initialized()
    stage = parallel_state.get_pipeline_model_parallel_rank() if is_known else 0  # the first stage has the most
    parts = config.virtual_pipeline_model_parallel_size
    counts = [_experts_in(config, pattern, part, stage) for part in ([None] if parts is None else range(parts))]
    waiting = stages - stage
    if parts is not None:
        waiting = 2 * (stages - stage - 1) + (parts - 1) * config.microbatch_group_size_per_vp_stage + 1
    return InFlight(max(1, sum(counts)), max(1, waiting * max(counts)))


def _experts_in(config: Any, pattern: list[Any], part: int | None, stage: int) -> int:
    """Counts the MoE layers of a part of the model."""
    first = get_transformer_layer_offset(config, part, stage)
    return sum(map(bool, pattern[first : first + get_num_layers_to_build(config, part, stage)]))
