"""Where DeepSpeed makes its optimizer: with "sluice": {"optimizer": true} a DeepSpeedCPUAdam computes by the library.

Imports neither torch nor DeepSpeed: it is loaded with every engine. Without the key nothing happens.
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
        if not _is_wanted(self):
            return original(self, client_optimizer, *args, **kwargs)
        with _op_in_place() as op:
            if _is_cpu_adam(client_optimizer):
                _replace(client_optimizer, op)
            result = original(self, client_optimizer, *args, **kwargs)
        from sluice.adapters.deepspeed import offload_step

        offload_step.install(self.optimizer, op)
        return result

    _configure_optimizer._sluice_original = original  # type: ignore[attr-defined]
    setattr(cls, METHOD, _configure_optimizer)


def uninstall(engine_module: ModuleType) -> None:
    """Puts the host's own method back; optimizers that exist keep what they have."""
    original = getattr(getattr(engine_module.DeepSpeedEngine, METHOD), "_sluice_original", None)
    if original is not None:
        setattr(engine_module.DeepSpeedEngine, METHOD, original)


def _is_wanted(engine: Any) -> bool:
    from sluice import settings

    values = getattr(getattr(engine, "_config", None), "_param_dict", None) or {}
    options = settings.of_ds_config(values.get("sluice"))
    return options is not None and options.optimizer


def _is_cpu_adam(optimizer: Any) -> bool:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return isinstance(optimizer, DeepSpeedCPUAdam)


def _replace(optimizer: Any, op: Any) -> None:
    """A DeepSpeedCPUAdam that the script made: its op from now on is ours."""
    group = optimizer.defaults
    optimizer.ds_opt_adam.destroy_adam(optimizer.opt_id)
    optimizer.ds_opt_adam = op
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], optimizer.adam_w_mode, False)
    op.create_adam(optimizer.opt_id, *settings)


@contextlib.contextmanager
def _op_in_place() -> Iterator[Any]:
    """While this lasts a DeepSpeedCPUAdam that is made loads our op."""
    from sluice.adapters.deepspeed.cpu_adam import CpuAdamOp

    from deepspeed.ops.adam import cpu_adam

    stock = cpu_adam.CPUAdamBuilder
    op = CpuAdamOp(lambda: stock().load())

    class Builder:
        def load(self, verbose: bool = True) -> Any:
            return op

    cpu_adam.CPUAdamBuilder = Builder
    try:
        yield op
    finally:
        cpu_adam.CPUAdamBuilder = stock
