# SPDX-License-Identifier: Apache-2.0
"""Wraps the method in which DeepSpeed makes its optimizer. "sluice": {"optimizer": true} replaces its Adams' ops.

`DeepSpeedCPUAdam` is the Adam of ZeRO-Offload, `FusedAdam` the one of a config without offload.

This module imports neither torch nor DeepSpeed, since every engine loads it. Without the key it only refuses, by name,
parameters that cannot be trained on an engine with Sluice (frozen.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def with_ops(call: Callable[[], Any], engine: Any, client_optimizer: Any, model_parameters: Any) -> Any:
    """Wraps `DeepSpeedEngine._configure_optimizer` (hook.py)."""
    options = _options(engine)
    if options is not None and hasattr(engine, "sluice"):
        from sluice.adapters.deepspeed.frozen import require_trained

        require_trained(engine, client_optimizer, model_parameters, options.timeout)
    if options is None or not options.optimizer:
        return call()
    with _ops_in_place() as (cpu, fused):
        _replace(client_optimizer, cpu, fused)
        result = call()
    from sluice.adapters.deepspeed.optimizer import offload_step

    offload_step.install(engine.optimizer, cpu)
    return result


def _options(engine: Any) -> Any:
    """Returns the options of the "sluice" section; None: there is none, or it is off."""
    from sluice import settings

    values = getattr(getattr(engine, "_config", None), "_param_dict", None) or {}
    return settings.of_ds_config(values.get("sluice"))


def _replace(optimizer: Any, cpu: Any, fused: Any) -> None:
    """Replaces the op of an optimizer that the user's script made."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if isinstance(optimizer, FusedAdam):
        optimizer.multi_tensor_adam = fused
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    group = optimizer.defaults
    optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
    optimizer.ds_opt_adam = cpu
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], optimizer.adam_w_mode, False)
    cpu.create_adam(optimizer.opt_id, *settings)


@contextlib.contextmanager
def _ops_in_place() -> Iterator[tuple[Any, Any]]:
    """Yields Sluice's ops, which a DeepSpeedCPUAdam or FusedAdam constructed inside this context loads."""
    from sluice.adapters.deepspeed.optimizer.adam_ops import CpuAdamOp, FusedAdamOp

    from deepspeed.ops.adam import cpu_adam, fused_adam

    stock_cpu, stock_fused = cpu_adam.CPUAdamBuilder, fused_adam.FusedAdamBuilder
    cpu, fused = CpuAdamOp(lambda: stock_cpu().load()), FusedAdamOp(lambda: stock_fused().load())
    cpu_adam.CPUAdamBuilder, fused_adam.FusedAdamBuilder = _builder_of(cpu), _builder_of(fused)
    try:
        yield cpu, fused
    finally:
        cpu_adam.CPUAdamBuilder, fused_adam.FusedAdamBuilder = stock_cpu, stock_fused


def _builder_of(op: Any) -> type:
    class Builder:
        def load(self, verbose: bool = True) -> Any:
            return op

    return Builder
