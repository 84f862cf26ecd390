# SPDX-License-Identifier: Apache-2.0
"""Defines the state that a swapped layer of any kind adds to the host's attributes: the engine layers that run it.

It holds no module and no tensor of the host. Each forward reads both again, because ZeRO, offload and `.to()` move
storage and because a user may hook an expert after the swap.
"""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sluice.adapters.common.contexts import OwnContext
from sluice.adapters.common.migration import placement as placement_module
from sluice.adapters.common.migration.away import Guarded
from sluice.adapters.common.migration.moving import Expert, refuse_torn
from sluice.adapters.common.migration.placement import Placement
from sluice.adapters.common.modules import CallExpert, HostModules
from sluice.adapters.common.shares import Sharing
from sluice.adapters.deepspeed.moe import experts as experts_module
from sluice.adapters.deepspeed.moe import moving
from sluice.adapters.deepspeed.moe.finding import DTYPES, Finding, Form
from sluice.adapters.deepspeed.unsupported import UnsupportedError
from sluice.adapters.torch import CastingLayer, Context, MoeConfig, layer_options
from sluice.adapters.torch.layer_plan import LayerPlan, PlanChoice
from sluice.config import Options
from sluice.errors import InvalidState, Mismatch, OverBudget
from sluice.planning.stages_chosen import MoeChoice
from torch import nn

from deepspeed.comm import comm

_LOGGED = "all_to_all_single"  # Sluice's exchanges are logged as the host's own; an unknown name would end the process


class Key(NamedTuple):
    """The properties on which an engine layer depends."""

    dtype: torch.dtype  # of the rows
    untouched: bool  # whether the experts are as they were found
    lora_rank: int = 0


class EngineRunner:
    """One engine layer: of experts that C computes (form), or of the host's modules (None)."""

    def __init__(self, context: Context, form: Form | None, config: MoeConfig) -> None:
        self._form, self._modules = form, None
        if form is not None:
            self.layer = form.make_layer(context, config)
        else:
            self._modules = HostModules(config.num_experts // context.ep_group.world_size)
            self.layer = CastingLayer(context, config, self._modules)

    def run(
        self,
        tokens: torch.Tensor,  # [T, M]
        expert_ids: torch.Tensor,  # [T, K] i32, -1 = dropped, any strides
        route_weights: torch.Tensor,  # [T, K] f32, any strides
        experts: Any,  # the local ones as the form takes them, read in each call: their storage may have moved
        call_expert: CallExpert | None = None,  # given if there is no form
    ) -> torch.Tensor:
        """Returns the output [T, M] in the layer's dtype, with a backward. Collective."""
        if self._modules is None:
            assert self._form is not None
            lora = self._form.lora_of(experts, self.layer.dtype) if self.layer.config.lora_rank else None
            return self.layer(tokens, expert_ids, route_weights, self._form.parameters_of(experts), lora)
        self._modules.bind(experts, call_expert)
        try:
            return self.layer(tokens, expert_ids, route_weights)
        finally:
            self._modules.bind((), None)


class Swapped(Guarded):
    """A base of the classes of swapped layers, before the host's class. Copies and pickles of a swapped layer are
    layers of the host, so that a saved model loads without Sluice."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Uses the standard library's own function, so that a pickle has no name of Sluice. Handles of the library
        cannot be copied."""
        if moving.has_moved(self):
            raise InvalidState("a layer whose experts have moved cannot be copied: move them home first")
        values = {key: value for key, value in self.__dict__.items() if key != "_sluice"}
        return copyreg._reconstructor, (type(self).__bases__[1], object, None), values  # type: ignore[attr-defined]


class Runners:
    """The engine layers of one swapped layer, by their keys."""

    given_at_home = "engine"  # to sluice.experts_at_home, for errors

    def __init__(
        self,
        finding: Finding,
        backend: OwnContext,
        options: Options,
        family: list[Runners],
        sharing: Sharing | None = None,
    ) -> None:
        """Adds this layer to `family`, the layers that share the backend. `sharing`: given if the backend has a share
        of a budget."""
        family.append(self)
        self._sharing = sharing
        self.finding = finding
        self._family = family
        self._options = options
        self._has_told_container = False
        self.backend = backend
        self._runners: dict[Key, EngineRunner] = {}
        self._fused_now = finding.form is not None
        self.home = placement_module.contiguous(finding.num_experts, len(finding.ranks))
        self.placement = self.home
        self.torn = ""
        self.optimizer: Callable[[], Any] = lambda: None  # of the engine
        self.watch: Any = None  # set by the option "placement"
        self.choice: MoeChoice | None = None  # set by a plan of the pipeline

    # ---- the steps of a forward ----

    def runner_for(self, key: Key) -> EngineRunner:
        """Returns the engine layer for this key, made on first use. InvalidState if a move of experts has failed."""
        refuse_torn(self)
        if key not in self._runners:
            self._make(key)
            # A plan under a budget counts the existing layers, so that all of them are made with the first.
            for other in self._family:
                if not other._runners:
                    other._make(key)
        return self._runners[key]

    def why_no_plan(self) -> str:
        """Returns why the layer cannot use a plan of the pipeline; "": it can."""
        if self._options.memory_budget is None and self._options.host_memory_budget is None:
            return ""
        return f"MoE layer '{self.finding.name}' has a plan and its own memory_budget: remove the memory_budget"

    def use_plan(self, choice: MoeChoice) -> None:
        """Makes all engine layers run under the plan. Called between forwards."""
        self.choice = choice
        for runner in self._runners.values():
            self._put_in_force(runner)

    def check_container(self, container: nn.Module) -> None:
        """Refuses or warns if the container was hooked after the swap: it is not called, so that hooks would not
        run."""
        if experts_module.untouched(container):
            return
        text = (
            f"MoE layer '{self.finding.name}': the container of its experts got hooks or its own forward after the "
            "swap, but Sluice calls the experts without it: put the hooks on the layer or the experts"
        )
        if self._options.on_unsupported == "error":
            raise UnsupportedError(text)
        if not self._has_told_container:
            warnings.warn(f"sluice: {text}", stacklevel=2)
        self._has_told_container = True

    def check_width(self, tokens: torch.Tensor) -> None:
        """Refuses a width that the host would refuse later, or on the other ranks only."""
        if tokens.shape[1] != self.finding.model_width:
            raise ValueError(
                f"MoE layer '{self.finding.name}': the input has width {tokens.shape[1]}, "
                f"the layer {self.finding.model_width}"
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuses a dtype of the rows that the library does not compute with."""
        if dtype not in DTYPES:
            raise UnsupportedError(
                f"MoE layer '{self.finding.name}': {dtype}; float32, bfloat16 and float16 are supported"
            )

    def settle(self, tokens: torch.Tensor, dtype: torch.dtype) -> None:
        """Sets the backend's share of a budget, before the first rows."""
        if self._sharing is not None:
            self._sharing.settle(max(1, tokens.shape[0]), dtype)

    def run(
        self,
        runner: EngineRunner,
        tokens: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        experts: Any,
        call_expert: CallExpert | None = None,
    ) -> torch.Tensor:
        """Returns the weighted sum of experts' outputs [T, M]. Adds the adapter's information to errors. Collective."""
        try:
            return runner.run(tokens, expert_ids, weights, experts, call_expert)
        except Mismatch as error:
            raise self.explain(error) from error
        except OverBudget as error:
            if self._sharing is None:
                raise
            raise self._sharing.explain(error, tokens.shape[0]) from error

    def refuse(self, message: str) -> None:
        """Tells the other ranks, through any engine layer, that this rank does not take part."""
        if self._sharing is not None:
            self._sharing.fail(message)
        if not self._runners:  # in the first call: the layer as it was swapped, on which all ranks agreed
            self._make(self._key_as_found(self.finding.dtype))
        self.engine_layers()[0].refuse(RuntimeError(message))

    def explain(self, error: Mismatch) -> Mismatch:
        """Returns the error that ranks differ. A kind of layers may add the reason."""
        return error

    # ---- between steps ----

    def move(self, layer: Any, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any = None) -> None:
        """Moves experts as `sluice.move_experts`; optimizer None: the engine's."""
        if self.watch is not None:
            self.watch.cancel("experts are moved by hand")
        moving.move(layer, expert_rank, expert_slot, self.optimizer() if optimizer is None else optimizer)

    @property
    def moving_name(self) -> str:
        """See migration.moving.MovingLayer."""
        return f"MoE layer '{self.finding.name}'"

    @property
    def moving_ranks(self) -> tuple[int, ...]:
        """See migration.moving.MovingLayer."""
        return self.finding.ranks

    @property
    def moving_wait_s(self) -> float | None:
        """See migration.moving.MovingLayer."""
        return self._options.timeout

    def slots(self, container: Any) -> list[Expert]:
        """Returns the tensors of each expert of this rank in the layer's container."""
        raise NotImplementedError

    def decisions(self) -> str:
        """Returns the tuner's decisions for the layers of the backend, as JSON."""
        return self.backend.context.decisions_json()

    def take_decisions(self, text: str) -> None:
        """Imports decisions that the backend does not have. Called on all ranks of the group with the same text."""
        self.backend.context.learn(text)

    def close(self) -> None:
        """Releases the engine layers and resets the placement, so that remaining references see no expert away."""
        for layer in self.engine_layers():
            layer.close()
        self._runners, self.placement = {}, self.home

    def replace_experts(self, placement: Placement) -> None:
        """Gives the placement to the engine layers; the caller moves contents. Collective over the group."""
        self.placement = placement_module.replace_in_all(self.engine_layers(), self.placement, placement)

    def loads(self) -> tuple[list[int], list[int]]:
        """Returns rows so far: of this rank's tokens by expert; and received by each rank, equal on all ranks."""
        counted = [layer.loads() for layer in self.engine_layers()]
        zeros = [0] * self.finding.num_experts, [0] * len(self.finding.ranks)
        by_expert, by_rank = ([sum(items) for items in zip(*lists)] for lists in zip(zeros, *counted))
        return by_expert, by_rank

    def spent(self) -> tuple[int, int, int]:
        """Returns totals of the backend's layers: nanoseconds inside passes, bytes sent, nanoseconds of exchanges."""
        return int(self.backend.stats().get("pass_ns", 0)), *self.communication()

    # ---- for shares of a budget ----

    def prepare(self, dtype: torch.dtype) -> None:
        """See shares.Member."""
        if not self._runners:
            self._make(self._key_as_found(dtype))

    def engine_layers(self) -> list[Any]:
        """See shares.Member."""
        return [runner.layer for runner in self._runners.values()]

    # ---- for the host's logger and `sluice.stats` ----

    @property
    def layer_id(self) -> int:
        """Returns the layer's number, for `sluice.trace`."""
        return self.finding.layer_id

    def contexts(self) -> list[Any]:
        """Returns the torch adapter's contexts, for `sluice.decisions`."""
        return [self.backend.context]

    @staticmethod
    def measures(layer: nn.Module) -> bool:
        """Returns whether the host's logger records this layer's communication, by the host's own rule."""
        logger = comm.comms_logger
        return bool(logger.enabled and (logger.prof_all or _LOGGED in logger.prof_ops))

    def communication(self) -> tuple[int, int]:
        """Returns (bytes sent, nanoseconds of the communication lane) so far."""
        now = self.backend.stats()
        return int(now["bytes_sent"]), int(now["comm_ns"])

    def since(self, before: tuple[int, int]) -> tuple[int, int]:
        """Returns the numbers of `communication` since `before`."""
        sent, nanoseconds = self.communication()
        return sent - before[0], nanoseconds - before[1]

    def record(self, layer: Any, output: torch.Tensor, before: tuple[int, int]) -> None:
        """Logs the bytes that this forward has sent since `before`, and its backward's bytes after the backward."""
        if len(self.finding.ranks) == 1 or not Runners.measures(layer):
            return
        _log("sluice_forward", *self.since(before))
        if output.grad_fn is not None:
            # Prehook and posthook of the one node that is this layer's backward.
            start: list[tuple[int, int]] = []
            output.grad_fn.register_prehook(lambda _grads: start.append(self.communication()))

            output.grad_fn.register_hook(lambda *_: _log("sluice_backward", *self.since(start.pop())))

    def stats(self) -> dict[str, Any]:
        """Returns the layer's numbers for `sluice.stats`."""
        found = self.finding
        return {
            "layer": found.name,
            "layer_id": found.layer_id,
            "computed_by": "sluice" if self._fused_now else "host modules",
            "why_not_fused": found.why_not_fused,
            **({} if self.choice is None else {"plan": self.choice._asdict()}),
            **({} if self.watch is None else {"placement": self.watch.report()}),
        }

    # ---- inside ----

    def _key_as_found(self, dtype: torch.dtype) -> Key:
        return Key(dtype, True, getattr(self.finding.form, "lora_rank", 0))

    def _make(self, key: Key) -> None:
        dtype, untouched, lora_rank = key
        found = self.finding
        form = found.form if untouched else None
        config = MoeConfig(
            model_width=found.model_width,
            num_experts=found.num_experts,
            top_k=found.top_k,
            hidden_width=found.form.hidden_width if found.form else 1,  # equal on all ranks, also on those without form
            dtype=dtype,
            layer_id=found.layer_id,
            expert_rank=self.placement.expert_rank,
            expert_slot=self.placement.expert_slot,
            lora_rank=lora_rank,
            # A hooked module sees its rows in one call, unless the options give a number of chunks.
            **layer_options(self._options, form is not None, 0 if untouched else 1),
        )
        self._runners[key] = EngineRunner(self.backend.context, form, config)
        self._put_in_force(self._runners[key])

    def _put_in_force(self, runner: EngineRunner) -> None:
        if self.choice is not None:
            plan = LayerPlan(runner.layer, self.choice.tokens, PlanChoice.of_words(*self.choice[:4]))
            runner.layer.use_plan(plan)

    def _autocast(self) -> bool:
        return torch.is_autocast_enabled(self.finding.device.type)


def _log(name: str, num_bytes: int, nanoseconds: int) -> None:
    """Appends bytes and time to the host's logger, which divides by the time in milliseconds."""
    comm.comms_logger.append(_LOGGED, name, max(nanoseconds, 1) / 1e6, num_bytes)
