# SPDX-License-Identifier: Apache-2.0
"""Computes the norm by which DeepSpeed clips f32 gradients without ZeRO, independent of where experts and layers are.

Stock computes the norm of each rank's gradients, and the mean of the norms over ranks. So the value depends on which
experts share a rank, and on the layers of a pipeline stage. By default each rank contributes here the experts and
layers of its initial placement, in order: stock's own function adds stock's own numbers. With the option "clip_norm",
the norm is that of all gradients, each expert once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sluice.adapters.common.migration.moving import has_moved
from sluice.adapters.common.optimizer_state import Piece
from sluice.adapters.deepspeed.pipeline import moving_layers, stage_module

from deepspeed.runtime import utils

TRUE = "true"
_NONE = -1.0  # no gradient
Norms = dict[tuple[str, int], torch.Tensor]  # by name of a piece and expert, if it has a gradient


class _Gradient:
    """Replaces a gradient in stock's function: it has a known norm, and scales the local gradient if there is one."""

    def __init__(self, norm: torch.Tensor, here: torch.Tensor | None) -> None:
        self._norm, self._here = norm, here

    @property
    def data(self) -> _Gradient:
        return self

    def detach(self) -> _Gradient:
        return self

    def float(self) -> _Gradient:
        return self

    def norm(self, norm_type: float) -> torch.Tensor:
        assert norm_type == 2.0
        return self._norm

    def mul_(self, factor: torch.Tensor) -> None:
        if self._here is not None:
            self._here.mul_(factor)


class _Parameter:
    """Replaces an expert's parameter in stock's function."""

    def __init__(self, parameter: torch.Tensor, norm: torch.Tensor, here: torch.Tensor | None) -> None:
        self.parameter = parameter
        self.grad = _Gradient(norm, here)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parameter, name)


def clip(engine: Any, original: Callable[[], None]) -> None:
    """Replaces DeepSpeedEngine.clip_fp32_gradients. Collective over the ranks of each layer's group, and over the
    stages of a pipeline whose layers have moved."""
    handle = engine.sluice
    is_true = handle.options.clip_norm == TRUE
    home = moving_layers.home_of(engine)
    if not is_true and home is None and not any(has_moved(layer._sluice) for layer in handle.layers):
        original()
        return
    norms = [_norms_of(layer) for layer in handle.layers]
    here = list(_all(engine, norms) if is_true else _at_home(engine, norms))
    parameters = here if home is None else list(_of_stage(engine.module, here, home))
    total = utils.clip_grad_norm_(parameters=parameters, max_norm=engine.gradient_clipping(), mpu=engine.mpu)
    most = torch.tensor([float(engine.gradient_clipping())], device=total.device)
    factor = torch.min(torch.ones_like(most), most / (total + 1e-6))  # stock's operations, which give stock's bits
    answered = {id(_own(p)) for p in parameters}
    for parameter in engine.module.parameters():
        # A parameter of a moved layer, or an expert in the slot of an expert without a gradient.
        if parameter.grad is not None and id(parameter) not in answered:
            parameter.grad.mul_(factor)


def _own(parameter: Any) -> torch.Tensor:
    return parameter.parameter if isinstance(parameter, _Parameter) else parameter


def _of_stage(module: Any, here: list[Any], home: Sequence[int]) -> Iterator[Any]:
    """Yields the parameters that this stage contributes in the initial placement `home`. Layers on other stages are
    represented by their norms. Collective over the stages of this replica. here: the stage's own contributions."""
    layer_of = {
        id(p): layer
        for layer in stage_module.layers_of(module)
        if not stage_module.is_tied(module, layer)  # tied layers never move, and come first
        for p in stage_module.parameters_of(module, layer)
    }
    own: dict[int | None, list[Any]] = {}
    for parameter in here:
        if parameter.grad is not None:
            own.setdefault(layer_of.get(id(_own(parameter))), []).append(parameter)
    mine = range(home[module.stage_id], home[module.stage_id + 1])
    norms = {
        layer: [
            (float(p.grad.data.detach().float().norm(2.0)), utils.is_model_parallel_parameter(p)) for p in parameters
        ]
        for layer, parameters in own.items()
        if layer is not None and layer not in mine
    }
    said: list[Any] = [None] * module.num_stages
    dist.all_gather_object(said, norms, group=module._grid.get_pipe_parallel_group())
    device = next(module.parameters()).device
    elsewhere = {layer: values for each in said for layer, values in each.items()}
    yield from own.get(None, [])
    for layer in mine:
        yield from own.get(layer, [])
        for norm, is_cut in elsewhere.get(layer, []):
            there = torch.empty(0, device=device)
            there.model_parallel = is_cut  # type: ignore[attr-defined]
            yield _Parameter(there, torch.tensor(norm, device=device), None)


def _norms_of(layer: Any) -> Norms:
    """Returns the norm, computed as by stock, of every piece of every expert of a layer. Collective over its group."""
    state = layer._sluice
    slots = state.slots(layer.experts)
    own = torch.stack([torch.stack([_norm_of(piece) for piece in slot.pieces.values()]) for slot in slots])
    of_ranks = [own]
    if len(state.finding.ranks) > 1:
        of_ranks = [torch.empty_like(own) for _ in state.finding.ranks]
        dist.all_gather(of_ranks, own, group=layer.ep_group)
    are_there = torch.stack(of_ranks).ge(0).tolist()
    return {
        (name, e): of_ranks[rank][slot, index]
        for e, (rank, slot) in enumerate(zip(*state.placement))
        for index, name in enumerate(slots[0].pieces)
        if are_there[rank][slot][index]
    }


def _norm_of(piece: Piece) -> torch.Tensor:
    gradient = piece.parameter.grad
    if gradient is None:
        return torch.tensor(_NONE, device=piece.parameter.device)
    return piece.of(gradient.data).detach().float().norm(2.0)


def _at_home(engine: Any, norms: list[Norms]) -> Iterator[Any]:
    """Yields the model's parameters in order; those of an expert have the norms of the slot's initial expert."""
    known: dict[int, list[torch.Tensor]] = {}
    for layer, found in zip(engine.sluice.layers, norms):
        state = layer._sluice
        own = state.finding.ranks.index(dist.get_rank()) if len(state.finding.ranks) > 1 else 0
        for e, slot in zip(state.home.experts_of(own), state.slots(layer.experts)):
            for name, piece in slot.pieces.items():
                norms_of = known.setdefault(id(piece.parameter), [])
                norms_of.extend([found[name, e]] if (name, e) in found else [])
    for parameter in engine.module.parameters():
        found = known.get(id(parameter))
        if found is None:
            yield parameter
        elif found:
            # For a parameter of several experts the last bits may differ, since the order of the sum differs.
            norm = found[0] if len(found) == 1 else torch.stack(found).norm(2.0)
            yield _Parameter(parameter, norm, parameter.grad)


def _all(engine: Any, norms: list[Norms]) -> Iterator[Any]:
    """Yields all parameters outside of experts, then those of all experts, in the same order on all ranks."""
    of_experts = {id(p) for layer in engine.sluice.layers for p in layer.experts.parameters()}
    yield from (parameter for parameter in engine.module.parameters() if id(parameter) not in of_experts)
    for layer, found in zip(engine.sluice.layers, norms):
        slots, state = layer._sluice.slots(layer.experts), layer._sluice
        own = state.finding.ranks.index(dist.get_rank()) if len(state.finding.ranks) > 1 else 0
        for (name, e), norm in found.items():
            rank, slot = state.placement.place(e)
            piece = slots[slot].pieces[name]
            gradient = piece.parameter.grad
            here = piece.of(gradient) if rank == own and gradient is not None else None
            yield _Parameter(piece.parameter, norm, here)
