# SPDX-License-Identifier: Apache-2.0
"""Says why no layer of a DeepSpeed model or engine runs on Sluice. Needs no Sluice engine."""

from __future__ import annotations

import sys
from typing import Any


def waits(module: Any) -> bool:
    """Returns False: DeepSpeed's layers are swapped when the engine is made, and have numbers from then on."""
    return False


def need_not_have_run(given: Any) -> bool:
    """Returns whether `given` is a pipeline stage without MoE layers; other stages of the model may have some."""
    if _is_a(given, "deepspeed.runtime.engine", "DeepSpeedEngine"):
        return vars(given).get("sluice") is not None and need_not_have_run(given.module)
    return _is_a(given, "deepspeed.runtime.pipe.module", "PipelineModule") and _num_layers(given) == 0


def why(given: Any) -> str:
    """Returns why no layer of `given` runs on Sluice; "": `given` has nothing of DeepSpeed."""
    count = _num_layers(given)
    is_engine = _is_a(given, "deepspeed.runtime.engine", "DeepSpeedEngine")
    if count == 0:
        return "the engine's model holds no deepspeed.moe.layer.MoE and no AutoEP layer" if is_engine else ""
    layers = f"it holds {count} MoE layer{'s' if count > 1 else ''} of DeepSpeed's"
    return f"{layers}; {_why_of_engine(given) if is_engine else _NO_ENGINE}"


_NO_ENGINE = (
    'Sluice takes over layers in deepspeed.initialize, with "sluice": {"enabled": true} in its ds_config, or in '
    "sluice.adapters.deepspeed.swap (if an engine has not replaced them, pass the engine to see why)"
)


def _why_of_engine(engine: Any) -> str:
    handle = vars(engine).get("sluice")
    if handle is not None:
        return "; ".join(handle.refused) or "engine.sluice.unswap() has given them back to DeepSpeed"
    if (getattr(engine._config, "_param_dict", None) or {}).get("sluice") is None:
        return 'its ds_config has no section "sluice": write "sluice": {"enabled": true}'
    return 'its "sluice" section was off ("enabled" is not true, or SLUICE=0), or Sluice was imported after it was made'


def _num_layers(module: Any) -> int:
    """Returns the number of MoE layers of both DeepSpeed's kinds."""
    return sum(
        _is_a(child, "deepspeed.moe.sharded_moe", "MOELayer") or type(child).__name__ == "AutoEPMoELayer"
        for child in module.modules()
    )


def _is_a(given: Any, module: str, name: str) -> bool:
    """Returns whether `given` is an instance of a DeepSpeed class. False if its module was never imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(given, kind)
