# SPDX-License-Identifier: Apache-2.0
"""Computes weight gradients of linear layers in a separate op, for which a backward keeps their operands.

Formulas and the order of sums are torch's, so that all bits are those of a whole backward. Weight gradients are added
to `.grad` through autograd, and hooks of parameters run then. The backward computes all other gradients, and also the
weight gradients of a layer whose parameters are used elsewhere too, because autograd adds all uses in one order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sluice.errors import Unsupported

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


def linears_of(module: nn.Module, is_passed_over: Callable[[nn.Module], bool]) -> list[nn.Linear]:
    """Returns the linear layers with separable weight gradients: torch's own forward, and unshared parameters.

    is_passed_over  whether a module is left out with all of its submodules, as compiled ones are
    """
    holders: dict[int, int] = {}
    for each in module.modules():
        for parameter in each._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        each
        for each in _walked(module, is_passed_over)
        if type(each).forward is nn.Linear.forward
        and "forward" not in vars(each)
        and all(holders[id(parameter)] == 1 for parameter in each._parameters.values() if parameter is not None)
        and "weight" in each._parameters
    ]


def _walked(module: nn.Module, is_passed_over: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    compiled = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())  # torch.compile imports it
    if module._compiled_call_impl is None and not isinstance(module, compiled) and not is_passed_over(module):
        yield module
        for child in module.children():
            yield from _walked(child, is_passed_over)


class SplitBackward:
    """Has the deferred weight gradients of a stage's backwards, by micro-batch."""

    def __init__(self) -> None:
        self._linears: list[nn.Linear] = []
        self._names: dict[nn.Parameter, str] = {}
        self._known: set[nn.Parameter] = set()  # parameters whose uses the first forward counts
        self._whole: set[nn.Parameter] = set()  # parameters that are used outside of their layer too
        self._calls: dict[nn.Parameter, int] | None = None  # calls of layers in the first forward; None: it has ended
        self._first = self._repeats_first = False  # the first forward's backward has not run yet; runs now
        self._left: dict[int, list[_Left]] = {}
        self._current: list[_Left] | None = None  # of the current backward
        # An input of every call, so that a backward runs even if the layer's input requires no gradient.
        self._wants_grad = torch.zeros((), requires_grad=True)
        self.num_left = 0  # weight gradients so far that were computed later

    def take(self, module: nn.Module, linears: Iterable[nn.Linear]) -> None:
        """Makes linear layers of the module defer their weight gradients, until `give_back`. The very first forward
        does not defer: it shows which layers can (`learn`)."""
        self._linears, self._first = list(linears), False
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        own = {each for linear in self._linears for each in _parameters(linear)}
        if own != self._known or self._calls is not None:  # other layers, or the first forward has failed
            self._known, self._whole, self._calls = own, set(), dict.fromkeys(own, 0)
        for linear in self._linears:
            linear.forward = functools.partial(self._forward, linear)  # type: ignore[method-assign]

    def learn(self, outputs: Iterable[Any]) -> None:
        """Learns from a forward which layers can defer. outputs: the tensors at which its backward begins."""
        calls, self._calls = self._calls, None
        if calls is not None:
            self._first = True
            uses = _uses(outputs, calls)
            self._whole = {each for each, number in uses.items() if number > calls[each]}

    def give_back(self) -> None:
        """Restores the layers' forwards, and drops deferred gradients. A second call has no effect."""
        for linear in self._linears:
            vars(linear).pop("forward", None)
        self._linears = []
        self._left.clear()

    @contextmanager
    def left_behind(self, micro_batch: int) -> Iterator[None]:
        """Defers the weight gradients of a backward that runs inside. Any other backward is whole."""
        self._current = self._left.setdefault(micro_batch, [])
        self._first, self._repeats_first = False, self._first
        try:
            yield
        finally:
            self._current, self._repeats_first = None, False

    def run(self, micro_batch: int) -> None:
        """Adds the weight gradients of the micro-batch to `.grad`."""
        left = self._left.pop(micro_batch, [])
        while left:
            first = left[0]
            first.add_to_grads([each for each in left if each.is_added_with(first)])
            left = [each for each in left if not each.is_added_with(first)]
            self.num_left += 1

    def _forward(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if self._calls is not None:
            for each in _parameters(linear) if torch.is_grad_enabled() else ():
                self._calls[each] += 1
        elif not self._repeats_first and _has_plain_formulas(linear, x) and self._whole.isdisjoint(_parameters(linear)):
            return _Linear.apply(x, self._wants_grad, (linear.weight, linear.bias), self)
        return F.linear(x, linear.weight, linear.bias)

    def leave(self, left: _Left) -> None:
        """Keeps a use for later if it is inside of `left_behind`; else adds its gradients now."""
        if not _will_run(self._wants_grad):
            return  # a torch.autograd.grad of other tensors
        if self._current is None:
            left.add_to_grads([left])
            return
        for each in left.wanted():
            if _will_run(each):
                raise Unsupported(
                    f"parameter {self._names[each]} of an nn.Linear is also used outside of its layer, but was not in "
                    "the first micro-batch: separate weight gradients would sum its gradients in another order. "
                    'Remove separate_wgrad, or the policy that needs it ("zero_bubble", "v")'
                )
        self._current.append(left)


class _Left:
    """Has one use of a linear layer: the tensors from which its weight and bias gradients are computed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, grad: torch.Tensor) -> None:
        self._weight, self._bias = weight, bias
        self._x, self._grad = x, grad
        self._walk = torch._C._current_graph_task_id()

    def wanted(self) -> list[Any]:
        return [each for each in (self._weight, self._bias) if each is not None and each.requires_grad]

    def is_added_with(self, other: _Left) -> bool:
        """Returns whether both are of one weight and one backward, whose sum autograd adds to `.grad`."""
        return self._weight is other._weight and self._walk == other._walk

    def add_to_grads(self, together: list[_Left]) -> None:
        """Adds gradients. together: this use, and those that are added with it, in the order of the backward."""
        wanted = self.wanted()
        gradients = [functools.reduce(torch.add, (each._gradient(one) for each in together)) for one in wanted]
        with torch.enable_grad():
            views = [each.view_as(each) for each in wanted]
        torch.autograd.backward(views, gradients)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        rows = _rows(self._grad)
        return rows.sum(0) if parameter is self._bias else rows.t().mm(_rows(self._x))


class _Linear(torch.autograd.Function):
    """Computes a linear layer without showing autograd its parameters, so that their hooks do not run twice."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, _: torch.Tensor, parameters: tuple[Any, Any], later: SplitBackward
    ) -> torch.Tensor:
        weight, bias = ctx.parameters = parameters  # a saved tensor may come back as another object
        ctx.later = later
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = _rows(grad).mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        ctx.later.leave(_Left(*ctx.parameters, x, grad))
        return grad_x, None, None, None


def _parameters(linear: nn.Linear) -> list[nn.Parameter]:
    return [each for each in linear._parameters.values() if each is not None and each.requires_grad]


def _accumulator(parameter: torch.Tensor) -> Any:
    """Returns the AccumulateGrad node of a leaf."""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def _will_run(parameter: torch.Tensor) -> bool:
    """Returns whether the backward that runs now gives this leaf a gradient by itself."""
    return bool(torch._C._will_engine_execute_node(_accumulator(parameter)))


def _uses(outputs: Iterable[Any], parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    """Counts the uses of each of these parameters in the graph of the outputs."""
    accumulators = {_accumulator(each): each for each in parameters}
    found = dict.fromkeys(accumulators.values(), 0)
    nodes = [each.grad_fn for each in outputs if isinstance(each, torch.Tensor) and each.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for child, _ in nodes.pop().next_functions:
            if child in accumulators:
                found[accumulators[child]] += 1
            elif child is not None and child not in seen:
                seen.add(child)
                nodes.append(child)
    return found


def _has_plain_formulas(linear: nn.Linear, x: Any) -> bool:
    """Returns whether torch's own backward of the call is two products and a sum over rows, of just these tensors."""
    weight = linear.weight
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(x) is torch.Tensor
        and x.device.type == "cpu"
        and x.dim() > 1
        and x.is_contiguous()
        and x.numel() > 0
        and x.dtype == weight.dtype
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
