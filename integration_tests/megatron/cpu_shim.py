# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Core on a machine without GPUs: wraps its calls to CUDA, which the CPU answers.

Import it before `megatron`, in a separate process, as it changes torch. `torch.cuda.is_available()` stays False and
tensors report their real device; only calls that would fail without a GPU are answered.

| call | caller | answer |
|---|---|---|
| `device="cuda"` of factories, `Tensor.to`, `.cuda()` | optimizers, gradient norms, schedules, checkpoints | the CPU |
| `Tensor.type()` | optimizers, clipping: they compare names | the name that a CUDA tensor would have |
| `current_device`, streams, events, memory counters | weights, dispatchers, DDP | a CPU device, dummies, 0 |
| random states of the device | the tracker of random numbers, checkpointing | the CPU's generator |
| splits of an all-to-all as tensors | dispatchers, which convert those of CUDA only | lists |
| triton, grouped_gemm, Apex's fused weight gradients | imports from 0.18 on; GroupedMLP; `main_grad` | stand-ins |
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.utils
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_DEVICES = (str, torch.device)  # types of what names one


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _OnCpu(TorchFunctionMode):
    """Replaces CUDA devices in arguments by the CPU. has_parameters: the parameters of modules, but no copies of them,
    report that they are on a CUDA device."""

    has_parameters = False

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.has_parameters and function == torch.Tensor.is_cuda.__get__:
            return isinstance(args[0], torch.nn.Parameter)
        if function is torch.Tensor.cuda or function is torch.Tensor.pin_memory:
            return args[0]
        if function is torch.Tensor.record_stream:
            return None
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        for value in args:  # every call of torch runs this, so arguments are copied only if one changes
            if type(value) in _DEVICES and _is_cuda(value):
                args = tuple(_CPU if _is_cuda(value) else value for value in args)
                break
        if not kwargs:
            return function(*args)
        changes: dict[str, Any] = {}
        if _is_cuda(kwargs.get("device")):
            changes["device"] = _CPU
        if kwargs.get("pin_memory"):
            changes["pin_memory"] = False
        return function(*args, **(kwargs | changes if changes else kwargs))


class _Stream:
    """Replaces a stream or an event, and never waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def record_event(self, *args: Any) -> _Stream:
        return self

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing


_stream = _Stream()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _patch_cuda() -> None:
    cuda = torch.cuda
    answers: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "current_stream": lambda *args: _stream,
        "default_stream": lambda *args: _stream,
        "stream": lambda stream: contextlib.nullcontext(stream),
        "Stream": _Stream,
        "Event": _Stream,
        "get_rng_state": _state,
        "set_rng_state": _set_state,
        "manual_seed": _seed,
        "manual_seed_all": _nothing,  # torch.manual_seed calls it
        "_lazy_call": lambda call, **kwargs: call(),
        "_lazy_init": _nothing,
    }
    answers.update(dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), _nothing))
    answers.update(
        dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), lambda *args: 0
        )
    )
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    cuda.random.get_rng_state, cuda.random.set_rng_state = _state, _set_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
    torch._C._cuda_setRNGState = _set_state


def _patch_all_to_all() -> None:
    original = torch.distributed.all_to_all_single

    def all_to_all_single(output: Any, input: Any, *splits: Any, **kwargs: Any) -> Any:
        lists = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in (*zip(("output_split_sizes", "input_split_sizes"), splits), *kwargs.items())
        }
        return original(output, input, **lists)

    torch.distributed.all_to_all_single = all_to_all_single


# ---- missing packages ----


class _Anything(types.ModuleType):
    """Replaces a module, decorator, type or value that only has to exist."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes `triton` and all its submodules."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] != "triton":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        made = _Anything(spec.name)
        made.__version__ = "3.0.0"  # too old for kernels that check the version, so they are not used
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def _gmm(rows: torch.Tensor, weights: torch.Tensor, counts: Any, trans_b: bool = False) -> torch.Tensor:
    """Multiplies the rows of each expert by its matrix."""
    parts = torch.split(rows, [int(count) for count in counts])
    return torch.cat([part @ (matrix.t() if trans_b else matrix) for part, matrix in zip(parts, weights)])


def _add_weight_gradient(rows: torch.Tensor, grads: torch.Tensor, into: torch.Tensor) -> None:
    into.add_(grads.to(into.dtype).t() @ rows.to(into.dtype))


def _add_packages() -> None:
    try:
        import triton  # noqa: F401  (a real one is used)
    except ImportError:
        sys.meta_path.append(_Finder())
    grouped = types.ModuleType("grouped_gemm")
    grouped.ops = types.SimpleNamespace(gmm=_gmm)
    sys.modules["grouped_gemm"] = grouped
    fused = types.ModuleType("fused_weight_gradient_mlp_cuda")
    fused.wgrad_gemm_accum_fp32 = fused.wgrad_gemm_accum_fp16 = _add_weight_gradient
    sys.modules["fused_weight_gradient_mlp_cuda"] = fused


def _mend_megatron() -> None:
    """Defines names that Megatron reads even without Transformer Engine, which has them: in every forward of a router
    (0.16.1), and in the recomputation of an activation alone."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    def nothing_around(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    of_random = {
        "FP8GlobalStateManager": types.SimpleNamespace(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": nothing_around,
        "fp8_autocast": nothing_around,
    }
    for module, names in ((moe_utils, {"te_general_gemm": None}), (random, of_random)):
        for name, stand_in in names.items():
            if not hasattr(module, name):
                setattr(module, name, stand_in)


_on_cpu = _OnCpu()


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Disables the rewriting of torch's calls, which takes time, for layers that are on the CPU and stay there."""
    _on_cpu.__exit__(None, None, None)
    try:
        yield
    finally:
        _on_cpu.__enter__()


@contextlib.contextmanager
def parameters_on_a_device() -> Iterator[None]:
    """Makes parameters report a device while Megatron decides which ones to offload: it offloads no others."""
    _on_cpu.has_parameters = True
    try:
        yield
    finally:
        _on_cpu.has_parameters = False


_patch_cuda()
_patch_all_to_all()
_add_packages()
_on_cpu.__enter__()
_mend_megatron()
