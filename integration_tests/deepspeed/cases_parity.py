"""Rank-side: the same training, stock and through Sluice, in one process group."""

from __future__ import annotations

import os
from typing import Any

import ds_models as models
import torch


def _use_reference_if_asked() -> None:
    if os.environ.get("SLUICE_TEST_BACKEND") == "reference":
        import ds_reference
        from sluice.adapters.deepspeed import swapper

        swapper.open_backend = ds_reference.ReferenceBackend


_use_reference_if_asked()


def parity(layers: list[dict[str, Any]], steps: int = 10, sluice: dict[str, Any] | None = None, **how: Any) -> Any:
    """(stock, through Sluice): what `models.train` gives."""
    stock = models.train(layers, steps, None, **how)
    swapped = models.train(layers, steps, {**models.SLUICE, **(sluice or {})}, **how)
    return [stock, swapped]


def same_with_every_policy(layers: list[dict[str, Any]], policies: list[Any], **how: Any) -> Any:
    """What `models.train` gives with each policy, everything else alike."""
    section = {**models.SLUICE, "chunks": 3, "chunk_cut": "tokens"}  # bits are promised at equal cut
    return [models.train(layers, 4, {**section, "policy": policy}, **how) for policy in policies]


def parity_through_masks(layers: list[dict[str, Any]], steps: int = 10, **how: Any) -> Any:
    """As `parity`, with the gate asked for dense masks, as on hosts before 0.19.4; theirs is the same function."""
    from sluice.adapters.deepspeed import probe

    known = probe.gate_format
    probe.gate_format = lambda gate: probe.DENSE
    try:
        return parity(layers, steps, **how)
    finally:
        probe.gate_format = known


def long_run(steps: int) -> Any:
    """Losses of stock, of stock with another thread count, and through Sluice."""
    layers = [{"k": 2, "expert": "gelu"}, {"noisy_gate_policy": "RSample"}]
    runs = []
    for threads, sluice in ((1, None), (2, None), (1, models.SLUICE)):
        torch.set_num_threads(threads)
        runs.append(models.train(layers, steps, sluice)["losses"])
    torch.set_num_threads(1)
    return runs
