"""The engine behind the seam: the C library, through the torch adapter."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from sluice.adapters.deepspeed.seam import LayerSpec
from sluice.adapters.host.modules import CallExpert, HostModules
from sluice.adapters.torch import CastingLayer, Context, EpGroup, MoeConfig, layer_options
from sluice.config import Options

# How many models of this process use the group of these ranks: the last to go closes it.
_users: dict[tuple[tuple[int, ...], str | None], int] = {}


class EngineRunner:
    """One layer."""

    def __init__(self, context: Context, spec: LayerSpec, options: Options) -> None:
        self._form = spec.form
        self._modules: HostModules | None = None
        config = MoeConfig(
            model_width=spec.model_width,
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            hidden_width=spec.hidden_width,
            dtype=spec.dtype,
            layer_id=spec.layer_id,
            expert_rank=spec.expert_rank,
            expert_slot=spec.expert_slot,
            **layer_options(options, spec.form is not None, 1 if spec.one_chunk else 0),
        )
        if spec.form is not None:
            self.layer = spec.form.make_layer(context, config)
        else:
            local = spec.num_experts // context.ep_group.world_size
            self._modules = HostModules(local)
            self.layer = CastingLayer(context, config, self._modules)

    def run(
        self,
        tokens: torch.Tensor,
        expert_ids: torch.Tensor,
        route_weights: torch.Tensor,
        experts: Any,
        call_expert: CallExpert | None = None,
    ) -> torch.Tensor:
        """See seam.Runner."""
        if self._modules is None:
            assert self._form is not None
            return self.layer(tokens, expert_ids, route_weights, self._form.parameters_of(experts))
        self._modules.bind(experts, call_expert)
        try:
            return self.layer(tokens, expert_ids, route_weights)
        finally:
            self._modules.bind((), None)

    def smallest_budget(self, tokens: int) -> int:
        """See seam.Runner."""
        return self.layer.smallest_budget(tokens)

    def replace_experts(self, expert_rank: Sequence[int], expert_slot: Sequence[int]) -> None:
        """See seam.Runner."""
        self.layer.replace_experts(expert_rank, expert_slot)

    def loads(self) -> tuple[list[int], list[int]]:
        """See seam.Runner."""
        return self.layer.loads()

    def refuse(self, message: str) -> None:
        """See seam.Runner."""
        self.layer.refuse(RuntimeError(message))


class EngineBackend:
    """A context of this model on the group that all models with these ranks share."""

    def __init__(self, ranks: Sequence[int], options: Options, device: torch.device) -> None:
        timeout = None if options.timeout is None else timedelta(seconds=options.timeout)
        self._options = options
        self._key = tuple(ranks)
        self._group: EpGroup | None = EpGroup.for_ranks(self._key, timeout, options.transport)
        self._place = (self._key, options.transport)
        _users[self._place] = _users.get(self._place, 0) + 1
        try:
            self.context = Context(self._group, options, device)
        except BaseException:
            self._leave()
            raise

    def layer(self, spec: LayerSpec) -> EngineRunner:
        """See seam.Backend."""
        return EngineRunner(self.context, spec, self._options)

    def set_share(self, share: int, whole: int) -> None:
        """See seam.Backend."""
        self.context.set_share(share, whole)

    def stats(self, reset_peak: bool = False) -> dict[str, Any]:
        """See seam.Backend."""
        return self.context.stats(reset_peak)

    def close(self) -> None:
        """See seam.Backend. Not collective; ranks that unswap alike may swap again."""
        if self._group is not None:
            self.context.close()
            self._leave()

    def _leave(self) -> None:
        group, self._group = self._group, None
        _users[self._place] -= 1
        if group is not None and (_users[self._place] == 0 or len(self._key) == 1):
            group.close()
