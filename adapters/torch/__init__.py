# SPDX-License-Identifier: Apache-2.0
"""Provides layers with autograd under torch, over a torch.distributed process group.

`EpGroup` is the set of ranks, `Context` has the resources that the layers of one model share, and `MoeLayer` is called
with tensors. Framework adapters are built on these three. This package imports no framework but torch.
"""

from .accumulate import Sums, parameters_behind
from .casting import CastingLayer, PackedLayer
from .context import Context, ContextOptions, divide_budget
from .experts import CallbackExperts
from .function import watcher
from .group import EpGroup
from .layer import MoeLayer, Placement
from .layer_config import MoeConfig, Swiglu
from .lora import Lora
from .migration import Arriving, LayerMove, Leaving, Migration
from .options import layer_options, refused_policy
from .pipeline import Edge, Pipeline, PipelineConfig, SplitBackwardStage, Stage
from .placement import device_of
from .quantised import Format, check_weights, dequantise, quantise
from .stacked import StackedLayer

__all__ = [
    "SplitBackwardStage",
    "Arriving",
    "CallbackExperts",
    "CastingLayer",
    "Context",
    "ContextOptions",
    "Edge",
    "EpGroup",
    "Format",
    "LayerMove",
    "Leaving",
    "Lora",
    "Migration",
    "MoeConfig",
    "MoeLayer",
    "PackedLayer",
    "Placement",
    "Pipeline",
    "PipelineConfig",
    "StackedLayer",
    "Stage",
    "Sums",
    "Swiglu",
    "check_weights",
    "dequantise",
    "device_of",
    "divide_budget",
    "layer_options",
    "parameters_behind",
    "quantise",
    "refused_policy",
    "watcher",
]
