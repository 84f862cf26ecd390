# SPDX-License-Identifier: Apache-2.0
"""Computes experts by the host's own modules, row block by row block, with gradients.

The library passes the rows of one expert and gets its output; in backward it passes the output's gradient. Between the
two calls the module's autograd graph is kept. The layer's own autograd.Function, and not the graph, saves the tensors
(function.py), so that the host's hooks on saved tensors (activation checkpointing, offloading) reach them at one place
and in the same order on every rank.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from ..._library import load
from .placement import Placement


class CallbackExperts:
    """Has the local experts as callables.

    modules     one per local expert: rows in, rows out
    parameters  for each module, the tensors it reads that require gradients; called in each pass
    view        gives rows [R, M] the shape that the modules expect
    """

    def __init__(
        self,
        modules: Sequence[Callable[[torch.Tensor], Any]],
        parameters: Callable[[], list[list[torch.Tensor]]] | None = None,
        view: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.modules = list(modules)
        self._parameters = parameters
        self.view = view or (lambda rows: rows)

    def parameters(self) -> list[list[torch.Tensor]]:
        if self._parameters is not None:
            return self._parameters()
        return [list(module.parameters()) for module in self.modules]

    def read_for(self, parameters: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Returns the tensors that modules read if `parameters` are the layer's inputs. Gradients are taken for them.

        They have to be leaves if one input may be computed from another: otherwise a gradient would pass through the
        first, and reach the second twice, here and outside of the layer.
        """
        return parameters

    def as_bound(self) -> CallbackExperts:
        """Binds these experts to the current call, for a backward that runs them after the host's call has ended."""
        return self

    def __call__(self, local_expert: int, rows: torch.Tensor) -> torch.Tensor:
        """Returns the expert's output as [R, M] in the dtype of the rows."""
        out = self.modules[local_expert](self.view(rows))
        if isinstance(out, tuple):  # (output, bias for later): DeepSpeed's own layer ignores the second as well
            out = out[0]
        return out.reshape(rows.shape).to(rows.dtype)


class _Entry(torch.autograd.Function):
    """Starts a graph at rows without the graph keeping them alive, as a leaf would."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None  # never reached: the gradient is captured here


@contextlib.contextmanager
def _hooks_silenced(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Removes tensor hooks of parameters: they run once, on the gradient that the layer returns, not on its parts."""
    kept = [(hooks, dict(hooks)) for hooks in (tensor._backward_hooks for tensor in tensors) if hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in kept:
            hooks.update(items)


def _wide(grad: torch.Tensor) -> torch.Tensor:
    """Widens 16-bit gradients to f32, as in the library: they are summed over chunks, and rounded at the end."""
    return grad.float() if grad.dtype in (torch.bfloat16, torch.float16) else grad


def _saved_as_they_are() -> saved_tensors_hooks:
    """Hides saved tensors from the host's hooks: the host must not checkpoint or offload the graph of one pass."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class RngAndAutocast:
    """Saves autocast and random states in its constructor. A backward runs outside of the forward's autocast."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        kind = device.type
        self._autocast: dict[str, Any] = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        self._random: list[torch.Tensor] | None = self._random_now()

    def _random_now(self) -> list[torch.Tensor]:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _set_random(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)

    def unless_random(self) -> RngAndAutocast:
        """Returns self, without random states if no number was drawn since: few experts draw, and a state has 5 KB."""
        if all(torch.equal(then, now) for then, now in zip(self._random or [], self._random_now())):
            self._random = None
        return self

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores autocast and random states. On exit the random states of the entry are restored."""
        with torch.autocast(**self._autocast):
            if self._random is None:
                yield
                return
            present = self._random_now()
            self._set_random(self._random)
            try:
                yield
            finally:
                self._set_random(present)


class ExpertRun:
    """Implements the callbacks of one forward and its backward.

    parameters  per local expert, the tensors that its module reads (not those that saved-tensor hooks return); empty
                if no backward may follow
    again       backward runs the forward a second time, and nothing of the first run is kept. Both record a graph,
                since some of torch's operations give different bits without one
    """

    def __init__(
        self,
        experts: CallbackExperts,
        placement: Placement,
        dtype: torch.dtype,
        width: int,
        parameters: list[list[torch.Tensor]],
        again: bool = False,
    ) -> None:
        self.experts = experts
        self.placement = placement
        self.dtype = dtype
        self.width = width
        self.record = len(parameters) > 0
        self._again = again
        self._is_backward = False
        self._rng_and_autocast: dict[tuple[int, int], RngAndAutocast] = {}
        self._given = parameters
        self.error: BaseException | None = None
        self.saved: list[torch.Tensor] = []  # the graphs' saved tensors; moved out after forward, back in for backward
        self._graphs: dict[tuple[int, int], tuple[GradientEdge, GradientEdge] | None] = {}
        self._parameters: list[list[torch.Tensor]] = []
        self._grads: list[list[torch.Tensor | None]] = []

    def _borrow(self, address: Any, rows: int) -> torch.Tensor:
        return self.placement.borrow(address, rows, self.width, self.dtype)

    def _pack(self, tensor: torch.Tensor) -> int:
        self.saved.append(tensor)
        return len(self.saved) - 1

    def _unpack(self, index: int) -> torch.Tensor:
        return self.saved[index]

    def forward(self, chunk: int, expert: int, rows: int, x: Any, y: Any) -> None:
        data, target, key = self._borrow(x, rows), self._borrow(y, rows), (chunk, expert)
        if not self.record:
            with torch.no_grad():
                target.copy_(self.experts(expert, data))
            return
        if not self._again:
            with saved_tensors_hooks(self._pack, self._unpack):
                self._graphs[key], out = self._recorded(expert, data)
        elif self._is_backward:
            with self._rng_and_autocast[key].restored(), _saved_as_they_are():
                self._graphs[key], out = self._recorded(expert, data)
        else:
            before = RngAndAutocast(self.placement.device)
            with _saved_as_they_are():
                _, out = self._recorded(expert, data)
            self._rng_and_autocast[key] = before.unless_random()
        with torch.no_grad():
            target.copy_(out)

    def _recorded(self, expert: int, data: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Runs an expert. Returns (the two edges of its graph, the output)."""
        with torch.enable_grad():
            anchor = torch.zeros((), requires_grad=True, device="cpu")
            entry = _Entry.apply(anchor, data.clone())
            start = get_gradient_edge(entry)
            out = self.experts(expert, entry)
        return (get_gradient_edge(out), start) if out.requires_grad else None, out

    def begin_backward(self, wanted: list[list[bool]]) -> None:
        """Begins the backward. wanted: the parameters that require gradients; torch.autograd.grad refuses others."""
        self.error = None
        self._is_backward = True
        self._parameters = [[p for p, want in zip(*pair) if want] for pair in zip(self._given, wanted)]
        self._grads = [[None] * len(mine) for mine in self._parameters]

    def backward(self, chunk: int, expert: int, rows: int, x: Any, dy: Any, dx: Any) -> None:
        target = self._borrow(dx, rows)
        key = (chunk, expert)
        graph = self._graphs.pop(key) if self._again else self._graphs[key]
        if graph is None:
            target.zero_()
            return
        end, start = graph
        parameters = self._parameters[expert]
        # A copy, because a gradient may be a view of it and outlive this callback.
        grad_out = self._borrow(dy, rows).clone()
        with _hooks_silenced(parameters):
            grads = torch.autograd.grad(
                [end], [start, *parameters], grad_outputs=[grad_out], retain_graph=not self._again, allow_unused=True
            )
        if grads[0] is None:
            target.zero_()
        else:
            target.copy_(grads[0])
        sums = self._grads[expert]
        for index, grad in enumerate(grads[1:]):
            if grad is not None:
                before = sums[index]
                sums[index] = grad if before is None else _wide(before) + grad

    def take_grads(self) -> list[list[torch.Tensor]]:
        """Returns the gradients summed over chunks; zeros for parameters of experts without rows."""
        taken = [
            [torch.zeros_like(p) if grad is None else grad.to(p.dtype) for p, grad in zip(*pair)]
            for pair in zip(self._parameters, self._grads)
        ]
        self._grads = []
        self._parameters = []
        return taken


@functools.cache
def callbacks() -> Any:
    """Returns the forward and backward callbacks. They are made once, because the same addresses serve every layer."""
    ffi = load().ffi

    def guarded(user: Any, action: Callable[[ExpertRun], None]) -> int:
        run = ffi.from_handle(user)
        try:
            with run.placement.guard():
                action(run)
            return 0
        except BaseException as error:  # KeyboardInterrupt too: it must not pass through C
            run.error = error
            return 1

    @ffi.callback("int32_t(void *, int32_t, int32_t, int64_t, const void *, void *)")
    def forward(user: Any, chunk: int, expert: int, rows: int, x: Any, y: Any) -> int:
        return guarded(user, lambda run: run.forward(chunk, expert, rows, x, y))

    @ffi.callback("int32_t(void *, int32_t, int32_t, int64_t, const void *, const void *, void *)")
    def backward(user: Any, chunk: int, expert: int, rows: int, x: Any, dy: Any, dx: Any) -> int:
        return guarded(user, lambda run: run.backward(chunk, expert, rows, x, dy, dx))

    return forward, backward
