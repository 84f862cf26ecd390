# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trains with Megatron's --optimizer-cpu-offload, by torch's AdamW and by the library."""

from typing import Any

import cpu_shim
import mg_models
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from sluice.adapters.megatron import offload


def _host(how: str, options: dict[str, Any], fraction: float) -> mg_models.Host:
    host = mg_models.Host(2, how, options)
    config = OptimizerConfig(
        optimizer="adam",
        lr=2e-3,
        weight_decay=0.01,
        clip_grad=1.0,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction,
        use_torch_optimizer_for_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
    )
    with cpu_shim.parameters_on_a_device():
        host.optimizer = get_megatron_optimizer(config, host.parts)
    return host


def trained(fraction: float) -> dict[str, Any]:
    """Returns losses, norms and parameters of both, the classes in host memory, and the class named in checkpoints."""
    host = _host("stock", {}, fraction)
    first = host.parameters()
    stock, wanted = host.train(3), host.parameters()
    try:
        mine = _host("decorated", {"gemm": "host", "optimizer": True}, fraction)
        found = mine.train(3)
    finally:
        offload.uninstall()
    hybrids = [each.optimizer for each in getattr(mine.optimizer, "chained_optimizers", [mine.optimizer])]
    return {
        "stock": stock,
        "sluice": found,
        "gap": mg_models.gaps(wanted, mine.parameters()),
        "moved": mg_models.gaps(wanted, first),
        "kinds": sorted({type(each).__name__ for hybrid in hybrids for each in hybrid.cpu_optimizers}),
        "offloaded": sum(len(hybrid.cpu_optimizers) for hybrid in hybrids),
        "of": sum(len(group["params"]) for hybrid in hybrids for group in hybrid.param_groups),
        "named": sorted({hybrid.defaults["cpu_optimizer_cls"].__module__ for hybrid in hybrids}),
    }
