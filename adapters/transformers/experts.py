# SPDX-License-Identifier: Apache-2.0
"""Implements `experts_implementation="sluice"`: passes the tensors of an experts module to the library and back."""

from __future__ import annotations

import copy
import functools
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sluice import settings, version
from sluice.adapters.common.contexts import context_of
from sluice.adapters.common.migration import placement as placement_module
from sluice.adapters.common.migration.moving import refuse_torn
from sluice.adapters.common.migration.placement import Placement
from sluice.adapters.common.migration.rounds import ExpertMigration
from sluice.adapters.torch import (
    CastingLayer,
    Context,
    EpGroup,
    Lora,
    MoeConfig,
    MoeLayer,
    StackedLayer,
    layer_options,
    refused_policy,
    watcher,
)
from sluice.adapters.transformers import NAME, low_rank, moving, precision
from sluice.adapters.transformers import contract as contracts
from sluice.adapters.transformers.host_experts import HostExperts, StockExperts
from sluice.adapters.transformers.packed_stack import PackedStack, flat, form_of, is_packed
from sluice.config import Options
from sluice.errors import InvalidArgument, Unsupported


def forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
    """Implements hook.sluice_experts_forward."""
    if torch.compiler.is_compiling():
        return outside_the_graph(_forward)(self, hidden_states, top_k_index, top_k_weights)
    return _forward(self, hidden_states, top_k_index, top_k_weights)


def _forward(self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
    return _state_for(self).call(self, hidden_states, top_k_index, top_k_weights)


def _state_for(module: Any) -> ExpertsState:
    """Returns the state of a module, made on its first use."""
    known = _by_id.get(id(module))
    if known is not None and known[0]() is module:
        return known[1]
    with _making:
        state = _states.get(module)
        if state is None:
            state = _states[module] = ExpertsState(len(_states))
        _remember(module, state)
    return state


@functools.cache
def outside_the_graph(function: Any) -> Any:
    """Keeps a function out of the compiled graph. Only under torch.compile, because its import takes seconds."""
    return torch.compiler.disable(function, reason="Sluice's experts are a call into a C library: a graph break")


# States are not kept in modules, so that copies, pickles and saved models stay the host's own.
_states: weakref.WeakKeyDictionary[Any, ExpertsState] = weakref.WeakKeyDictionary()
# States by a module's address, for faster look-up; an entry is removed with its module.
_by_id: dict[int, tuple[weakref.ref[Any], ExpertsState]] = {}


# Held while states, layers and contexts are made, so that only one of several threads makes them.
_making = threading.RLock()


def _after_fork() -> None:
    """Replaces the lock, which another thread of the parent may have held."""
    global _making
    _making = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _remember(module: Any, state: ExpertsState) -> None:
    address = id(module)

    def forget(reference: weakref.ref[Any]) -> None:
        if address in _by_id and _by_id[address][0] is reference:
            del _by_id[address]

    _by_id[address] = (weakref.ref(module, forget), state)


# States of modules that a transport calls; the module's own forward is not Sluice's.
_transported: weakref.WeakKeyDictionary[Any, ExpertsState] = weakref.WeakKeyDictionary()
_announced: set[str] = set()


class ExpertsState:
    """Has the engine layers of one experts module, by the properties on which they depend.

    group            the ranks that share the experts, with global ids; None: this rank alone
    experts_forward  with a group: runs the experts if another implementation was chosen
    torch_group      the host's group of the same ranks
    num_experts      of all ranks together
    num_batches      of these ranks together: gradients are means over them
    """

    def __init__(
        self,
        layer_id: int,
        group: EpGroup | None = None,
        experts_forward: Any = None,
        torch_group: Any = None,
        num_experts: int = 0,
        num_batches: int = 1,
    ) -> None:
        self.layer_id = layer_id
        self._num_batches = num_batches
        self._group = group
        self.torch_group = torch_group
        self.num_experts = num_experts
        self.home = placement_module.contiguous(num_experts, 1 if group is None else group.world_size)
        self.placement = self.home
        self.torn = ""
        self._experts_forward = experts_forward
        self._signature: tuple[Any, ...] | None = None
        self._version = -1
        self._section: Any = None  # "sluice" of the model's config
        self._contract: contracts.Contract | None = None
        self._read: dict[bool, tuple[tuple[Any, ...], contracts.Contract]] = {}  # by module.training
        self._options: Options | None = None
        self._layers: dict[tuple[Any, ...], MoeLayer] = {}
        self._up_shape: Any = None
        self._latest: StackedLayer | None = None  # the last call's layer, if `quick` may be used

    def call(self, module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Computes the module's experts on these rows."""
        terms = low_rank.take(module)
        watched_by = watcher()
        if self._is_out_of_date(module):
            try:
                with _making:
                    self._look(module)
            except Exception as error:
                self._refuse(error, hidden.device)
                raise
        if watched_by is None and self._latest is not None:
            found = self._quick(self._latest, module, hidden, ids, weights, terms)
            if found is not None:
                return found
        if self._options is None:
            from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

            return ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, hidden, ids, weights)
        try:
            if watched_by is not None:
                raise Unsupported(_watched(type(module).__name__, watched_by, self._group is not None))
            refuse_torn(self)
            layer, tensors, dtype, lora = self._layer_of(module, hidden, ids, weights, terms)
            kept = self._kept(module, ids, tensors[0].shape[0])
        except Exception as error:
            self._refuse(error, hidden.device)
            raise
        tokens = hidden if hidden.dtype == dtype else hidden.to(dtype)
        route = weights if weights.dtype == torch.float32 else weights.float()
        with layer.context.lock:
            if layer.experts is None:
                out = layer(tokens, kept, route, flat(tensors), lora)
            else:
                layer.experts.bind(module, tensors)
                try:
                    out = layer(tokens, kept, route)
                finally:
                    layer.experts.bind(None, None)
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    def _is_out_of_date(self, module: Any) -> bool:
        """Returns whether the module or the options have changed since the last look."""
        return (
            self._version != settings.version
            or self._signature != self._now(module)
            or self._section != _section(module)
        )

    def why_not_adapted(self, module: Any, parameter: str, terms: Sequence[low_rank.Term]) -> str:
        """Returns why the library cannot add these terms to a stacked parameter in the next forward; "": it can."""
        options, contract = self._options, self._contract
        if contract is None or self._is_out_of_date(module):
            options = settings.effective(_section(module))
            contract = contracts.read(module, self._now(module)[0])
        if options is None or watcher() is not None:
            return low_rank.NOT_OURS
        if not contract.fused:
            return f"Sluice runs these experts with their own functions ({contract.reason})"
        if parameter not in contract.names[:2]:
            return "Sluice supports adapters of the two stacked matrices only"
        weight = getattr(module, parameter)
        if any(torch.nn.utils.parametrize.is_parametrized(module, name) for name in contract.names[:2]):
            return "PEFT adds another adapter of these experts"
        if torch.is_grad_enabled() and any(getattr(module, name).requires_grad for name in contract.names[:2]):
            return "the experts' own weights are trained, too"
        for tensor in (part for term in terms for part in (term.a, term.b)):
            is_own = self._group is not None and hasattr(tensor, "to_local")  # own_factors.py
            if (type(tensor) not in contracts.PLAIN and not is_own) or tensor.dtype not in contracts.DTYPES:
                return f"A or B is a {type(tensor).__name__} of {tensor.dtype}"
            if tensor.device != weight.device:
                return f"A or B is on {tensor.device}, the parameter on {weight.device}"
        return ""

    def _kept(self, module: Any, ids: torch.Tensor, num_local: int) -> torch.Tensor:
        """Returns the ids in the library's form, where -1 means no expert.

        transformers uses the number of one rank's experts instead: expert parallelism marks routes to other ranks with
        it, and eager always skips this id. Sluice's own transport gets global ids without marks.
        """
        if not ids.is_cpu:  # reading a number would wait for the device
            return ids.masked_fill(ids == num_local, -1) if self._group is None else ids
        if ids.numel() == 0:
            return ids
        lowest, highest = (int(bound) for bound in ids.aminmax())
        last = num_local if self._group is None else self.num_experts - 1
        if lowest < 0 or highest > last:
            wrong = ids if ids.dim() == 2 else ids.reshape(-1, 1)
            token, choice = ((wrong < 0) | (wrong > last)).nonzero()[0].tolist()
            mark = f", or {num_local} for a route to no expert here" if self._group is None else ""
            raise InvalidArgument(
                f"{type(module).__name__}: top_k_index[{token}, {choice}] is {int(wrong[token, choice])}; ids lie in "
                f"[0, {num_local if self._group is None else self.num_experts}){mark}: see the router"
            )
        return ids.masked_fill(ids == num_local, -1) if self._group is None and highest == num_local else ids

    def _quick(
        self,
        latest: StackedLayer,
        module: Any,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        terms: low_rank.Terms | None,
    ) -> torch.Tensor | None:
        """Calls the layer of the last call without gradients. None: it is not possible now."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        parameters = module._parameters
        tensors = [parameters.get(name) for name in self._contract.names]  # tensors that are no parameters: None
        up = tensors[0]
        if (
            not all(type(tensor) in (torch.nn.Parameter, PackedStack) for tensor in tensors)
            or up.shape != self._up_shape
            or up.dtype is not latest.dtype
            or (ids.numel() > 0 and int(ids.min()) < 0)  # the library would drop these
        ):
            return None
        lora = None if terms is None else self._lora(terms, latest.dtype)
        if (0 if lora is None else lora.rank) != latest.config.lora_rank:
            return None
        weights = weights if weights.dtype == torch.float32 else weights.float()
        return latest.quick(hidden, ids, weights, flat(tensors), lora)

    def _lora(self, terms: low_rank.Terms, dtype: torch.dtype) -> Lora:
        contract = self.contract
        mine = None if self._group is None else self.placement.experts_of(self._group.rank)
        return contract.lora(
            [
                low_rank.factors(terms[name], dtype, mine, 1 / self._num_batches) if name in terms else None
                for name in contract.names[:2]
            ]
        )

    def _layer_of(
        self, module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, terms: low_rank.Terms | None
    ) -> tuple[MoeLayer, list[torch.Tensor], torch.dtype, Lora | None]:
        """Returns the engine layer for these rows, made on first use; the parameters; the dtype in which it computes;
        the adapters."""
        contract = self._contract
        tensors = [getattr(module, name) for name in contract.names]
        exact = self._exact(module, contract, tensors)
        dtype = torch.float32 if exact else self._dtype(contract, hidden, tensors)
        lora = None if terms is None else self._lora(terms, dtype)
        rank = 0 if lora is None else lora.rank
        key = (
            dtype,
            exact,
            rank,
            ids.shape[-1],
            hidden.device,
            form_of(tensors),
            # Only of packed stacks: ranks make the same layers, and a plain stack may be frozen on one of them alone.
            any(is_packed(t) and t.requires_grad for t in tensors),
            *[(t.shape, t.dtype, t.device, type(t) in contracts.PLAIN) for t in tensors],
        )
        layer = self._layers.get(key)
        if layer is None or not layer.context.alive:
            with _making:
                layer = self._layers.get(key)
                if layer is None or not layer.context.alive:
                    made = self._make(module, hidden, ids, weights, tensors, dtype, exact, rank)
                    layer = self._layers[key] = made
        # Under expert parallelism ids may be marks, which `quick` does not support.
        quick = (
            type(layer) is StackedLayer and self._group is None and not getattr(module, "_is_expert_parallel", False)
        )
        self._latest, self._up_shape = (layer, tensors[0].shape) if quick else (None, None)
        return layer, tensors, dtype, lora

    def _refuse(self, error: Exception, device: torch.device) -> None:
        """Notifies the other ranks, which may be waiting in their own call, that this one does not take part."""
        if self._group is None or self._group.world_size == 1 or self._options is None:
            return
        layer = next((layer for layer in self._layers.values() if layer.context.alive), None)
        if layer is not None:
            layer.refuse(error)
            return
        # No layer exists yet. The smallest layer sends the error in its header, for which the others wait.
        context = context_of(self._options, self._group, device=device)
        config = MoeConfig(
            model_width=1, num_experts=self._group.world_size, top_k=1, activation="relu", layer_id=self.layer_id
        )
        layer = MoeLayer(context, config)
        try:
            layer.refuse(error)
        finally:
            layer.close()

    def stats(self) -> dict[str, Any]:
        """Returns the layer's numbers for `sluice.stats`."""
        contract = self._contract
        return {
            "layer_id": self.layer_id,
            "computed_by": self._computed_by(),
            "why_not_fused": "" if contract is None else contract.reason,
        }

    # ---- experts that change ranks (moving.py) ----

    def move(self, module: Any, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any = None) -> None:
        """Implements `sluice.move_experts`."""
        with _making:
            if self._contract is None:
                self._look(module)
        moving.move(self, module, expert_rank, expert_slot, optimizer)

    def start_moving(
        self,
        module: Any,
        expert_rank: Sequence[int],
        expert_slot: Sequence[int],
        optimizer: Any,
        bytes_per_second: int | None,
    ) -> ExpertMigration:
        """Implements `sluice.start_moving_experts`."""
        with _making:
            if self._contract is None:
                self._look(module)
        return moving.start(self, module, expert_rank, expert_slot, optimizer, bytes_per_second)

    @property
    def contract(self) -> contracts.Contract:
        """Returns the contract that was read last."""
        assert self._contract is not None
        return self._contract

    @property
    def moving_name(self) -> str:
        """See migration.moving.MovingLayer."""
        return f"experts {self.layer_id}"

    @property
    def moving_ranks(self) -> tuple[int, ...]:
        """See migration.moving.MovingLayer."""
        return () if self._group is None else self._group.ranks

    @property
    def moving_wait_s(self) -> float | None:
        """See migration.moving.MovingLayer."""
        return None if self._options is None else self._options.timeout

    def replace_experts(self, placement: Placement) -> None:
        """See migration.moving.MovingLayer."""
        alive = [layer for layer in self._layers.values() if layer.context.alive]
        self.placement = placement_module.replace_in_all(alive, self.placement, placement)

    @property
    def has_run(self) -> bool:
        """Returns whether a call has read the module."""
        return self._signature is not None

    def contexts(self) -> list[Context]:
        """Returns the contexts of its layers, for `sluice.decisions`."""
        return [layer.context for layer in self._layers.values()]

    def _computed_by(self) -> str:
        if self._options is None:
            return "transformers"
        return "sluice" if self._contract is not None and self._contract.fused else "the module's own functions"

    def _now(self, module: Any) -> tuple[Any, ...]:
        chosen = None if self._group is None else module.config._experts_implementation
        return (chosen, *contracts.signature(module))

    def _look(self, module: Any) -> None:
        """Reads the module and the options again. If it raises, the next call reads them again."""
        section = copy.deepcopy(_section(module))
        options = settings.effective(getattr(getattr(module, "config", None), "sluice", None))
        if self._group is not None and options is None:
            raise InvalidArgument(
                "Sluice was switched off after it had taken over expert parallelism: load the model again"
            )
        signature = self._now(module)
        known = self._read.get(module.training)
        if known is None or known[0] != signature:
            known = self._read[module.training] = (signature, contracts.read(module, signature[0]))
        contract = known[1]
        _check_policy(module, contract, options)
        if (self._version, self._contract, self._options) != (settings.version, contract, options):
            self._layers.clear()
        self._latest = None
        self._contract, self._options, self._section = contract, options, section
        self._signature, self._version = signature, settings.version
        tensors = [getattr(module, name) for name in contract.names]
        announce(module, contract, options, self._world, options is not None and self._exact(module, contract, tensors))

    @property
    def _world(self) -> int:
        return 1 if self._group is None else self._group.world_size

    def _exact(self, module: Any, contract: contracts.Contract, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns whether the experts compute in f32 although their parameters, or autocast, have 16 bits."""
        kind = "cuda" if tensors[0].is_cuda else "cpu"
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        # Another implementation decides itself. Autocast acts on a module's own functions as it does on the loop.
        if contract.stock or (not contract.fused and cast is not None):
            return False
        return precision.computes_in_f32(module, contract, tensors, cast)

    def _dtype(self, contract: contracts.Contract, hidden: torch.Tensor, tensors: list[torch.Tensor]) -> torch.dtype:
        """Returns the dtype of a call. Fused experts run like Linears: in autocast's dtype, else in the weights'."""
        if not contract.fused:
            return hidden.dtype
        kind = "cuda" if tensors[0].is_cuda else "cpu"
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[0].dtype

    def _make(
        self,
        module: Any,
        hidden: Any,
        ids: Any,
        weights: Any,
        tensors: list[Any],
        dtype: torch.dtype,
        exact: bool,
        lora_rank: int,
    ) -> MoeLayer:
        contract, name = self._contract, type(module).__name__
        announce(module, contract, self._options, self._world, exact)
        contracts.check_tensors(module, contract, tensors)
        model, width = contract.widths(tensors)
        _check_rows(name, model, tensors[0].device, hidden, ids, weights)
        if dtype not in contracts.DTYPES:
            raise Unsupported(
                f"{name}: hidden_states is {dtype}; Sluice computes in float32, bfloat16 and float16: "
                f"cast the model, {contracts.OTHERWISE}"
            )
        local, world = tensors[0].shape[0], self._world
        config = MoeConfig(
            model_width=model,
            num_experts=local * world,
            top_k=ids.shape[1],
            dtype=dtype,
            layer_id=self.layer_id,
            expert_rank=None if self._group is None else self.placement.expert_rank,
            expert_slot=None if self._group is None else self.placement.expert_slot,
            **layer_options(self._options, contract.fused),
        )
        is_open = self._options.policy is None and not self._options.memory_budget and not self._options.reuse
        if contract.fused and self._group is None and is_open:
            # On one rank dispatched rows are copies of tokens that autograd holds anyway: they are copied again.
            config = replace(config, policy=("redispatch", "keep"))
        layers = _num_layers(module) if self._options.memory_budget else None
        context = context_of(self._options, self._group, layers, tensors[0].device)
        if contract.stock:
            return CastingLayer(context, config, StockExperts(contract, local, self._experts_forward))
        if not contract.fused:
            return CastingLayer(context, config, HostExperts(contract, local, dtype if exact else None))
        config = replace(
            config,
            hidden_width=width,
            activation=contract.unit.activation,
            swiglu=contract.unit.swiglu,
            gated=contract.gated,
            interleaved=contract.interleaved,
            bias=contract.bias,
            lora_rank=lora_rank,
        )
        form = form_of(tensors)
        if form is None:
            return StackedLayer(context, config, views=contract.views)
        config = replace(config, weight_format=form.name, weight_block=form.block)
        return StackedLayer(context, config, views=contract.packed_views, num_scales=2)


def why_not_adapted(module: Any, parameter: str, terms: Sequence[low_rank.Term]) -> str:
    """Calls ExpertsState.why_not_adapted for any module that PEFT may wrap."""
    state = _transported.get(module)
    if state is not None:
        why_not = state.why_not_adapted(module, parameter, terms)
        if why_not:  # PEFT would add a plain tensor to a sharded one
            raise Unsupported(f"{type(module).__name__}.{parameter} has an adapter: {why_not}: {contracts.INSTEAD}")
        return ""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if chosen != NAME or not isinstance(getattr(module, "has_gate", None), bool):
        return low_rank.NOT_OURS
    return _state_for(module).why_not_adapted(module, parameter, terms)


def _section(module: Any) -> Any:
    """Returns the "sluice" section of a module's config. Called often, so it avoids a config's slow attributes."""
    try:
        return object.__getattribute__(module.__dict__["config"], "__dict__").get("sluice")
    except (KeyError, AttributeError):
        return None


def _num_layers(module: Any) -> int | None:
    """Returns the number of layers of an experts module's model, dense ones included: most forwards outstanding."""
    count = getattr(getattr(module, "config", None), "num_hidden_layers", None)
    return count if isinstance(count, int) and count > 0 else None


def _check_rows(name: str, model: int, device: torch.device, hidden: Any, ids: Any, weights: Any) -> None:
    if hidden.dim() != 2 or hidden.shape[1] != model:
        raise InvalidArgument(f"{name}: hidden_states has shape {list(hidden.shape)}, not [tokens, {model}]")
    if ids.shape != weights.shape or ids.dim() != 2:
        raise InvalidArgument(
            f"{name}: top_k_index has shape {list(ids.shape)} and top_k_weights {list(weights.shape)}: both must be "
            "[tokens, k]"
        )
    for what, tensor in (("hidden_states", hidden), ("top_k_index", ids), ("top_k_weights", weights)):
        if tensor.device != device:
            where = "the CPU" if device.type == "cpu" else device
            raise Unsupported(
                f"{name}: {what} is on {tensor.device} and the experts are on {where}: move one, {contracts.OTHERWISE}"
            )


def _watched(name: str, watched_by: str, is_parallel: bool) -> str:
    others = 'experts_implementation="batched_mm"'
    if is_parallel:
        others += ' and ep_implementation="all_to_all"'
    return f"{name}: {watched_by} cannot trace Sluice's C library: use {others} for it"


def _check_policy(module: Any, contract: contracts.Contract, options: Options | None) -> None:
    """Refuses a policy that the module's own functions cannot follow, unless on_unsupported is "warn"."""
    reason = None if options is None or contract.fused else refused_policy(options)
    if reason is not None and options.on_unsupported == "error":
        raise Unsupported(
            f"{type(module).__name__} runs with its own functions ({contract.reason}): {reason}; "
            f'or write "on_unsupported": "warn" to keep them here'
        )


def announce(module: Any, contract: contracts.Contract, options: Options | None, world: int, exact: bool) -> None:
    """Prints a line for each kind of experts, once per process, on rank 0. Without that line Sluice does not run."""
    if options is None:
        text = f"{type(module).__name__}: off (SLUICE=0 or enabled=False): transformers' grouped_mm computes"
    elif contract.fused:
        kind = "gated " if contract.gated else ""
        text = f"{type(module).__name__} runs on Sluice, fused in C: {kind}{contract.unit.activation}"
    else:
        text = f"{type(module).__name__} runs on Sluice with its own functions: {contract.reason}"
    if options is not None and exact:
        text += ", in float32 inside as its own loop"
    if world > 1:
        text += f" | ep_size {world}"
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if text in _announced or (distributed and torch.distributed.get_rank() != 0):
        return
    _announced.add(text)
    if options is not None:
        text += f" | {options.plan_message()}"
        if not contract.fused and refused_policy(options) is not None:
            text += ", here none: its rows and graphs are kept"
    print(f"[sluice {version.__version__}] {text} | pid {os.getpid()}", flush=True)


def kept_of(module: Any) -> ExpertsState | None:
    """Returns the state of an experts module; None: Sluice has not seen it yet."""
    return _transported.get(module) or _states.get(module)


def is_transported(module: Any) -> bool:
    """Returns whether Sluice is the transport of this experts module."""
    return module in _transported


def transported(module: Any, state: ExpertsState) -> None:
    """Remembers that a transport runs this module with `state`."""
    _transported[module] = state
