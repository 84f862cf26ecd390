"""Where DeepSpeed meets Sluice: one method of `DeepSpeedEngine`, wrapped.

`_configure_distributed_model` has put the parameters in their dtype and on their device and has made the
expert-parallel groups, and the optimizer does not exist yet. Without the "sluice" section nothing happens at all.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from sluice.adapters.deepspeed import cpu_adam_hook

METHOD = "_configure_distributed_model"


def install(engine_module: ModuleType) -> None:
    """Wraps the method, once. Raises if this DeepSpeed does not have it; the loader reports that."""
    cls = engine_module.DeepSpeedEngine
    original = getattr(cls, METHOD, None)
    if original is None:
        raise RuntimeError(f"this DeepSpeed has no DeepSpeedEngine.{METHOD}, so its config cannot switch Sluice on")
    if hasattr(original, "_sluice_original"):
        return

    @functools.wraps(original)
    def _configure_distributed_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        apply(self)
        return result

    _configure_distributed_model._sluice_original = original  # type: ignore[attr-defined]
    setattr(cls, METHOD, _configure_distributed_model)
    cpu_adam_hook.install(engine_module)


def uninstall(engine_module: ModuleType) -> None:
    """Puts the host's own method back; engines that exist keep what they have."""
    original = getattr(getattr(engine_module.DeepSpeedEngine, METHOD), "_sluice_original", None)
    if original is not None:
        setattr(engine_module.DeepSpeedEngine, METHOD, original)
    cpu_adam_hook.uninstall(engine_module)


def apply(engine: Any) -> None:
    """Reads the engine's config and swaps its model's layers if told to; `engine.sluice` is the handle."""
    from sluice import config, settings

    values = getattr(getattr(engine, "_config", None), "_param_dict", None) or {}
    section = values.get("sluice")
    options = settings.of_ds_config(section)
    if section is None:
        name = config.misspelt_section(values)
        if name is not None:
            print(f'sluice: ds_config has a key "{name}": did you mean "sluice"?', file=sys.stderr, flush=True)
    if options is None:
        return
    from sluice.adapters.deepspeed.swapper import Stage, swap

    stage = Stage.of_engine(engine)
    # A stage of a pipeline may hold no MoE layer at all.
    engine.sluice = swap(engine.module, options, at_least=1 if options.required and stage is None else 0, stage=stage)
