# SPDX-License-Identifier: Apache-2.0
"""Rank-side: models with AutoEP layers, with stock DeepSpeed and through Sluice, and with experts that move."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from typing import Any

import autoep_models as models
import sluice
import torch
import torch.distributed as dist
from cases_placement import SECTION, UNCLIPPED, checkpoint_files, still_and_moved
from cases_traps import cross_loaded, errs
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe import ep_experts
from ds_models import go_home
from sluice.adapters.deepspeed import swap
from sluice.config import Options

_registered = "swiglu_squared"  # an activation that the library does not support


def parity(kind: str, steps: int = 8, sluice: dict[str, Any] | None = None, **how: Any) -> list[Any]:
    """Returns (stock, through Sluice): the results of `models.train`."""
    return [models.train(kind, steps, section, **how) for section in (None, {**models.SLUICE, **(sluice or {})})]


def parity_of_lengths(lengths: list[list[int]], **how: Any) -> list[Any]:
    """Runs `parity` with sequences of these lengths by rank and step."""
    mine = lengths[dist.get_rank()]
    return parity("stacked", len(mine), lengths=mine, **how)


def parity_of_a_known_formula() -> list[Any]:
    """Runs `parity` with a registered activation that equals an activation of the library."""
    if "relu_gate" not in ep_experts.EXPERT_ACTIVATIONS:
        ep_experts.register_expert_activation("relu_gate", lambda gate, up, alpha, limit: torch.relu(gate) * up)
    return parity("stacked", section={"expert_activation": "relu_gate"})


def parity_with_frozen(which: str) -> list[Any]:
    """Runs `parity` with experts' parameters that are not trained."""

    def prepare(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if which in name:
                parameter.requires_grad_(False)

    return parity("stacked", prepare=prepare)


def _engine(**section: Any) -> Any:
    return models.engine(models.build("stacked"), models.expert_parallel("stacked", **section), models.SLUICE)


def _layer(host: Any) -> Any:
    return models.moe_layers(host.module)[0][1]


def _loss(host: Any, step: int = 0) -> torch.Tensor:
    ids = models.batch(step)
    return host(input_ids=ids, labels=ids, use_cache=False).loss


def one_step(host: Any, number: int) -> torch.Tensor:
    """Runs a forward and a backward, and returns the loss."""
    loss = _loss(host, number)
    host.backward(loss)
    return loss.detach()


def refused(what: str, policy: str) -> Any:
    """Returns the result of swapping invalid layers: [number of layers on Sluice, reasons], or [error type, text]."""
    config, section = {}, {}
    if what == "activation":
        if _registered not in ep_experts.EXPERT_ACTIVATIONS:
            ep_experts.register_expert_activation(_registered, lambda gate, up, alpha, limit: (gate * up).square())
        section = {"expert_activation": _registered}
    elif what == "deepep":
        section = {"comm_backend": "deepep", "comm_max_tokens_per_rank": 64}
    elif what == "zero 3":
        config = {"zero_optimization": {"stage": 3}}
    host = models.engine(models.build("stacked"), models.expert_parallel("stacked", **section), None, **config)
    first = _layer(host)
    if what == "hook":
        first.experts.register_forward_hook(lambda *_: None)
    elif what == "folded":  # the state after AutoTP and AutoEP together, for models whose plan AutoTP can read
        first.folding_group_handles = types.SimpleNamespace(spec=types.SimpleNamespace(tp_size=2))
    elif what == "forward":
        first._forward = lambda hidden: hidden
    elif what == "subclass":
        first.__class__ = type("Mine", (AutoEPMoELayer,), {})
    try:
        with swap(host.module, Options(on_unsupported=policy, timeout=60)) as handle:
            return [len(handle.layers), handle.refused]
    except Exception as error:
        return [type(error).__name__, str(error)]


def rank_errs(how: str) -> str:
    """See cases_traps.rank_errs."""
    host = _engine()
    layer = _layer(host)
    text = errs(layer, lambda width: layer(torch.randn(2, 4, width)), 32, how)
    host.sluice.unswap()
    return text


def numbers() -> list[Any]:
    """Returns `sluice.stats` and `sluice.decisions` of an engine and a layer. Copies of a layer are the host's."""
    host = _engine(size=1)
    host.backward(_loss(host))
    layer = _layer(host)
    layer.ep_group = None  # a layer cannot be copied with its group
    twin = copy.deepcopy(layer)
    assert type(twin) is AutoEPMoELayer and "_sluice" not in vars(twin)
    assert list(twin.state_dict()) == list(layer.state_dict())
    assert b"sluice" not in pickle.dumps(layer)
    x = torch.randn(2, 4, 32)
    assert torch.allclose(twin(x), layer(x), atol=1e-6)
    stats = sluice.stats(host)["layers"]
    assert [one["layer"] for one in stats] == [name for name, _ in models.moe_layers(host.module)]
    assert sluice.stats(layer)["layers"][0]["layer"] == stats[0]["layer"]
    assert sluice.decisions(host) is not None
    host.sluice.unswap()
    return [one["computed_by"] for one in stats]


def checkpoint(folder: str, writer: str, config: dict[str, Any]) -> Any:
    """Runs `cross_loaded`."""
    sections = {"stock": None, "sluice": models.SLUICE}

    def make(name: str) -> Any:
        model = models.build("deepseek_v3", 3 if name == writer else 4)
        return models.engine(model, models.expert_parallel("deepseek_v3"), sections[name], **config)

    return cross_loaded(make, one_step, folder, writer)


# ---- experts that move between ranks, compared with a training in which none moves ----


def moved_training(
    kind: str,
    steps: int,
    every: int,
    size: int = 2,
    shape: dict[str, int] | None = None,
    **how: Any,
) -> list[dict[str, Any]]:
    """Runs `still_and_moved` with AutoEP layers."""
    training = functools.partial(models.train, kind, steps, SECTION, section={"autoep_size": size}, shape=shape)
    return still_and_moved(training, steps, every, **how)


def decided(kind: str, steps: int, config: dict[str, Any]) -> list[Any]:
    """Returns [unmoved, moved, reports] with the option "placement"."""
    config = {**UNCLIPPED, **config}
    reports: list[Any] = []

    def settle(host: Any, step: int) -> None:
        """Moves experts home before the last step: experts of a partitioned optimizer only move after updates."""
        if step == steps - 1:
            reports.extend(state["placement"] for state in host.sluice.stats()["layers"])
            host.sluice.decider.close()
            host.sluice.decider = None
            go_home(host)

    def favour(model: Any) -> None:
        """Makes the router prefer the first rank's experts."""
        with torch.no_grad():
            for layer in model.layers:
                layer.moe.router.bias[: layer.moe.router.bias.shape[0] // 2] += 4.0

    willing = {"interval": 3, "target": 1.05, "least_gain": 0.01, "horizon": 10**6}
    still = models.train(kind, steps, SECTION, config=config, prepare=favour)
    moved = models.train(kind, steps, {**SECTION, "placement": willing}, config=config, prepare=favour, before=settle)
    return [still, moved, reports]


def checkpoint_away(kind: str, folder: str, config: dict[str, Any]) -> Any:
    """Runs `checkpoint_files` with AutoEP layers."""

    def make(section: dict[str, Any] | None) -> Any:
        return models.engine(models.build(kind), models.expert_parallel(kind), section, **{**UNCLIPPED, **config})

    return checkpoint_files(make, one_step, folder)
