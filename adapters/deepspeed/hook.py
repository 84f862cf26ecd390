# SPDX-License-Identifier: Apache-2.0
"""Wraps methods of `DeepSpeedEngine`; `_configure_distributed_model` swaps the layers.

After that method the parameters have their dtype and device, the expert-parallel groups exist, and the optimizer does
not exist yet. Without the "sluice" section nothing happens.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import ModuleType
from typing import Any

from sluice.adapters.deepspeed import adam_hook

METHOD = "_configure_distributed_model"
LAST_METHOD = "_configure_checkpointing"  # then the optimizer exists, and nothing has run


# Runs the optimizer's step, zeroes gradients, and counts steps.
UPDATE = "_take_model_step"
CLIPPING = "clip_fp32_gradients"


# Methods whose files number experts by position, and that all ranks call -> whether experts move back afterwards.
CHECKPOINTS = {"save_checkpoint": True, "load_checkpoint": False, "save_16bit_model": True}


def _at_home(original: Any, and_back: bool) -> Any:
    """Wraps a method so that it runs with all experts on the ranks where the host expects them."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = getattr(self, "sluice", None)
        if handle is not None and handle.pipeline is not None and not and_back:
            handle.pipeline.live.cancel("a checkpoint is loaded")
        if handle is None or not handle.layers:
            return original(self, *args, **kwargs)
        with handle.at_home(and_back):
            return original(self, *args, **kwargs)

    method._sluice_original = original  # type: ignore[attr-defined]
    return method


def _with_moves(original: Any) -> Any:
    """Wraps the optimizer step: before it, experts in transit take their new ranks; after it, new moves start."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        decider = getattr(getattr(self, "sluice", None), "decider", None)
        if decider is not None:
            decider.before_step()
        result = original(self, *args, **kwargs)
        if decider is not None:
            decider.after_step()
        return result

    method._sluice_original = original  # type: ignore[attr-defined]
    return method


def _with_norm(original: Any) -> Any:
    """Wraps the clipping of f32 gradients, by a norm that does not depend on the placement of experts."""

    @functools.wraps(original)
    def method(self: Any) -> Any:
        if getattr(self, "sluice", None) is None:
            return original(self)
        from sluice.adapters.deepspeed import clip_norm

        return clip_norm.clip(self, lambda: original(self))

    method._sluice_original = original  # type: ignore[attr-defined]
    return method


def _with_start(original: Any) -> Any:
    """Wraps a method: before it, a pipeline's layers move to the stages of the plan, and an optimizer whose experts
    cannot be moved is refused."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        handle = getattr(self, "sluice", None)
        if handle is not None and handle.pipeline is not None:
            handle.pipeline.start_plan(self)
        if handle is not None and handle.decider is not None:
            try:
                handle.decider.start()
            except BaseException:
                handle.unswap()
                raise
        return original(self, *args, **kwargs)

    method._sluice_original = original  # type: ignore[attr-defined]
    return method


def install(engine_module: ModuleType) -> None:
    """Wraps the methods, once. Raises if this DeepSpeed does not have the first; the loader reports that."""
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
    setattr(cls, LAST_METHOD, _with_start(getattr(cls, LAST_METHOD)))
    for name, and_back in CHECKPOINTS.items():
        setattr(cls, name, _at_home(getattr(cls, name), and_back))
    setattr(cls, UPDATE, _with_moves(getattr(cls, UPDATE)))
    setattr(cls, CLIPPING, _with_norm(getattr(cls, CLIPPING)))
    adam_hook.install(engine_module)


def uninstall(engine_module: ModuleType) -> None:
    """Restores the host's own methods. Existing engines keep their swapped layers."""
    original = getattr(getattr(engine_module.DeepSpeedEngine, METHOD), "_sluice_original", None)
    if original is not None:
        setattr(engine_module.DeepSpeedEngine, METHOD, original)
    for name in (*CHECKPOINTS, UPDATE, CLIPPING, LAST_METHOD):
        wrapped = getattr(getattr(engine_module.DeepSpeedEngine, name), "_sluice_original", None)
        if wrapped is not None:
            setattr(engine_module.DeepSpeedEngine, name, wrapped)
    adam_hook.uninstall(engine_module)


def apply(engine: Any) -> None:
    """Reads the engine's config, swaps its model's layers, and takes over its pipeline batches if the config says so.
    `engine.sluice` is the handle."""
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
    engine.sluice.optimizer = functools.partial(_basic_optimizer, weakref.ref(engine))
    for layer in engine.sluice.layers:
        layer._sluice.optimizer = engine.sluice.optimizer
    if options.placement is not None:
        from sluice.adapters.deepspeed.moe.deciding import Decider

        engine.sluice.decider = Decider(engine.sluice.layers, options.placement, engine.sluice.optimizer)
    if stage is not None:
        engine.sluice.engine = weakref.ref(engine)
    if options.pipeline is not None:
        from sluice.adapters.deepspeed.pipeline.takeover import take_over

        try:
            engine.sluice.pipeline = take_over(engine, options)
        except BaseException:
            engine.sluice.unswap()
            raise


def _basic_optimizer(engine: Any) -> Any:
    """Returns the engine's optimizer, or None before it exists."""
    return getattr(engine(), "optimizer", None)
