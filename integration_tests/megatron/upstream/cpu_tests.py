# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that runs Megatron's own unit tests unchanged on CPUs, with or without Sluice.

pytest loads the plugin by `-p cpu_tests`, in a separate process for each rank. With SLUICE_TEST_LAYER=1 Sluice's class
replaces MoELayer wherever it was imported. Each collective call of such a layer appends the name of the running test to
the file SLUICE_TEST_RAN, as proof that the layer ran.

| what the tests ask for | answer |
|---|---|
| whether there is a GPU, to skip themselves | yes while they are collected, no when they run |
| NCCL | gloo |
| Transformer Engine's version | 0, because the callers expect a version |
| six, for tokenizers that are not made | a stand-in |
| whether Transformer Engine supports FP8 | no |
| test data from the network | none |

Process groups end with the parallel state that they were made for. Megatron does not destroy them, and each gloo group
has a thread that wakes a hundred times a second.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import cpu_shim
import torch
from megatron.core import parallel_state, utils

_is_available = torch.cuda.is_available
_init_process_group = torch.distributed.init_process_group


def _init_on_gloo(*args: Any, **kwargs: Any) -> Any:
    kwargs["backend"] = "gloo"
    kwargs.pop("device_id", None)
    return _init_process_group(*args, **kwargs)


_groups: list[Any] = []
_new_group = torch.distributed.new_group
_destroy = parallel_state.destroy_model_parallel


def _noted_group(*args: Any, **kwargs: Any) -> Any:
    group = _new_group(*args, **kwargs)
    if isinstance(group, torch.distributed.ProcessGroup):
        _groups.append(group)
    return group


def _destroy_with_groups() -> None:
    _destroy()
    alive = torch.distributed.distributed_c10d._world.pg_map
    for group in _groups:
        if group in alive:  # Megatron destroys a few itself
            torch.distributed.destroy_process_group(group)
    _groups.clear()


def _module(name: str, **attributes: Any) -> None:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in attributes.items():
        setattr(made, key, value)
    sys.modules[name] = made


def _no_data(*args: Any, **kwargs: Any) -> None:
    raise ImportError("tests that need data of their own do without")


def _note() -> None:
    with open(os.environ["SLUICE_TEST_RAN"], "a") as file:
        file.write(os.environ.get("PYTEST_CURRENT_TEST", "?").rpartition(" ")[0] + "\n")


def _put_sluice_in_place() -> None:
    """Replaces the host's class in all modules that have imported it, including its own."""
    from megatron.core.transformer.moe import moe_layer
    from sluice.adapters.megatron.layer import SluiceMoELayer
    from sluice.adapters.megatron.state import LayerState

    run = LayerState.run

    def counting(self: Any, *args: Any) -> Any:
        out = run(self, *args)
        _note()
        return out

    LayerState.run = counting
    for name, module in list(sys.modules.items()):
        if module is not moe_layer and not name.startswith("sluice.") and _has(module, moe_layer.MoELayer):
            module.MoELayer = SluiceMoELayer


def _has(module: Any, layer: type) -> bool:
    return getattr(module, "__dict__", {}).get("MoELayer") is layer


torch.distributed.init_process_group = _init_on_gloo
torch.distributed.new_group = _noted_group
parallel_state.destroy_model_parallel = _destroy_with_groups
for name in ("six",):  # needed by tokenizers that no test here makes
    if importlib.util.find_spec(name) is None:
        sys.modules[name] = cpu_shim._Anything(name)
# Only this module exists and not its package, so that code that looks for Transformer Engine finds none.
_module(
    "transformer_engine.pytorch.fp8", check_fp8_support=lambda: (False, "no GPU"), fp8_autocast=contextlib.nullcontext
)
_module("tests.test_utils.python_scripts.download_unit_tests_dataset", download_and_extract_asset=_no_data)
utils._te_version = utils.PkgVersion("0")


def pytest_configure(config: Any) -> None:
    """Runs before test files are imported, because the imports evaluate skip conditions."""
    torch.cuda.is_available = lambda: True


def pytest_collection_finish(session: Any) -> None:
    """Lets running tests see the real machine."""
    torch.cuda.is_available = _is_available
    if os.environ.get("SLUICE_TEST_LAYER"):
        _put_sluice_in_place()
