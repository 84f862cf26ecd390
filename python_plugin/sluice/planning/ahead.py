# SPDX-License-Identifier: Apache-2.0
"""`sluice tune --keep`: makes the tuner's decisions ahead of time and stores them where training runs look for them.

One layer of the model trains on random rows, on all ranks of the launcher, until its tuner has decided. A training run
would decide by the same races. Decisions are stored by kind of layer, so activation, biases and options must be those
of the run; `Model.section` has the options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .. import decision_cache
from ..config import Options
from .errors import BadInput
from .model import HELD, Model

SETTLED = 2  # steps in a row


def options_of(model: Model) -> Options:
    """Returns the options of the run: those of a DeepSpeed config, overridden by flags."""
    base = Options() if model.section is None else model.section
    return replace(base, **{name: value for name in HELD if (value := getattr(model, name)) is not None})


def check(model: Model, ranks: int) -> None:
    """Raises BadInput if there is nothing to decide, or if the kind of the layer is not known."""
    if ranks == 1 and model.memory_budget is None and model.host_memory_budget is None:
        raise BadInput("--keep: one rank without a budget has nothing to choose; start all ranks by torchrun")
    if model.activation is None:
        raise BadInput(
            "--keep: --activation is missing: answers are kept by kind of layer, and neither flag nor config says it"
        )


def settle(context: Any, model: Model, most_steps: int, progress: Callable[[str], None]) -> int:
    """Trains until the context's tuner has decided. Returns the number of steps. Collective."""
    import torch

    from ..adapters.torch.layer import MoeLayer
    from ..adapters.torch.layer_config import MoeConfig
    from ..adapters.torch.options import layer_options

    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[model.dtype]
    config = MoeConfig(
        model_width=model.model_width,
        hidden_width=model.hidden_width,
        num_experts=model.num_experts,
        top_k=model.top_k,
        dtype=dtype,
        activation=model.activation,
        gated=bool(model.gated),
        bias=bool(model.bias),
        **layer_options(options_of(model), fused=True),
    )
    layer = MoeLayer(context, config)
    M, H, T, K = model.model_width, model.hidden_width, model.tokens, model.top_k
    shapes = {"w1": (H, M), "w3": (H, M), "w2": (M, H), "b1": (H,), "b3": (H,), "b2": (M,)}
    generator = torch.Generator().manual_seed(7)

    def made_up(*shape: int) -> Any:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    experts = [
        {name: made_up(*shapes[name]).requires_grad_() for name in layer.members}
        for _ in range(layer.num_local_experts)
    ]
    tokens = made_up(T, M).requires_grad_()
    ids = (torch.arange(T * K) % model.num_experts).view(T, K)
    weights = torch.full((T, K), 1.0 / K)
    steps = settled = 0
    while steps < most_steps and settled < SETTLED:
        for expert in experts:
            for parameter in expert.values():
                parameter.grad = None
        layer(tokens, ids, weights, experts).sum().backward()
        steps += 1
        settled = settled + 1 if context.stats()["last_is_settled"] and context.decisions() else 0
        progress(f"deciding: step {steps}")
    return steps


def keep(context: Any, place: str | bool, cache: str | None) -> dict[str, Any]:
    """Writes the context's answers to the file and returns what --json prints about it. One rank calls this."""
    from ..adapters.torch import tuner
    from ..config import TunerOptions

    tuner.keep(context, TunerOptions(decisions=place, cache=cache))
    return {"path": decision_cache.place(place, cache), "answers": context.answers(), "decisions": context.decisions()}
