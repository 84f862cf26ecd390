# SPDX-License-Identifier: Apache-2.0
"""What users of Megatron-Core name (docs/megatron.md).

--spec sluice.megatron moe_block_spec        Megatron-LM's training scripts
with_sluice(spec, chunks=4)                  users of core alone: around the spec of their model
"""

from __future__ import annotations

from sluice.adapters.megatron.block import moe_block_spec
from sluice.adapters.megatron.hook import with_sluice

__all__ = ["moe_block_spec", "with_sluice"]
