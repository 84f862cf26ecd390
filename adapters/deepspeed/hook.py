# SPDX-License-Identifier: Apache-2.0
"""Wraps methods of `DeepSpeedEngine`; `_configure_distributed_model` swaps the layers.

After that method the parameters have their dtype and device, the expert-parallel groups exist, and the optimizer does
not exist yet. Without the "sluice" section nothing happens.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sluice.adapters.deepspeed import adam_hook

METHOD = "_configure_distributed_model"


def _with_layers(call: Callable[[], Any], engine: Any, *_: Any, **__: Any) -> Any:
    result = call()
    apply(engine)
    return result


def _at_home(and_back: bool) -> Callable[..., Any]:
    """Returns the wrapper of a method whose files number experts by position, and that all ranks call. The method runs
    with all experts on the ranks where the host expects them; and_back: afterwards they return."""

    def wrapper(call: Callable[[], Any], engine: Any, *_: Any, **__: Any) -> Any:
        handle = getattr(engine, "sluice", None)
        if handle is not None and handle.pipeline is not None and not and_back:
            handle.pipeline.live.cancel("a checkpoint is loaded")
        if handle is None or not handle.layers:
            return call()
        with handle.at_home(and_back):
            return call()

    return wrapper


def _with_moves(call: Callable[[], Any], engine: Any, *_: Any, **__: Any) -> Any:
    """Before the optimizer's step, experts in transit take their new ranks; after it, new moves start."""
    decider = getattr(getattr(engine, "sluice", None), "decider", None)
    if decider is None:
        return call()
    decider.before_step()
    result = call()
    decider.after_step()
    return result


def _with_norm(call: Callable[[], Any], engine: Any) -> Any:
    """Clips f32 gradients by a norm that does not depend on the placement of experts."""
    if getattr(engine, "sluice", None) is None:
        return call()
    from sluice.adapters.deepspeed import clip_norm

    return clip_norm.clip(engine, call)


def _with_start(call: Callable[[], Any], engine: Any, *_: Any, **__: Any) -> Any:
    """When the optimizer exists and nothing has run, a pipeline's layers move to the stages of the plan, and an
    optimizer whose experts cannot be moved is refused."""
    handle = getattr(engine, "sluice", None)
    if handle is not None and handle.pipeline is not None:
        handle.pipeline.start_plan(engine)
    if handle is not None and handle.decider is not None:
        try:
            handle.decider.start()
        except BaseException:
            handle.unswap()
            raise
    return call()


# The wrapper of each method, called with the host's method with its arguments, with the engine, and with the arguments.
WRAPPERS: dict[str, Callable[..., Any]] = {
    METHOD: _with_layers,
    "_configure_checkpointing": _with_start,
    "save_checkpoint": _at_home(True),
    "load_checkpoint": _at_home(False),
    "save_16bit_model": _at_home(True),
    "_take_model_step": _with_moves,  # runs the optimizer's step, zeroes gradients, and counts steps
    "clip_fp32_gradients": _with_norm,
    "_configure_optimizer": adam_hook.with_ops,
}


def install(engine_module: ModuleType) -> None:
    """Wraps the methods, once. Raises if this DeepSpeed does not have one; the loader reports that."""
    cls = engine_module.DeepSpeedEngine
    if hasattr(getattr(cls, METHOD, None), "_sluice_original"):
        return
    for name, wrapper in WRAPPERS.items():
        if not hasattr(cls, name):
            raise RuntimeError(f"this DeepSpeed has no DeepSpeedEngine.{name}, so its config cannot switch Sluice on")
        setattr(cls, name, _wrapped(getattr(cls, name), wrapper))


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, self, *args, **kwargs), self, *args, **kwargs)

    method._sluice_original = original  # type: ignore[attr-defined]
    return method


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
