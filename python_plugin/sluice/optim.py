"""Optimizers over host memory: `sluice.optim.AdamW` and `sluice.optim.Adam` stand in for those of `torch.optim`."""

from .adapters.torch.optim import Adam, AdamW

__all__ = ["Adam", "AdamW"]
