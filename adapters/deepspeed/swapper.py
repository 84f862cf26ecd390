# SPDX-License-Identifier: Apache-2.0
"""Swaps the MoE layers of a model, and swaps them back."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sluice import layer_lookup, version
from sluice.adapters.common import agree, shares
from sluice.adapters.common.contexts import OwnContext
from sluice.adapters.deepspeed.clip_norm import TRUE
from sluice.adapters.deepspeed.moe import kinds, moving, other_stage
from sluice.adapters.deepspeed.moe.finding import Finding
from sluice.adapters.deepspeed.moe.runners import Runners
from sluice.adapters.deepspeed.pipeline import moving_layers
from sluice.adapters.deepspeed.unsupported import UnsupportedError, policy_of_modules
from sluice.config import Options
from sluice.errors import InvalidState
from torch import nn

if TYPE_CHECKING:
    from sluice.adapters.deepspeed.moe.deciding import Decider
    from sluice.adapters.deepspeed.pipeline.takeover import Takeover


class Stage(NamedTuple):
    """The pipeline stage of a module: each stage swaps its own layers, and one of its ranks prints the banner."""

    number: int
    of: int
    speaks: bool

    @classmethod
    def of_engine(cls, engine: Any) -> Stage | None:
        """Returns the stage of an engine; None if the model is no pipeline."""
        if not getattr(engine, "pipeline_parallelism", False):
            return None
        grid = engine.module._grid
        first = grid.get_data_parallel_id() == 0 and grid.get_slice_parallel_rank() == 0
        return cls(grid.get_stage_id(), grid.get_pipe_parallel_world_size(), first)


class Handle:
    """The swapped layers of one model, and its batches. `unswap()` restores the model."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.layers: list[nn.Module] = []
        self.findings: list[Finding] = []
        self.refused: list[str] = []
        self.kept: list[str] = []  # why layers run without the policy that the options name
        self.optimizer: Callable[[], Any] = lambda: None  # returns the engine's, once it has one
        self.pipeline: Takeover | None = None  # runs the engine's batches
        self.decider: Decider | None = None  # decides the placement of experts
        self.engine: Callable[[], Any] = lambda: None  # returns the engine of a pipeline
        self.experts: Any = other_stage  # moves the MoE layers within layers, for pipeline/moving_layers.py
        self.backends: dict[shares.Place, OwnContext] = {}
        self.families: dict[shares.Place, list[Runners]] = {}  # the layers that share a backend

    def move_experts(
        self, layer: nn.Module, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any = None
    ) -> None:
        """Moves expert e of one of `layers` to slot expert_slot[e] of rank expert_rank[e], with its parameters,
        gradients and state of the optimizer (None: the engine's). Call it between steps; it is collective over the
        layer's group. Training continues with the same bits where the C library promises them. Checkpoints of the
        engine do not change."""
        if self.decider is not None:
            self.decider.cancel("experts are moved by hand")
        moving.move(layer, expert_rank, expert_slot, self.optimizer() if optimizer is None else optimizer)

    def move_layers(
        self,
        parts: Sequence[int],
        timeout: float | None = None,
        live: bool = False,
        bytes_per_second: int | None = None,
    ) -> list[tuple[int, int, int]]:
        """Moves layers, so that stage s of the engine's pipeline has layers parts[s] up to parts[s + 1], with their
        parameters, gradients, buffers and optimizer state. Call it between batches; it is collective over all ranks of
        the engine. Training continues with the same bits. Returns (layer, stage before, stage now) of each moved layer.

        timeout           seconds to wait for a rank that does not arrive
        live              move the layers while the next training batch runs; the new stages take effect after it. A
                          run of layers can cross each cut
        bytes_per_second  the limit of each rank during that batch; None: the speed of the link
        """
        engine = self.engine()
        if engine is None:
            raise InvalidState("layers move between the stages of a pipeline, but this model is not a pipeline")
        if live:
            if self.pipeline is None:
                raise InvalidState('layers move in a batch that Sluice runs: add "pipeline" to the "sluice" section')
            return [tuple(each) for each in self.pipeline.live.begin(engine, parts, timeout, bytes_per_second)]
        refused = self.pipeline.live.why_busy() if self.pipeline is not None else ""
        return [tuple(each) for each in moving_layers.move(engine, parts, timeout, refused).moves]

    def at_home(self, and_back: bool) -> AbstractContextManager[None]:
        """Moves all experts to the ranks where the host expects them; `and_back`: and afterwards back. Collective.
        Moves in transit by the option "placement" are cancelled."""
        if self.decider is not None:
            self.decider.cancel("all experts move home")
        return moving.at_home(self.layers, self.optimizer(), and_back)

    def unswap(self) -> None:
        """Restores the class of every layer and releases the engine. May be called again. InvalidState if experts have
        moved, as the host would use the wrong ones. Experts that the option "placement" has moved are moved back first,
        which is collective."""
        if self.decider is not None:
            self.decider.close()
            self.decider = None
            with self.at_home(False):
                pass
        swapped = [(layer, kind) for layer in self.layers if (kind := kinds.of_swapped(layer)) is not None]
        if any(moving.has_moved(layer) for layer, _ in swapped):
            raise InvalidState("experts have moved: move them home first (move_experts with contiguous lists)")
        for layer, kind in swapped:
            layer.__dict__.pop("_sluice", None)
            layer.__class__ = kind.host
        self.layers = []
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        for backend in self.backends.values():
            backend.close()
        self.backends = {}

    def stats(self) -> dict[str, Any]:
        """Returns `sluice.stats` of the swapped layers."""
        return layer_lookup.numbers_of([layer._sluice for layer in self.layers])

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.unswap()


def swap(module: nn.Module, options: Options | None = None, at_least: int = 0, stage: Stage | None = None) -> Handle:
    """Swaps each MoE layer of DeepSpeed below `module`. Collective over the ranks of each layer's group.

    Expert-parallel groups must exist (deepspeed.initialize makes those of an engine). UnsupportedError for the first
    layer that cannot be swapped, unless options say "warn": then the layer stays stock on all ranks of its group.
    On any error nothing stays swapped. `at_least`: fewer layers than this are an error too. `stage`: of a pipeline.
    """
    options = options or Options()
    handle = Handle(options)
    try:
        _swap(handle, module, options)
        if len(handle.layers) < at_least:
            raise UnsupportedError(
                f"SLUICE=require, but {len(handle.layers)} MoE layers run on Sluice: {type(module).__name__} holds no "
                "deepspeed.moe.layer.MoE and no AutoEP layer"
            )
        if handle.refused and options.clip_norm == TRUE:
            raise UnsupportedError(
                f'"clip_norm": "{TRUE}" needs all MoE layers on Sluice, which does not know the experts of the others: '
                f"{handle.refused[0]}"
            )
    except BaseException:
        handle.unswap()
        raise
    _banner(handle, options, stage)
    return handle


def _swap(handle: Handle, module: nn.Module, options: Options) -> None:
    found: list[tuple[nn.Module, Finding | str]] = []
    for name, layer, kind in kinds.host_layers(module):
        try:
            found.append((layer, kind.probe(layer, len(found), name)))
        except UnsupportedError as error:
            found.append((layer, error.message))
    groups = _by_group(found)
    for ranks, members in groups.items():
        _agree(ranks, members, options)
    findings = [finding for members in groups.values() for _, finding in members if not isinstance(finding, str)]
    sharing = None
    if options.memory_budget is not None:
        exchange = functools.partial(_exchange, options.timeout)
        sharing = shares.Sharing(options.memory_budget, shares.weights(findings), exchange)
    for ranks, members in groups.items():
        for layer, finding in members:
            if isinstance(finding, str):
                _refuse(handle, finding, options)
                continue
            kept = None if finding.form is not None else policy_of_modules(finding.name, options)
            if kept is not None:
                handle.kept.append(kept)
            where = (ranks, finding.device)
            if where not in handle.backends:
                own = shares.options_of(options, findings, where, functools.partial(_least, ranks, options.timeout))
                handle.backends[where] = OwnContext(ranks, own, finding.device)
                if own.shared_memory_budget is not None and sharing is not None:
                    sharing.add(where, handle.backends[where].context, handle.families.setdefault(where, []))
            family = handle.families.setdefault(where, [])
            kind = kinds.of_host(layer)
            layer._sluice = kind.state(finding, handle.backends[where], options, family, sharing)
            layer.__class__ = kind.swapped
            handle.layers.append(layer)
            handle.findings.append(finding)


def _refuse(handle: Handle, reason: str, options: Options) -> None:
    if options.on_unsupported == "error":
        raise UnsupportedError(
            f'{reason}. Write "on_unsupported": "warn" in the "sluice" section to leave such layers to DeepSpeed'
        )
    handle.refused.append(reason)


Member = list[Any]  # [layer, Finding or the reason why it cannot be swapped]


def _by_group(found: Sequence[tuple[nn.Module, Finding | str]]) -> dict[tuple[int, ...], list[Member]]:
    """Groups layers by the ranks of their group, in the order of the model, which is the same on all ranks."""
    groups: dict[tuple[int, ...], list[Member]] = {}
    for layer, finding in found:
        groups.setdefault(_ranks_of(layer), []).append([layer, finding])
    return groups


def _ranks_of(layer: Any) -> tuple[int, ...]:
    if layer.ep_size > 1 and layer.ep_group is not None:
        return tuple(torch.distributed.get_process_group_ranks(layer.ep_group))
    return (_rank(),)


def _agree(ranks: tuple[int, ...], members: list[Member], options: Options) -> None:
    """Checks that all ranks of a group swap the same layers in the same way; if one refuses, all refuse."""
    own = {
        "options": {**options.as_dict(), "version": version.__version__},
        "layers": [finding if isinstance(finding, str) else finding.compared() for _, finding in members],
    }
    answers = agree.exchange(ranks, _rank(), own, options.timeout)
    agree.require_equal('the "sluice" options differ', {rank: answer["options"] for rank, answer in answers.items()})
    numbers = {rank: {"number of MoE layers": len(answer["layers"])} for rank, answer in answers.items()}
    agree.require_equal("the models differ", numbers)
    for index, member in enumerate(members):
        views = {rank: answer["layers"][index] for rank, answer in answers.items()}
        refusals = {rank: view for rank, view in views.items() if isinstance(view, str)}
        if refusals:
            rank, reason = next(iter(refusals.items()))
            member[1] = reason if len(ranks) == 1 else f"{reason} (on rank {rank})"
        else:
            agree.require_equal("the models differ", views)


def _exchange(timeout: float | None, ranks: tuple[int, ...], own: Any) -> dict[int, Any]:
    return agree.exchange(ranks, _rank(), own, timeout)


def _least(ranks: tuple[int, ...], timeout: float | None, own: dict[str, int]) -> dict[str, int]:
    """Returns the minimum of each number over the ranks."""
    answers = agree.exchange(ranks, _rank(), own, timeout).values()
    return {name: min(answer[name] for answer in answers) for name in own}


def _rank() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if distributed else 0


def _say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)


def _banner(handle: Handle, options: Options, stage: Stage | None) -> None:
    """Prints the banner once per model, on rank 0 (in a pipeline once per stage, on its first rank), at any log level.

    Without a banner, nothing runs on Sluice.
    """
    if not (_rank() == 0 if stage is None else stage.speaks):
        return
    where = "" if stage is None else f"stage {stage.number} of {stage.of}: "
    total = len(handle.layers) + len(handle.refused)
    fused = sum(finding.form is not None for finding in handle.findings)
    sizes = sorted({len(finding.ranks) for finding in handle.findings})
    gemms = sorted({str(backend.stats().get("gemm") or "chosen at first use") for backend in handle.backends.values()})
    plan = options.plan_message()
    if handle.kept:
        policy = f"policy {options.policy_name()}"
        plan = plan.replace(policy, f"{policy} (none in {len(handle.kept)})")
    _say(
        f"[sluice {version.__version__}] {where}{len(handle.layers)} of {total} MoE layers run on Sluice: "
        f"{fused} fused in C, {len(handle.layers) - fused} with the host's experts | "
        f"ep_size {', '.join(map(str, sizes)) or '-'} | {plan} | GEMMs {', '.join(gemms) or '-'} | pid {os.getpid()}"
    )
    for finding in handle.findings:
        if finding.form is None:
            _say(f"[sluice] '{finding.name}' calls the host's experts: {finding.why_not_fused}")
    for reason in handle.kept:
        _say(f"[sluice] WARNING: policy none: {reason}")
    for reason in handle.refused:
        _say(f"[sluice] WARNING: stays with DeepSpeed: {reason}")
