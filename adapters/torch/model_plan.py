# SPDX-License-Identifier: Apache-2.0
"""Implements `sluice.plan_model`: chooses which blocks of an eager model are recomputed in its backward, or offloaded
until then, so that activations stay within a budget of bytes at the least additional time.

A sample batch runs forward and backward with all blocks kept, with all recomputed, and with all offloaded. For each
option of a block this measures the bytes between forward and backward, and the bytes while the block runs; the planner
over layers (`sluice/stages.h`) chooses among the options. A block with a MoE layer of Sluice may be kept or recomputed
under each plan of that layer. Source: vPipe (TPDS 2022), with one stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ...errors import InvalidArgument, InvalidState, OverBudget, Unsupported
from ...option_values import ConfigError, number_of_bytes
from ...planning import stages
from ...planning.planner import size
from . import memory_meter
from .layer_plan import LayerPlan
from .model_blocks import Recomputed, find, is_recomputed
from .model_layers import MoeLayers
from .offloaded import Offloaded

_TIMED = 2  # passes; the fastest one counts
_MEASURED = ("forward_seconds", "backward_seconds", "held_bytes", "copied_bytes", "working_bytes", "arena_bytes")


@dataclass(frozen=True)
class BlockPlan:
    """Has a block's choice and its reason. held_bytes: from its forward to its backward; working_bytes: in addition,
    while it runs; copied_bytes: out and back in each pass; moe: the plan of its MoE layer, "": it has none of Sluice.
    """

    name: str
    policy: str
    reason: str
    held_bytes: int
    working_bytes: int
    forward_seconds: float
    moe: str = ""
    copied_bytes: int = 0


@dataclass(frozen=True)
class ModelPlan:
    """bytes: the planned peak of activations; keep_bytes, recompute_bytes: with all blocks kept, and with all
    recomputed; measured_bytes: in a pass of the sample batch under the plan. All include the bytes of Sluice's
    contexts, which MoE layers have. extra_seconds: predicted, of a pass over one that keeps all."""

    blocks: tuple[BlockPlan, ...]
    budget: int
    bytes: int
    measured_bytes: int
    keep_bytes: int
    recompute_bytes: int
    extra_seconds: float
    _recomputed: Recomputed = field(repr=False, compare=False)
    _moe: MoeLayers = field(repr=False, compare=False)
    _offloaded: Offloaded | None = field(default=None, repr=False, compare=False)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Returns the names of the blocks that run again."""
        return tuple(block.name for block in self.blocks if block.policy == stages.RECOMPUTE)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Returns the names of the blocks whose saved tensors are copied out."""
        return tuple(block.name for block in self.blocks if block.policy == stages.OFFLOAD)

    @property
    def copied_bytes(self) -> int:
        """Returns the bytes that each pass of such a batch copies out, and back."""
        return sum(block.copied_bytes for block in self.blocks)

    def offload_stats(self) -> dict[str, int]:
        """Returns bytes copied by this plan so far, and waits (sluice_swap_stats_t). Empty without offloading."""
        return {} if self._offloaded is None else self._offloaded.stats()

    def undo(self) -> None:
        """Restores every block."""
        if self._offloaded is not None:
            self._offloaded.undo()
        self._recomputed.undo()
        self._moe.undo()

    def __str__(self) -> str:
        width = max(len(block.name) for block in self.blocks)
        also = f", {len(self.offloaded)} are offloaded" if self._offloaded is not None else ""
        lines = [
            f"{len(self.recomputed)} of {len(self.blocks)} blocks are recomputed{also}: {size(self.measured_bytes)} of "
            f"activations, {size(self.bytes)} by the plan, of a budget of {size(self.budget)} "
            f"(all kept {size(self.keep_bytes)}, all recomputed {size(self.recompute_bytes)}); "
            f"{self.extra_seconds * 1e3:.3g} ms more a pass"
        ]
        for block in self.blocks:
            why = f"{block.moe}: {block.reason}" if block.moe else block.reason
            lines.append(f"  {block.name:<{width}}  {block.policy:<9}  {size(block.held_bytes):>10}  {why}")
        return "\n".join(lines)


def plan_model(
    model: nn.Module,
    budget: int | str,
    batch: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    blocks: Iterable[nn.Module] | None = None,
    offload: str | None = None,
) -> ModelPlan:
    """Chooses for each block whether its activations are kept, recomputed or offloaded, and applies the choice.

    budget   bytes, or text such as "2GiB": the most that a forward and backward of such a batch allocate in addition to
             parameters, gradients and what was there before
    batch    a tuple is the model's arguments, a dict its keyword arguments, anything else its one argument. It should
             be as large as the largest to come: activations grow with it
    loss     gives the loss of the model's output; without it the output's `loss`, or the output if it is a scalar
    blocks   modules of the model, each of which runs once in a forward; without it the layers that the host can
             checkpoint, else the longest ModuleList or Sequential of one class
    offload  "host", or a folder for a file: what a block saves may be copied there after its forward, and back before
             its backward, if the copies fit in between. Blocks with a MoE layer of Sluice are not offloaded

    The model computes the same bits as before. Measuring runs the batch a few times, and restores buffers, gradients
    and random states afterwards. The bytes count torch's allocator and Sluice's contexts, without memory of other
    libraries. Each MoE layer of Sluice gets a plan (MoeLayer.use_plan) with the block's policy. If experts are
    shared among ranks, the call is collective over all ranks of torch.distributed, which get the same plan.

    Threads: the caller's; no other may use the model meanwhile. Raises InvalidArgument (no blocks, no loss, an invalid
    budget), InvalidState (eval mode, blocks that are recomputed already, or run more or less than once), Unsupported (a
    device other than the CPU, hooks that step in backward), Busy (a profiler runs), External naming the path of a file
    that cannot be written, OverBudget naming the smallest budget: the model is then as it was.
    """
    limit = _budget(budget)
    _check(model)
    found = find(model, blocks)
    run = _runner(model, batch, loss)
    with _untouched(model):
        moe = _moe_layers(found, run)
        recomputed, offloaded = Recomputed(()), None
        try:
            measured = _measure(found, run, moe, offload)
            problem = moe.agreed(lambda: _problem(measured, moe, limit), _most_of)
            made = stages.plan(problem)
            if made.shortfall:
                raise OverBudget(
                    f"plan_model: with all {len(found)} blocks recomputed as far as it saves bytes, activations take "
                    f"{made.smallest_budget_bytes} bytes, {made.short_bytes} over the budget of {limit}: give at least "
                    f"{made.smallest_budget_bytes}, or a smaller batch"
                )
            chosen = list(zip(measured.names, made.choices))
            plans = {name: moe.plans[name][choice.option // 2] for name, choice in chosen if name in moe.plans}
            moe.use(plans)
            recomputed = Recomputed(found[name] for name, choice in chosen if choice.kind == stages.RECOMPUTE)
            away = [name for name, choice in chosen if choice.kind == stages.OFFLOAD]
            if offload is not None and away:
                offloaded = Offloaded({name: found[name] for name in measured.names}, away, offload)
            peak = moe.agreed(lambda: _checked(run, moe, made.stages[0]["bytes"], limit), max)
        except BaseException:
            if offloaded is not None:
                offloaded.undo()
            recomputed.undo()
            moe.undo()
            raise
    return ModelPlan(
        tuple(_block_plan(layer, choice, plans) for layer, choice in zip(problem.layers, made.choices[: len(found)])),
        limit,
        made.stages[0]["bytes"],
        peak,
        measured.peaks[stages.KEEP],
        measured.peaks[stages.RECOMPUTE],
        made.stages[0]["extra_seconds"],
        recomputed,
        moe,
        offloaded,
    )


def _checked(run: Callable[[], None], moe: MoeLayers, planned: int, limit: int) -> int:
    """Runs a pass under the plan and returns its peak bytes. Raises OverBudget if they are over the limit."""
    timeline, contexts = moe.peak(lambda: memory_meter.measure(run))
    peak = timeline.peak("start", "end") + contexts
    if peak > limit:
        raise OverBudget(
            f"plan_model: the plan of {planned} bytes took {peak} when it ran, over the budget of {limit}: give at "
            f"least {peak}, or name other blocks with blocks="
        )
    return int(peak)


def _most_of(said: Sequence[stages.Problem]) -> stages.Problem:
    """Merges the problems of several ranks, which have the same layers and options: the maximum of each number."""

    def options(layers: Sequence[stages.Layer]) -> tuple[stages.Option, ...]:
        return tuple(
            replace(same[0], **{name: max(getattr(option, name) for option in same) for name in _MEASURED})
            for same in zip(*(layer.options for layer in layers))
        )

    layers = zip(*(problem.layers for problem in said))
    most = tuple(replace(same[0], options=options(same)) for same in layers)
    return replace(said[0], layers=most, base_bytes=max(problem.base_bytes for problem in said))


def _block_plan(layer: stages.Layer, choice: stages.Choice, plans: dict[str, LayerPlan]) -> BlockPlan:
    option = layer.options[choice.option]
    policy = (layer.name, choice.kind, choice.reason)
    moe = str(plans[layer.name].choice) if layer.name in plans else ""
    seconds = layer.options[0].forward_seconds
    return BlockPlan(*policy, option.held_bytes, option.working_bytes, seconds, moe, option.copied_bytes)


# ---- the request ----


def _budget(budget: int | str) -> int:
    try:
        return number_of_bytes("budget", budget)
    except ConfigError:
        raise InvalidArgument(
            f'plan_model: budget is {budget!r}; it must be bytes above 0, or text such as "2GiB"'
        ) from None


def _check(model: nn.Module) -> None:
    if not model.training:
        raise InvalidState("plan_model: the model is in eval mode, which keeps nothing: call model.train() first")
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu":
            raise Unsupported(f"plan_model: {name} is on {parameter.device}; activations are measured on a CPU only")
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise Unsupported(
                f"plan_model: {name} has a hook that runs when its gradient is ready, and the measurement would run "
                "it: call plan_model before such hooks are registered"
            )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise InvalidArgument("plan_model: no parameter of the model needs a gradient")


def _runner(model: nn.Module, batch: Any, loss: Callable[[Any], torch.Tensor] | None) -> Callable[[], None]:
    """Returns a function that runs a forward and backward, with a mark of the meter between them."""
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})

    def run() -> None:
        with torch.enable_grad():
            value = _loss_of(model(*args, **kwargs), loss)
            memory_meter.mark("forward done")
            value.backward()

    return run


def _loss_of(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    if loss is not None:
        found = loss(output)
    elif isinstance(output, dict):
        found = output.get("loss")
    else:
        found = getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise InvalidArgument(
            f"plan_model: the loss is {what}; it must be one number with a gradient: give loss=, or labels in the batch"
        )
    return found


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Allocates gradients, so that a pass adds to them. Restores gradients, buffers and random states afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        for parameter, _ in gradients:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


# ---- measuring ----


@dataclass(frozen=True)
class _Held:
    """Has bytes of a part of the model. held: from forward to backward; extra: its peak above the bytes then."""

    held: int
    extra: int


@dataclass(frozen=True)
class _Measured:
    names: tuple[str, ...]
    blocks: dict[str, tuple[_Held, ...]]  # by policy
    before: _Held  # the first block, with everything kept
    after: _Held  # the last one: head and loss
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    peaks: dict[str, int]  # of a pass, by the policy of all blocks
    base: int  # bytes of contexts that no plan of a layer changes
    copied: tuple[int, ...]  # bytes of each block if it is offloaded; 0: it cannot be
    bytes_per_second: float  # of copies


class _Marks:
    """Sets marks where each block begins and ends, and when the gradient of its output is ready."""

    def __init__(self, blocks: dict[str, nn.Module], set_mark: Callable[[str], None]) -> None:
        self.order: list[str] = []
        self._set = set_mark
        self._handles = [
            handle
            for name, module in blocks.items()
            for handle in (
                module.register_forward_pre_hook(lambda *_, name=name: self._begin(name)),
                module.register_forward_hook(lambda _module, _inputs, output, name=name: self._end(name, output)),
            )
        ]

    def _begin(self, name: str) -> None:
        self.order.append(name)
        self._set(f"begin {name}")

    def _end(self, name: str, output: Any) -> None:
        tensors = output if isinstance(output, (tuple, list)) else [output]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._gradient(name))
                break
        self._set(f"end {name}")

    def _gradient(self, name: str) -> None:
        """Returns None, so that the gradient stays as it is."""
        self._set(f"gradient {name}")

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _moe_layers(blocks: dict[str, nn.Module], run: Callable[[], None]) -> MoeLayers:
    """Runs the model once, because memory that the first pass allocates and keeps does not count as activations."""
    for name, module in blocks.items():
        if is_recomputed(module):
            raise InvalidState(f"plan_model: {name} is recomputed already: switch that off, or undo the plan, first")
    now = [""]

    def note(mark: str) -> None:
        what, name = mark.split(" ", 1)
        if what in ("begin", "end"):
            now[0] = name if what == "begin" else ""

    marks = _Marks(blocks, note)
    try:
        return MoeLayers.found(run, lambda: now[0])
    finally:
        marks.remove()


def _measure(blocks: dict[str, nn.Module], run: Callable[[], None], moe: MoeLayers, offload: str | None) -> _Measured:
    order, seconds = moe.timed(lambda: _time(blocks, run), _TIMED)
    parts, peaks, contexts = {}, {}, {}
    copied, rate = (0,) * len(order), 0.0
    for policy in (stages.KEEP, stages.RECOMPUTE, *([] if offload is None else [stages.OFFLOAD])):
        recomputed = Recomputed(blocks.values() if policy == stages.RECOMPUTE else ())
        offloaded = None
        if offload is not None and policy == stages.OFFLOAD:
            plain = [name for name in order if name not in moe.plans]
            offloaded = Offloaded({name: blocks[name] for name in order}, plain, offload, at_once=True)
        marks = _Marks(blocks, memory_meter.mark)
        try:
            run()
            timeline, contexts[policy] = moe.peak(lambda: memory_meter.measure(run))
        finally:
            marks.remove()
            recomputed.undo()
            if offloaded is not None:
                offloaded.undo()
        if offloaded is not None:
            copied, copies = tuple(bytes_ // 2 for bytes_ in offloaded.out_bytes), offloaded.stats()
            rate = (copies["out_bytes"] + copies["in_bytes"]) / max(copies["copy_ns"] / 1e9, 1e-9)
        parts[policy] = _parts(order, timeline)
        peaks[policy] = timeline.peak("start", "end") + contexts[policy]
    forward, backward = zip(*seconds)
    before, *_, after = parts[stages.KEEP]
    inner = {policy: tuple(found[1:-1]) for policy, found in parts.items()}
    base = moe.base_bytes(contexts[stages.KEEP])
    return _Measured(tuple(order), inner, before, after, forward, backward, peaks, base, copied, rate)


def _time(blocks: dict[str, nn.Module], run: Callable[[], None]) -> tuple[list[str], list[tuple[float, float]]]:
    """Returns the blocks in the order in which they run, and seconds of each forward and backward."""
    order, best = _timed(blocks, run)
    for _ in range(_TIMED - 1):
        again = _timed(blocks, run)[1]
        best = [(min(a, c), min(b, d)) for (a, b), (c, d) in zip(best, again)]
    return order, best


def _timed(blocks: dict[str, nn.Module], run: Callable[[], None]) -> tuple[list[str], list[tuple[float, float]]]:
    """Times one pass. A block's backward ends when the gradient of the output of the block before it is ready."""
    when: dict[str, float] = {}
    marks = _Marks(blocks, lambda name: when.setdefault(name, time.perf_counter()))
    try:
        run()
    finally:
        marks.remove()
    when["end"] = time.perf_counter()
    for name in blocks:
        if marks.order.count(name) != 1:
            raise InvalidState(
                f"plan_model: block {name} ran {marks.order.count(name)} times in a forward; each has to run once: "
                "name others with blocks="
            )
    for name in marks.order:
        if f"gradient {name}" not in when:
            raise InvalidState(f"plan_model: no gradient reaches the output of block {name}: name others with blocks=")
    ends = ["end", *(f"gradient {name}" for name in marks.order)]
    seconds = [
        (when[f"end {name}"] - when[f"begin {name}"], max(when[end] - when[f"gradient {name}"], 0.0))
        for name, end in zip(marks.order, ends)
    ]
    return marks.order, seconds


def _parts(order: list[str], timeline: memory_meter.Timeline) -> list[_Held]:
    """Returns the part before the blocks, each block, and the part after them.

    A block ends where the next begins, so that work between them counts for the earlier one.
    """
    begins = ["start", *(f"begin {name}" for name in order), f"end {order[-1]}", "forward done"]
    gradients = ["end", *(f"gradient {name}" for name in order), "forward done"]
    found = []
    for i in range(len(begins) - 1):
        first, last = begins[i], begins[i + 1]
        there = timeline.live(last)
        extra = timeline.peak(first, last) - there
        # A part's backward lasts from the gradient of its output, or from the loss, to the gradient of the output
        # before it. The first block's includes the part before it.
        if i > 0:
            extra = max(extra, timeline.peak(gradients[i], gradients[i - 1]) - there)
        found.append(_Held(there - timeline.live(first), extra))
    return found


# ---- planning ----


def _problem(measured: _Measured, moe: MoeLayers, budget: int) -> stages.Problem:
    """Makes a problem of one stage, whose bytes are base + the sum of held + the largest working + the largest arena.

    A context holds the bytes for all of its layers at all times, and the bytes of a MoE layer that is recomputed while
    that layer runs. Both are the arena, so that the sum bounds torch's peak and the contexts' peak wherever each is.

    While a part runs, the parts after it hold nothing, but the sum counts them. The least that they hold is therefore
    subtracted from the part's working bytes: no plan takes more than its bytes, and one that recomputes all takes
    exactly those.
    """
    count = len(measured.names)
    least = [min(parts[i].held for parts in measured.blocks.values()) for i in range(count)] + [measured.after.held]
    after = [sum(max(held, 0) for held in least[i + 1 :]) for i in range(count + 1)]

    def option(policy: str, i: int, plan: LayerPlan | None, fastest: LayerPlan | None) -> stages.Option:
        part, runs_again = measured.blocks[policy][i], policy == stages.RECOMPUTE
        step = 0 if plan is None else plan.step_bytes
        slower = 0.0 if plan is None or fastest is None else (plan.time - fastest.time) * moe.seconds_per_time
        return stages.Option(
            policy,
            measured.forward_seconds[i],
            measured.backward_seconds[i] + max(slower, 0.0) + (measured.forward_seconds[i] if runs_again else 0.0),
            held_bytes=max(part.held, 0) + (0 if runs_again else step),
            copied_bytes=measured.copied[i] if policy == stages.OFFLOAD else 0,
            working_bytes=max(part.extra - after[i], 0),
            arena_bytes=0 if plan is None else plan.fixed_bytes + (step if runs_again else 0),
        )

    def options(name: str, i: int) -> Iterator[stages.Option]:
        """Yields keep and recompute under each plan; a block without plans may be offloaded too."""
        plans: Sequence[LayerPlan | None] = moe.plans.get(name, (None,))
        for plan in plans:
            yield from (option(policy, i, plan, plans[0]) for policy in (stages.KEEP, stages.RECOMPUTE))
        if measured.copied[i]:
            yield option(stages.OFFLOAD, i, None, None)

    layers = [stages.Layer(name, options=tuple(options(name, i))) for i, name in enumerate(measured.names)]
    head = stages.Option(
        stages.KEEP, held_bytes=max(measured.after.held, 0), working_bytes=max(measured.after.extra, 0)
    )
    first = max(measured.before.extra - sum(max(held, 0) for held in least), 0)
    embedding = stages.Option(stages.KEEP, held_bytes=max(measured.before.held, 0), working_bytes=first)
    layers += [stages.Layer("after", options=(head,)), stages.Layer("before", options=(embedding,))]
    return stages.Problem(
        tuple(layers),
        budget_bytes=(budget,),
        base_bytes=measured.base,
        copy_bytes_per_second=measured.bytes_per_second,
    )
