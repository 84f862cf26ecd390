"""What the swapped layer needs from the engine: a few lines, so that tests can put a plain torch model in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sluice.adapters.host.modules import CallExpert
from sluice.adapters.torch import CastingLayer, Context, MoeConfig
from sluice.config import Options


class Form(Protocol):
    """The mathematics of experts that C computes, and where their weights lie in what the host has of them."""

    @property
    def model_width(self) -> int:
        """M."""
        ...

    @property
    def hidden_width(self) -> int:
        """H."""
        ...

    @property
    def gated(self) -> bool:
        """Whether act(w1 x) is multiplied by w3 x."""
        ...

    def make_layer(self, context: Context, config: MoeConfig) -> CastingLayer:
        """The engine layer. config: without what the form knows."""
        ...

    def parameters_of(self, experts: Any) -> Any:
        """The weights of this moment, as that layer takes them."""
        ...


@dataclass(frozen=True)
class LayerSpec:
    """Everything that is fixed over the life of one engine layer."""

    layer_id: int
    num_experts: int
    top_k: int
    model_width: int
    dtype: torch.dtype  # of the rows on the wire and of the GEMMs
    form: Form | None  # None: `call_expert` computes
    hidden_width: int = 1  # as on the other ranks, should they compute otherwise
    expert_rank: tuple[int, ...] | None = None  # who owns each expert, None: contiguous
    expert_slot: tuple[int, ...] | None = None  # and where among the local ones, None: in the order of ids
    one_chunk: bool = False  # unless the options name a number: a hooked module sees its rows in one call


class Runner(Protocol):
    """One layer of the engine."""

    def run(
        self,
        tokens: torch.Tensor,  # [T, M]
        expert_ids: torch.Tensor,  # [T, K] i32, -1 = dropped, any strides
        route_weights: torch.Tensor,  # [T, K] f32, any strides
        experts: Any,  # the local ones as the form takes them, read afresh: their storage may have moved
        call_expert: CallExpert | None = None,  # without a form
    ) -> torch.Tensor:
        """[T, M] in the spec's dtype, with a backward. Collective."""
        ...

    def smallest_budget(self, tokens: int) -> int:
        """Below which the backend has no plan for so many tokens. Where backends share a budget."""
        ...

    def replace_experts(self, expert_rank: Sequence[int], expert_slot: Sequence[int]) -> None:
        """Experts lie elsewhere from now on, as many on each rank. Collective; all as before after an error."""
        ...

    def loads(self) -> tuple[list[int], list[int]]:
        """Rows so far: of this rank's tokens by expert; received by each rank, alike on all ranks."""
        ...

    def refuse(self, message: str) -> None:
        """Takes this rank's place in the collective call with a refusal, so that the others fail instead of waiting."""
        ...


class Backend(Protocol):
    """What the layers of one list of ranks share."""

    def layer(self, spec: LayerSpec) -> Runner:
        """Makes a layer; no communication."""
        ...

    def set_share(self, share: int, whole: int) -> None:
        """The bytes that it has of a budget, before its first pass. Where backends share one."""
        ...

    def stats(self, reset_peak: bool = False) -> dict[str, Any]:
        """At least bytes_sent, comm_ns, gemm. reset_peak: peak_bytes starts anew afterwards."""
        ...

    def close(self) -> None:
        """Releases everything; the layers are dead afterwards."""
        ...


# Opens the backend of one list of global ranks, on the device of their experts. Collective over these ranks.
OpenBackend = Callable[[Sequence[int], Options, torch.device], Backend]


def open_engine(ranks: Sequence[int], options: Options, device: torch.device) -> Backend:
    """The real one: the C library through the torch adapter."""
    from sluice.adapters.deepspeed.engine_backend import EngineBackend

    return EngineBackend(ranks, options, device)
