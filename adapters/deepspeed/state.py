"""What a swapped layer keeps beside the host's own attributes: which engine layers run it and how to ask them.

Holds no module and no tensor of the host: both are read afresh at each forward, because ZeRO, offload and `.to()` move
storage and because a user may hook an expert after the swap.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from sluice.adapters.deepspeed import comms_log, first_call, flops_profile
from sluice.adapters.deepspeed import experts as experts_module
from sluice.adapters.deepspeed import placement as placement_module
from sluice.adapters.deepspeed.placement import Placement
from sluice.adapters.deepspeed.probe import DTYPES, Finding
from sluice.adapters.deepspeed.seam import Backend, LayerSpec, Runner
from sluice.adapters.deepspeed.shares import Sharing
from sluice.adapters.deepspeed.unsupported import UnsupportedError, policy_of_modules
from sluice.config import Options
from sluice.errors import Mismatch, OverBudget
from torch import nn


class LayerState:
    """One swapped layer."""

    def __init__(
        self,
        finding: Finding,
        backend: Backend,
        options: Options,
        family: list[LayerState],
        sharing: Sharing | None = None,
    ) -> None:
        """`family`: the layers that share the backend, this one included from now on. `sharing`: where the backend has
        a share of a budget."""
        family.append(self)
        self._sharing = sharing
        self.finding = finding
        self._family = family
        self._options = options
        self._seen_experts: set[tuple[int, bool]] = set()
        self._has_told_container = False
        self.backend = backend
        self._runners: dict[tuple[torch.dtype, bool], Runner] = {}
        self._result_dtypes: dict[torch.dtype, torch.dtype] = {}
        self._fused_now = finding.form is not None
        self.home = placement_module.contiguous(finding.num_experts, len(finding.ranks))
        self.placement = self.home
        self.watch: Any = None  # of the option "placement"

    def replace_experts(self, placement: Placement) -> None:
        """Experts lie elsewhere from now on; the caller moves what belongs to them. Collective over the group."""
        before = self.placement
        done: list[Runner] = []
        try:
            for runner in self._runners.values():
                runner.replace_experts(*placement)
                done.append(runner)
        except Exception:
            for runner in done:  # the ranks have failed alike
                runner.replace_experts(*before)
            raise
        self.placement = placement

    def loads(self) -> tuple[list[int], list[int]]:
        """Rows so far: of this rank's tokens by expert, and received by each rank, which all ranks know alike."""
        counted = [runner.loads() for runner in self._runners.values()]
        zeros = [0] * self.finding.num_experts, [0] * len(self.finding.ranks)
        by_expert, by_rank = ([sum(items) for items in zip(*lists)] for lists in zip(zeros, *counted))
        return by_expert, by_rank

    def spent(self) -> tuple[int, int, int]:
        """So far, by all layers of the backend: nanoseconds inside passes, bytes sent, nanoseconds of exchanges."""
        now = self.backend.stats()
        return int(now.get("pass_ns", 0)), int(now["bytes_sent"]), int(now["comm_ns"])

    def runner(self, layer: nn.Module) -> tuple[Runner, torch.dtype]:
        """The engine layer for this call, and the dtype of its rows."""
        self._check_container(layer.experts)
        untouched = experts_module.still_exact(layer.experts.deepspeed_experts)
        self._fused_now = self.finding.form is not None and untouched
        dtype = self._dtype(layer)
        key = (dtype, untouched)
        if key not in self._runners:
            self._make_checked(key)
            # A plan under a budget counts the layers that there are: with the first, all of them.
            for other in self._family:
                if not other._runners:
                    other._make(key)
        return self._runners[key], dtype

    def _check_container(self, container: nn.Module) -> None:
        """Hooked after the swap: nobody calls it any more, so its hooks would be lost without a word."""
        if experts_module.untouched(container):
            return
        text = (
            f"MoE layer '{self.finding.name}': the container of its experts was given hooks or a forward of its own "
            "after the swap, and Sluice calls the experts without it: hook the layer, or the experts"
        )
        if self._options.on_unsupported == "error":
            raise UnsupportedError(text)
        if not self._has_told_container:
            warnings.warn(f"sluice: {text}", stacklevel=2)
        self._has_told_container = True

    def _make_checked(self, key: tuple[torch.dtype, bool]) -> None:
        """Experts that were hooked after the swap run as modules from now on, which the policy may not be for."""
        reason = None if key[1] else policy_of_modules(self.finding.name, self._options)
        if reason is not None and self.finding.form is not None:  # else the banner has said it
            warnings.warn(f"sluice: {reason}", stacklevel=2)
        self._make(key)

    def settle(self, tokens: torch.Tensor, dtype: torch.dtype) -> None:
        """Before the first of these rows: the backend's share of a budget."""
        if self._sharing is not None:
            self._sharing.settle(max(1, tokens.shape[0]), dtype)

    def explain_budget(self, error: OverBudget, tokens: torch.Tensor) -> OverBudget:
        """What the engine does not know: when the backend's share was made."""
        return error if self._sharing is None else self._sharing.explain(error, tokens.shape[0])

    def prepare(self, dtype: torch.dtype) -> None:
        """There is an engine layer: what plans need depends on all that there are."""
        if not self._runners:
            self._make((dtype, True))

    def smallest_budget(self, tokens: int) -> int:
        """Of the backend, for this layer."""
        return max(runner.smallest_budget(tokens) for runner in self._runners.values())

    def refuse(self, message: str) -> None:
        """Tells the other ranks that this one is not coming, through whichever of its engine layers there is."""
        if self._sharing is not None:
            self._sharing.fail(message)
        if not self._runners:  # the very first call: as it was when it was swapped, which all ranks agreed on
            self._make((self.finding.dtype, True))
        next(iter(self._runners.values())).refuse(message)

    def _make(self, key: tuple[torch.dtype, bool]) -> None:
        dtype, untouched = key
        found = self.finding
        spec = LayerSpec(
            layer_id=found.layer_id,
            num_experts=found.num_experts,
            top_k=found.top_k,
            model_width=found.model_width,
            dtype=dtype,
            form=found.form if untouched else None,
            hidden_width=found.form.hidden_width if found.form else 1,
            one_chunk=not untouched,
            expert_rank=self.placement.expert_rank,
            expert_slot=self.placement.expert_slot,
        )
        self._runners[key] = self.backend.layer(spec)

    def check_tokens(self, tokens: torch.Tensor, dtype: torch.dtype) -> None:
        """What the host would find out later, or on the other ranks only."""
        if tokens.shape[1] != self.finding.model_width:
            raise ValueError(
                f"MoE layer '{self.finding.name}': the input has width {tokens.shape[1]}, "
                f"the layer {self.finding.model_width}"
            )
        if tokens.dtype != dtype and not self._autocast():
            raise ValueError(
                f"MoE layer '{self.finding.name}': the input is {tokens.dtype}, the experts are {dtype}: "
                "cast one, or use autocast"
            )

    def call_expert(self, expert: nn.Module, index: int, rows: torch.Tensor) -> torch.Tensor:
        """The host's own call on real rows: a 4-D tensor, and of a tuple the first element."""
        as_now = index, expert.training  # dropout draws in training alone
        new = as_now not in self._seen_experts and torch.is_grad_enabled()
        before = first_call.random_state() if new else None
        result = expert(rows.view(1, 1, *rows.shape))
        if isinstance(result, tuple):
            result = result[0]
        if before is not None:
            self._seen_experts.add(as_now)
            self._check_first_call(expert, index, rows, result, not torch.equal(before, first_call.random_state()))
        if result.numel() != rows.numel():
            raise UnsupportedError(
                f"MoE layer '{self.finding.name}': an expert turned {list(rows.shape)} into {list(result.shape)}; "
                "Sluice needs one row of the model width per row"
            )
        return result.reshape(rows.shape).to(rows.dtype)

    def _check_first_call(self, expert: nn.Module, index: int, rows: Any, result: torch.Tensor, drew: bool) -> None:
        where = f"MoE layer '{self.finding.name}', expert {index}"
        if drew:
            text = f"{where} draws random numbers per row, and Sluice gives it its real rows without padding"
            if self._options.on_unsupported == "error":
                raise UnsupportedError(text)
            warnings.warn(f"sluice: {text}", stacklevel=2)
        leaves = first_call.foreign_leaves(result, rows, expert)
        if leaves:  # whatever the options say: their gradient would be lost without a word
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
            raise UnsupportedError(
                f"{where} uses tensors that want a gradient and are not its parameters (of shape {shapes}): make them "
                "parameters of the expert, or detach them"
            )

    def as_host(self, output: torch.Tensor, experts: Sequence[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
        """In the dtype of the host's result: that of what an expert returns."""
        if self._fused_now or not self._autocast():
            return output
        if output.dtype not in self._result_dtypes:
            with torch.no_grad():
                result = experts[0](tokens.new_zeros(1, 1, 1, tokens.shape[1]))
            self._result_dtypes[output.dtype] = (result[0] if isinstance(result, tuple) else result).dtype
        return output.to(self._result_dtypes[output.dtype])

    @property
    def layer_id(self) -> int:
        """For `sluice.trace`."""
        return self.finding.layer_id

    def contexts(self) -> list[Any]:
        """The torch adapter's, for `sluice.decisions`; none where tests put another backend."""
        context = getattr(self.backend, "context", None)
        return [] if context is None else [context]

    # ---- what the host's timers, logger and profiler get ----

    def profile(self, expert_ids: torch.Tensor) -> None:
        """GEMMs that no module was called for, in the host's count."""
        if self._fused_now and self.finding.form is not None:
            flops_profile.count(self.finding.form, expert_ids)

    @staticmethod
    def measures(layer: nn.Module) -> bool:
        """Whether anybody looks at this layer's communication."""
        return bool(layer.wall_clock_breakdown) or comms_log.wanted()

    def communication(self) -> tuple[int, int]:
        """(bytes sent, nanoseconds of the communication lane) so far."""
        now = self.backend.stats()
        return int(now["bytes_sent"]), int(now["comm_ns"])

    def record(self, layer: Any, output: torch.Tensor, before: tuple[int, int]) -> None:
        """Gives the host its communication times and records, for this forward and for its backward."""
        sent, lane_ns = (now - then for now, then in zip(self.communication(), before))
        if layer.wall_clock_breakdown and layer.ep_size > 1:
            # The two exchanges of all chunks share one lane, under the GEMMs: half of it each.
            layer.time_falltoall += lane_ns / 2e6
            layer.time_salltoall += lane_ns / 2e6
        if layer.ep_size == 1 or not comms_log.wanted():
            return
        comms_log.append("sluice_forward", lane_ns, sent)
        if output.grad_fn is not None:
            # Prehook and posthook of the one node that is this layer's backward.
            start: list[tuple[int, int]] = []
            output.grad_fn.register_prehook(lambda _grads: start.append(self.communication()))

            def after(_inputs: Any, _outputs: Any) -> None:
                spent_bytes, spent_ns = (now - then for now, then in zip(self.communication(), start.pop()))
                comms_log.append("sluice_backward", spent_ns, spent_bytes)

            output.grad_fn.register_hook(after)

    def explain(self, error: Mismatch) -> Mismatch:
        """The engine says that ranks differ; why they do is known here."""
        if self._fused_now == (self.finding.form is not None):
            return error
        return Mismatch(
            f"{error.message}. On this rank the experts of '{self.finding.name}' were hooked or changed after the "
            "swap, so they are called as modules: do so on every rank of the group, or on none",
            peer=error.peer,
        )

    def stats(self, reset_peak: bool = False) -> dict[str, Any]:
        """For `sluice.stats`."""
        found = self.finding
        return {
            "layer": found.name,
            "layer_id": found.layer_id,
            "ranks": list(found.ranks),
            "computed_by": "sluice" if self._fused_now else "host modules",
            "why_not_fused": found.why_not_fused,
            **({} if self.watch is None else {"placement": self.watch.report()}),
            **self.backend.stats(reset_peak),
        }

    # ---- dtypes ----

    def _autocast(self) -> bool:
        return torch.is_autocast_enabled(self.finding.device.type)

    def _dtype(self, layer: nn.Module) -> torch.dtype:
        """Fused experts run as two Linears would: in autocast's dtype if it is on, else in their own."""
        own = self.finding.dtype
        for parameter in layer.experts.deepspeed_experts.parameters():
            if parameter.is_floating_point():
                own = parameter.dtype  # a later .to() or .bfloat16() of the model
                break
        if self._autocast() and self._fused_now:
            own = torch.get_autocast_dtype(self.finding.device.type)
        if own not in DTYPES:
            raise UnsupportedError(
                f"MoE layer '{self.finding.name}': {own}; float32, bfloat16 and float16 are supported"
            )
        return own
