# SPDX-License-Identifier: Apache-2.0
"""Defines the names for users of Megatron-Core (docs/megatron.md).

--spec sluice.megatron moe_block_spec        Megatron-LM's training scripts
with_sluice(spec, chunks=4)                  core without Megatron-LM: wraps the layer spec of the model
"""

from __future__ import annotations

from sluice.adapters.megatron.block import moe_block_spec
from sluice.adapters.megatron.hook import with_sluice

__all__ = ["moe_block_spec", "with_sluice"]
