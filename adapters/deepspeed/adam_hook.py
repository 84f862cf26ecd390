# SPDX-License-Identifier: Apache-2.0
"""Where DeepSpeed makes its optimizer: with "sluice": {"optimizer": true} the ops of its Adams are the library's.

`DeepSpeedCPUAdam` is that of ZeRO-Offload, `FusedAdam` that of a config without offload.

Imports neither torch nor DeepSpeed: it is loaded with every engine. Without the key nothing happens, but that an engine
with Sluice refuses by name what cannot be trained (frozen.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

METHOD = "_configure_optimizer"


def install(engine_module: ModuleType) -> None:
    """Wraps the engine's method, once. Raises if this DeepSpeed does not have it; the loader reports that."""
    cls = engine_module.DeepSpeedEngine
    original = getattr(cls, METHOD, None)
    if original is None:
        raise RuntimeError(f"this DeepSpeed has no DeepSpeedEngine.{METHOD}, so its config cannot switch the optimizer")
    if hasattr(original, "_sluice_original"):
        return

    @functools.wraps(original)
    def _configure_optimizer(self: Any, client_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        options = _options(self)
        if options is not None and hasattr(self, "sluice") and args:
            from sluice.adapters.deepspeed.frozen import require_trained

            require_trained(self, client_optimizer, args[0], options.timeout)
        if options is None or not options.optimizer:
            return original(self, client_optimizer, *args, **kwargs)
        with _ops_in_place() as (cpu, fused):
            _replace(client_optimizer, cpu, fused)
            result = original(self, client_optimizer, *args, **kwargs)
        from sluice.adapters.deepspeed.optimizer import offload_step

        offload_step.install(self.optimizer, cpu)
        return result

    _configure_optimizer._sluice_original = original  # type: ignore[attr-defined]
    setattr(cls, METHOD, _configure_optimizer)


def uninstall(engine_module: ModuleType) -> None:
    """Puts the host's own method back; optimizers that exist keep what they have."""
    original = getattr(getattr(engine_module.DeepSpeedEngine, METHOD), "_sluice_original", None)
    if original is not None:
        setattr(engine_module.DeepSpeedEngine, METHOD, original)


def _options(engine: Any) -> Any:
    """Of its "sluice" section; None: there is none, or it is off."""
    from sluice import settings

    values = getattr(getattr(engine, "_config", None), "_param_dict", None) or {}
    return settings.of_ds_config(values.get("sluice"))


def _replace(optimizer: Any, cpu: Any, fused: Any) -> None:
    """The op of an optimizer that the script made is from now on ours."""
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
    """While this lasts a DeepSpeedCPUAdam and a FusedAdam that are made load our ops, which it gives."""
    from sluice.adapters.deepspeed.optimizer.cpu_adam import CpuAdamOp
    from sluice.adapters.deepspeed.optimizer.fused_adam import FusedAdamOp

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
