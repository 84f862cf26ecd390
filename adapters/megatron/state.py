# SPDX-License-Identifier: Apache-2.0
"""Defines the state of a MoE layer on Sluice in addition to the host's attributes: the engine layers that run it.

The state has no module and no parameter of the host. Each forward reads both again, because the distributed optimizer
and `.to()` move storage and because a user may hook an expert.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sluice import settings, version
from sluice.adapters.common import agree
from sluice.adapters.common.contexts import context_of, group_of
from sluice.adapters.common.migration import placement as placement_module
from sluice.adapters.common.migration.moving import refuse_torn
from sluice.adapters.common.migration.placement import Placement, replace_in_all
from sluice.adapters.megatron import experts as experts_module
from sluice.adapters.megatron import hooks, in_flight, moving, offload, routes
from sluice.adapters.megatron.probe import DTYPES, Finding, probe
from sluice.adapters.torch import Context, MoeConfig, MoeLayer, layer_options, refused_policy
from sluice.adapters.torch.layer_plan import LayerPlan, PlanChoice
from sluice.config import Options
from sluice.errors import InvalidArgument, Unsupported
from sluice.options import SPEC
from sluice.planning import moe_layers
from sluice.planning.stages_chosen import MoeChoice

# Numbers all layers of this process in the order of their construction, which is the same on all ranks of a group.
_numbers = itertools.count()
_making = threading.RLock()
_announced: set[str] = set()


def take_over(layer: Any, section: Any, plan: Sequence[MoeChoice] = ()) -> LayerState | None:
    """Returns the state that runs a newly built layer of the host; None: the host runs it. Collective over its group.

    section  of the layer's spec
    plan     of all MoE layers of the model, in order; empty: there is none
    """
    options = settings.effective(section, origin=SPEC)
    number = next(_numbers)
    if options is None:
        _say("off (SLUICE=0 or enabled=False): Megatron's own dispatcher and experts run")
        return None
    finding: Finding | str
    try:
        finding = probe(layer)
        _check_plan(plan, layer.config, options)
        reason = _policy_of_modules(finding, options)
    except Unsupported as error:
        finding, reason = error.message, None
    refusal = _agree(layer, finding, options, plan)
    if refusal is not None:
        if options.on_unsupported == "error":
            raise Unsupported(
                f'MoE layer: {refusal}. Write "on_unsupported": "warn" in the options to leave such layers to Megatron'
            )
        _say(f"WARNING: a MoE layer stays with Megatron: {refusal}")
        return None
    assert isinstance(finding, Finding)
    state = LayerState(number, finding, options, layer.config, plan)
    if options.optimizer:
        offload.install()
    _announce(finding, options, reason)
    return state


def _has_experts(config: Any) -> list[int]:
    """Returns 1 for each transformer layer of the whole model that has experts, 0 for others."""
    return moe_layers.by_stage({"moe_layer_freq": config.moe_layer_freq}, config.num_layers, config.num_layers)


def _check_plan(plan: Sequence[MoeChoice], config: Any, options: Options) -> None:
    count = sum(_has_experts(config)) if plan else 0
    if len(plan) != count:
        raise Unsupported(f"the plan has {len(plan)} MoE layers, and the model {count}: plan this model")
    if plan and (options.memory_budget is not None or options.host_memory_budget is not None):
        raise Unsupported("plan and memory_budget are both given: the plan has the layers' bytes; leave the budget out")


def _agree(layer: Any, finding: Finding | str, options: Options, plan: Sequence[MoeChoice]) -> str | None:
    """Returns the reason why the layer is refused; None: all ranks take it over in the same way. One rank's refusal
    counts for all."""
    ranks = tuple(torch.distributed.get_process_group_ranks(layer.ep_group))
    own = {
        "options": {
            **options.as_dict(),
            "version": version.__version__,
            **({"plan": [[*each] for each in plan]} if plan else {}),
        },
        "layer": finding if isinstance(finding, str) else finding.compared(),
    }
    answers = agree.exchange(ranks, torch.distributed.get_rank(), own, options.timeout)
    agree.require_equal("Sluice's options differ", {rank: answer["options"] for rank, answer in answers.items()})
    layers = {rank: answer["layer"] for rank, answer in answers.items()}
    refusals = {rank: found for rank, found in layers.items() if isinstance(found, str)}
    if refusals:
        rank, reason = next(iter(refusals.items()))
        return reason if len(ranks) == 1 else f"{reason} (on rank {rank})"
    agree.require_equal("the models differ", layers)
    return None


def _policy_of_modules(finding: Finding, options: Options) -> str | None:
    """Returns why experts that run as modules cannot follow the policy; an error unless on_unsupported is "warn"."""
    reason = None if finding.form.fused else refused_policy(options)
    if reason is not None and options.on_unsupported == "error":
        raise Unsupported(reason)
    return reason


class LayerState:
    """Runs one MoE layer of the host."""

    def __init__(self, number: int, finding: Finding, options: Options, config: Any, plan: Sequence[MoeChoice]) -> None:
        """Makes the state. Collective over the ranks of the layer's group."""
        self.layer_id = number
        self.finding = finding
        self.shape: torch.Size = torch.Size()  # of the hidden states of the current forward
        self._options = options
        self._group = group_of(finding.ranks, options)
        with _making:
            layers, forwards = in_flight.of_config(config) if options.memory_budget else (None, None)
            self._context = context_of(options, self._group, layers, finding.device, forwards)
        self._adds_itself = bool(config.gradient_accumulation_fusion)
        self._layers: dict[tuple[torch.dtype, bool], MoeLayer] = {}
        self._plan = plan
        self._choice: MoeChoice | None = None  # by the layer's number, which the host sets after it has built the layer
        self.home = placement_module.contiguous(finding.num_experts, len(finding.ranks))
        self.placement = self.home
        self.torn = ""
        self._ids: torch.Tensor | None = None
        self._is_fused_now = finding.form.fused
        self._told: set[str] = set()  # reasons why experts run as modules that warnings have given
        self._has_told_policy = finding.form.fused is False  # the banner has printed it

    # ---- the steps of a forward, called by layer.py ----

    @contextmanager
    def told(self) -> Iterator[None]:
        """Notifies the other ranks of an error inside, as they would wait for this rank in the next collective call."""
        try:
            yield
        except Exception as error:
            self.refuse(error)
            raise

    def routed(self, layer: Any, hidden: torch.Tensor, probs: torch.Tensor, chosen: torch.Tensor) -> Any:
        """Returns (tokens [T, M], route weights [T, K]) of hidden states [S, B, M] and the router's result."""
        config = layer.config
        self.shape = hidden.shape
        if self._plan and self._choice is None:
            self._choice = self._plan[sum(_has_experts(config)[: layer.layer_number]) - 1]
        tokens = hidden.reshape(-1, hidden.shape[-1])
        padded = bool(config.moe_pad_expert_input_to_capacity)
        found = routes.of_map(probs, chosen, self.finding.top_k, padded)
        self._ids, weights = found.expert_ids, found.weights
        if config.moe_apply_probs_on_input:  # K is 1
            tokens = (weights * tokens).to(tokens.dtype)
            weights = (found.expert_ids >= 0).float()
        return tokens, weights

    def run(self, experts: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of the experts' outputs [T, M]. Collective."""
        ids = self._ids
        with self.told():
            layer, dtype = self._layer_for(experts, tokens)
            rows = tokens if tokens.dtype == dtype else tokens.to(dtype)
        if layer.experts is None:
            out = layer(rows, ids, weights, experts_module.parameters_of(experts, self.finding.form))
        else:
            modules = list(experts.local_experts)
            layer.experts.bind(modules, lambda index, given: experts_module.call(modules[index], given))
            try:
                out = layer(rows, ids, weights)
            finally:
                layer.experts.bind((), None)
        return out if out.dtype == tokens.dtype else out.to(tokens.dtype)

    def refuse(self, error: Exception) -> None:
        """Notifies the other ranks, through any engine layer, that this rank does not take part."""
        if self._group.world_size == 1:
            return
        layer = next(iter(self._layers.values()), None) or self._make((self.finding.dtype, True))
        layer.refuse(error)

    # ---- experts that change ranks (moving.py) ----

    def move(self, layer: Any, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any = None) -> None:
        """Implements `sluice.move_experts`."""
        moving.move(layer, expert_rank, expert_slot, optimizer)

    @property
    def moving_name(self) -> str:
        """See migration.moving.MovingLayer."""
        return f"MoE layer {self.layer_id}"

    @property
    def moving_ranks(self) -> tuple[int, ...]:
        """See migration.moving.MovingLayer."""
        return self.finding.ranks

    @property
    def moving_wait_s(self) -> float | None:
        """See migration.moving.MovingLayer."""
        return self._options.timeout

    def replace_experts(self, placement: Placement) -> None:
        """See migration.moving.MovingLayer."""
        self.placement = replace_in_all(list(self._layers.values()), self.placement, placement)

    # ---- inside ----

    def _layer_for(self, experts: Any, tokens: torch.Tensor) -> tuple[MoeLayer, torch.dtype]:
        """Returns the engine layer for this call, and the dtype in which it computes."""
        refuse_torn(self)
        modules = list(experts.modules())
        hooks.replay(modules)
        if not hooks.untouched([experts]):
            raise Unsupported(
                f"the {type(experts).__name__} of its experts got hooks or its own forward, but the experts are "
                "called without it: put the hooks on the MoE layer or on the experts"
            )
        untouched = hooks.untouched(modules)
        if untouched and self.finding.form.fused and not self.finding.form.stacked:
            why = experts_module.why_not_plain(experts.local_experts)  # a linear was replaced after the model was built
            untouched = not why
            self._tell_modules(why)
        self._is_fused_now = self.finding.form.fused and untouched
        if not untouched:
            self._check_policy()
        dtype = self._dtype(experts, tokens)
        key = (dtype, self._is_fused_now)
        made = self._layers.get(key) or self._make(key)
        if self._choice is not None and made.plan is None:
            made.use_plan(LayerPlan(made, self._choice.tokens, PlanChoice.of_words(*self._choice[:4])))
        return made, dtype

    def _make(self, key: tuple[torch.dtype, bool]) -> MoeLayer:
        dtype, fused = key
        fused = fused and self.finding.form.fused
        config = MoeConfig(
            model_width=self.finding.form.model_width,
            num_experts=self.finding.num_experts,
            top_k=self.finding.top_k,
            dtype=dtype,
            layer_id=self.layer_id,
            expert_rank=self.placement.expert_rank,
            expert_slot=self.placement.expert_slot,
            # A hooked module sees its rows in one call, unless the options give a number of chunks.
            **layer_options(self._options, fused, 1 if self.finding.form.fused and not fused else 0),
        )
        made = experts_module.make_layer(self._context, self.finding.form, fused, self._adds_itself, config)
        self._layers[key] = made
        return made

    def _tell_modules(self, why: str) -> None:
        """Warns once for each reason; "": there is none."""
        if why and why not in self._told:
            self._told.add(why)
            warnings.warn(f"sluice: MoE layer {self.layer_id}: its experts run as modules now: {why}", stacklevel=2)

    def _check_policy(self) -> None:
        """Refuses or warns if the policy does not suit experts that were hooked later and now run as modules."""
        reason = refused_policy(self._options)
        if reason is None or self._has_told_policy:
            return
        if self._options.on_unsupported == "error":
            raise Unsupported(f"the experts were hooked or replaced: {reason}")
        self._has_told_policy = True
        warnings.warn(f"sluice: {reason}; here they are kept", stacklevel=2)

    def _dtype(self, experts: Any, tokens: torch.Tensor) -> torch.dtype:
        """Returns the current dtype of the experts' weights, or autocast's."""
        own = next(experts.parameters()).dtype
        if torch.is_autocast_enabled(self.finding.device.type) and self._is_fused_now:
            own = torch.get_autocast_dtype(self.finding.device.type)
        elif tokens.dtype != own:
            raise InvalidArgument(
                f"MoE layer: the hidden states are {tokens.dtype}, the experts are {own}: cast one, or use autocast"
            )
        if own not in DTYPES:
            raise Unsupported(f"MoE layer: {own}; float32, bfloat16 and float16 are supported")
        return own

    # ---- for `sluice.stats`, `sluice.decisions` and `sluice.trace` ----

    def stats(self) -> dict[str, Any]:
        """Returns the layer's numbers for `sluice.stats`."""
        return {
            "layer_id": self.layer_id,
            "computed_by": "sluice" if self._is_fused_now else "host modules",
            "why_not_fused": self.finding.form.why,
        }

    def contexts(self) -> list[Context]:
        """Returns the context, which it shares with the other layers of its ranks."""
        return [self._context]


def _announce(finding: Finding, options: Options, kept: str | None) -> None:
    form = finding.form
    if form.fused:
        assert form.unit is not None
        how = f"fused in C: {'gated ' if form.gated else ''}{form.unit.activation}"
    else:
        how = f"with the host's experts: {form.why}"
    policy = "" if kept is None else f" | policy none: {kept}"
    _say(f"MoE layers run on Sluice, {how} | ep_size {len(finding.ranks)} | {options.plan_message()}{policy}")


def _say(text: str) -> None:
    """Prints each text once per process, on rank 0. Without such a line Sluice does not run."""
    from megatron.core import __version__

    if text in _announced or torch.distributed.get_rank() != 0:
        return
    _announced.add(text)
    print(f"[sluice {version.__version__}] Megatron-Core {__version__}: {text} | pid {os.getpid()}", flush=True)
