# SPDX-License-Identifier: Apache-2.0
"""Compares an experts module on Sluice with transformers' eager loop in f64, on the same values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Values = dict[str, torch.Tensor]
# Relative to the largest element of each tensor. f32: sums of at most a few hundred terms in another order. 16-bit: two
# or three roundings of a row, each half a unit in the last place (2^-9 in bf16, 2^-12 in f16).
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Rows:
    """The output of a router: tokens [T, M], ids [T, K], weights [T, K] and the gradient of the output."""

    tokens: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    grad: torch.Tensor


def rows(model: int, experts: int, tokens: int, top_k: int, seed: int = 1, hot: bool = False) -> Rows:
    """Makes random routes; hot: every token's first route goes to expert 0."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=gen).topk(top_k).indices
    if hot and tokens:
        ids[:, 0] = 0  # a token may name one expert twice
    weights = torch.rand(tokens, top_k, generator=gen) + 0.1
    return Rows(
        torch.randn(tokens, model, generator=gen), ids, weights, torch.randn(tokens, model, generator=gen) * 0.5
    )


def gaps(found: Values, wanted: Values) -> dict[str, float]:
    """Returns the largest difference of each tensor, in units of the reference's largest element."""
    assert found.keys() == wanted.keys()
    gaps = {}
    for name, value in found.items():
        other = wanted[name].double()
        assert value.shape == other.shape, name
        if value.numel():
            gap = float((value.double() - other).abs().max() / other.abs().max().clamp(min=1e-6))
            gaps[name] = float("inf") if gap != gap else gap
    return gaps


def run(module: Any, given: Rows, dtype: torch.dtype, call: Callable[..., Any] | None = None) -> Values:
    """Runs forward and backward, and returns the output and the gradients by name."""
    tokens = given.tokens.to(dtype, copy=True).requires_grad_()
    weights = given.weights.double() if dtype == torch.float64 else given.weights.clone()
    weights.requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    out = (call or module)(tokens, given.ids, weights)
    if out.requires_grad:  # eager without a row returns an output without a graph
        out.backward(given.grad.to(out.dtype))
    values = {"output": out.detach()}
    for name, tensor in (("tokens", tokens), ("weights", weights)):
        values[name] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    for name, parameter in module.named_parameters():
        values[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return values


def reference(module: Any, given: Rows, dtype: torch.dtype) -> Values:
    """Runs transformers' eager loop in f64, on values rounded to `dtype` as the module's are."""
    twin = copy.deepcopy(module).double()
    twin.config = copy.copy(module.config)
    twin.config._experts_implementation = "eager"
    count = module.num_experts
    away = given.ids == count  # eager of some classes does not take the sentinel: a route of weight 0 is the same
    weights = given.weights.masked_fill(away, 0.0)
    rounded = Rows(given.tokens.to(dtype), given.ids.masked_fill(away, 0), weights, given.grad.to(dtype))
    found = run(twin, rounded, torch.float64)
    found["weights"] = found["weights"].masked_fill(away, 0.0)
    return found


def check(module: Any, given: Rows, dtype: torch.dtype = torch.float32, call: Any = None) -> None:
    """Checks that Sluice's output and all gradients are those of the reference."""
    module = module.to(dtype)
    wanted = reference(module, given, dtype)
    found = gaps(run(module, given, dtype, call), wanted)
    if max(found.values(), default=0.0) <= TOLERANCES[dtype]:
        return
    if dtype != torch.float32 and not bool((given.ids == module.num_experts).any()):
        # Rounding moves values across the limit of a clamp, as often as with transformers' own GEMMs.
        with implementation(module, "batched_mm"):
            stock = gaps(run(module, given, dtype), wanted)
        if all(gap <= max(TOLERANCES[dtype], 1.5 * stock[name]) for name, gap in found.items()):
            return
    raise AssertionError(f"too far from the reference: {found}")


def saved_bytes(module: Any, call: Callable[[], Any]) -> int:
    """Returns the bytes that autograd saves during a call, without the module's parameters and Sluice's own buffers."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(kept.values())


class Watch(TorchDispatchMode):
    """Calls `see(operation, arguments, result)` after each of torch's operations."""

    def __init__(self, see: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self._see(function, args, out)
        return out


def tensors_of(out: Any) -> list[torch.Tensor]:
    """Returns the tensors in the result of an operation."""
    return [one for one in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(one, torch.Tensor)]


@contextlib.contextmanager
def implementation(module: Any, name: str) -> Iterator[None]:
    """Sets another implementation for the module inside of the context."""
    before = module.config._experts_implementation
    module.config._experts_implementation = name
    try:
        yield
    finally:
        module.config._experts_implementation = before
