# SPDX-License-Identifier: Apache-2.0
"""Rank-side: makes one rank deviate from the others, and returns the errors on all ranks."""

import contextlib
import io
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import mg_models
import torch
import torch.distributed as dist
from mg_cases import _OtherExperts, _with_experts, environment, moe_layers
from mg_models import parallel_state
from sluice import megatron as ours

HOST = {"gemm": "host"}


def _said(action: Callable[[], Any]) -> str:
    """Returns the exception of a call, and its cause; "" if it raised none."""
    try:
        action()
    except Exception as error:
        cause = "" if error.__cause__ is None else f", from {error.__cause__!r}"
        return f"{type(error).__name__}: {error}{cause}"
    return ""


def _hidden(width: int = 32) -> torch.Tensor:
    return torch.randn(8, 2, width)


def _decorated(**changes: Any) -> Any:
    return mg_models.model_of(2, "decorated", HOST, **changes)


# ---- forwards ----


def bad_input(**changes: Any) -> dict[str, Any]:
    """Gives rank 1 hidden states of another width; then both continue."""
    layer = moe_layers(_decorated(num_layers=1, **changes))[0]
    said = _said(lambda: layer(_hidden(36 if dist.get_rank() == 1 else 32)))
    output, _ = layer(_hidden())
    return {"said": said, "finite": bool(output.isfinite().all())}


def expert_raises() -> dict[str, Any]:
    """Makes an expert of rank 1, which is called because it has a hook, raise in the first of three forwards."""
    layer = moe_layers(_decorated(num_layers=1))[0]

    def stumble(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the hook's own words")

    hooks = [expert.register_forward_hook(stumble) for expert in layer.experts.local_experts]
    said = [_said(lambda: layer(_hidden()))]
    for hook in hooks:
        hook.remove()
    said.append(_said(lambda: layer(_hidden())))
    output, _ = layer(_hidden())
    return {"said": said, "finite": bool(output.isfinite().all())}


def other_layer() -> dict[str, Any]:
    """Calls the second layer on rank 1 while rank 0 calls the first; then both continue."""
    first, second = moe_layers(_decorated())
    said = _said(lambda: (second if dist.get_rank() == 1 else first)(_hidden()))
    output, _ = first(_hidden())
    return {"said": said, "finite": bool(output.isfinite().all())}


def one_rank_skips() -> str:
    """Omits the second forward on rank 1."""
    layer = moe_layers(mg_models.model_of(2, "decorated", {**HOST, "timeout": 5}, num_layers=1))[0]
    layer(_hidden())
    return "" if dist.get_rank() == 1 else _said(lambda: layer(_hidden()))


# ---- models ----


def models_differ() -> str:
    """Gives rank 1 wider experts."""
    return _said(lambda: _decorated(moe_ffn_hidden_size=48 + 8 * dist.get_rank()))


def one_rank_cannot(policy: str) -> dict[str, Any]:
    """Gives rank 1 alone experts of an unknown class."""
    config = mg_models.model_of(2).config
    spec = ours.with_sluice(mg_models.spec_of(config, "stock", {}), on_unsupported=policy)
    if dist.get_rank() == 1:
        _with_experts(spec, _OtherExperts)
    found: dict[str, Any] = {}

    def build() -> None:
        model = mg_models.GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=mg_models.VOCABULARY,
            max_sequence_length=mg_models.SEQUENCE,
        )
        found["kept"] = [layer._sluice is None for layer in moe_layers(model)]

    with contextlib.redirect_stdout(io.StringIO()):
        found["said"] = _said(build)
    return found


def bad_options() -> list[str]:
    """Returns the errors for options of a spec, and of the environment."""
    said = [_said(lambda: mg_models.model_of(2, "decorated", {"chnks": 2}))]
    for text in ('{"chunks": "auto"}', '{"chunks": ', "/nowhere/options.json"):
        with environment(SLUICE_OPTIONS=text):
            said.append(_said(_decorated))
    return said


def split_experts(policy: str) -> dict[str, Any]:
    """Splits experts over two tensor-parallel ranks: refused, or trained by the host."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, 1, expert_model_parallel_size=1, expert_tensor_parallel_size=2)
    try:
        sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
        config = mg_models.config_of(1, **sizes)
        mg_models.model_parallel_cuda_manual_seed(1234)
        spec = ours.with_sluice(mg_models.spec_of(config, "stock", {}), on_unsupported=policy)
        made: list[Any] = []

        def build() -> None:
            made.append(
                mg_models.GPTModel(
                    config=config,
                    transformer_layer_spec=spec,
                    vocab_size=mg_models.VOCABULARY,
                    max_sequence_length=mg_models.SEQUENCE,
                )
            )

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            said = _said(build)
        kept = [layer._sluice is None for model in made for layer in moe_layers(model)]
        return {"said": said, "printed": printed.getvalue(), "kept": kept}
    finally:
        parallel_state.destroy_model_parallel()


# ---- deaths ----


def dies_in_training(where: str) -> dict[str, Any]:
    """Kills rank 1 in the forward or backward of the second step, and returns rank 0's error, and how soon it came."""
    host = mg_models.Host(2, "decorated", HOST)
    host.train(1)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        first, second = moe_layers(host.model)
        if where == "forward":
            second.register_forward_pre_hook(die)
        else:  # after the second layer's backward
            first.register_full_backward_pre_hook(die)
    began = time.monotonic()
    said = _said(lambda: host.train(1))
    return {"said": said, "s": time.monotonic() - began}
