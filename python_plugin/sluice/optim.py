# SPDX-License-Identifier: Apache-2.0
"""Optimizers over host memory: `sluice.optim.AdamW` and `sluice.optim.Adam` replace those of `torch.optim`.

With a `process_group` their steps sum gradients over ranks; `sluice.optim.GradScaler` scales the loss for them.
"""

from .adapters.torch.optim import Adam, AdamW, GradScaler

__all__ = ["Adam", "AdamW", "GradScaler"]
