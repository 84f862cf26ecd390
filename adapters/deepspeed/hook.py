# SPDX-License-Identifier: Apache-2.0
"""Where DeepSpeed meets Sluice: one method of `DeepSpeedEngine`, wrapped.

`_configure_distributed_model` has put the parameters in their dtype and on their device and has made the
expert-parallel groups, and the optimizer does not exist yet. Without the "sluice" section nothing happens at all.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import ModuleType
from typing import Any

from sluice.adapters.deepspeed import adam_hook

METHOD = "_configure_distributed_model"
LAST_METHOD = "_configure_checkpointing"  # the optimizer is there, and nothing has run


# The optimizer's step, the zeroing of gradients, and the count of steps.
UPDATE = "_take_model_step"
CLIPPING = "clip_fp32_gradients"


# Whose files number experts by their place, and which all ranks call; whether they go back to where they lay.
CHECKPOINTS = {"save_checkpoint": True, "load_checkpoint": False, "save_16bit_model": True}


def _at_home(original: Any, and_back: bool) -> Any:
    """The method with all experts where the host believes them to be; itself where none has moved."""

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
    """The update, in front of which experts that are on their way arrive, and behind which others set out."""

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
    """The clipping of f32 gradients, by a norm that does not depend on where experts live."""

    @functools.wraps(original)
    def method(self: Any) -> Any:
        if getattr(self, "sluice", None) is None:
            return original(self)
        from sluice.adapters.deepspeed import clip_norm

        return clip_norm.clip(self, lambda: original(self))

    method._sluice_original = original  # type: ignore[attr-defined]
    return method


def _with_start(original: Any) -> Any:
    """The method, before which a pipeline's layers go where a plan has them, and an optimizer from which no expert can
    be moved is refused."""

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
    setattr(cls, LAST_METHOD, _with_start(getattr(cls, LAST_METHOD)))
    for name, and_back in CHECKPOINTS.items():
        setattr(cls, name, _at_home(getattr(cls, name), and_back))
    setattr(cls, UPDATE, _with_moves(getattr(cls, UPDATE)))
    setattr(cls, CLIPPING, _with_norm(getattr(cls, CLIPPING)))
    adam_hook.install(engine_module)


def uninstall(engine_module: ModuleType) -> None:
    """Puts the host's own method back; engines that exist keep what they have."""
    original = getattr(getattr(engine_module.DeepSpeedEngine, METHOD), "_sluice_original", None)
    if original is not None:
        setattr(engine_module.DeepSpeedEngine, METHOD, original)
    for name in (*CHECKPOINTS, UPDATE, CLIPPING, LAST_METHOD):
        wrapped = getattr(getattr(engine_module.DeepSpeedEngine, name), "_sluice_original", None)
        if wrapped is not None:
            setattr(engine_module.DeepSpeedEngine, name, wrapped)
    adam_hook.uninstall(engine_module)


def apply(engine: Any) -> None:
    """Reads the engine's config, swaps its model's layers and takes its batches over if told to; `engine.sluice` is the
    handle."""
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
    """What the engine trains with, as far as it is there."""
    return getattr(engine(), "optimizer", None)
