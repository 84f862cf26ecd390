# SPDX-License-Identifier: Apache-2.0
"""Rank-side: models with AutoEP layers, with stock DeepSpeed and through Sluice, in one process group."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import signal
import time
import types
from typing import Any

import autoep_models as models
import sluice
import torch
import torch.distributed as dist
from cases_engines import contents_of
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe import ep_experts
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


def _reorder_sums(seed: int, model: Any) -> None:
    """Permutes the hidden units of the experts. The training is the same, but GEMMs sum in another order."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        experts = layer.moe.experts
        order = torch.randperm(experts.fc_gate.shape[1], generator=generator)
        with torch.no_grad():
            experts.fc_gate.copy_(experts.fc_gate[:, order].clone())
            experts.fc_up.copy_(experts.fc_up[:, order].clone())
            experts.fc_down.copy_(experts.fc_down[:, :, order].clone())


def long_run(steps: int) -> dict[str, Any]:
    """Returns losses through Sluice, of stock, and of stock runs that differ only in the order of sums."""
    stock = [models.train("stacked", steps, None)["losses"]]
    for seed in range(1, 6):
        stock.append(models.train("stacked", steps, None, prepare=functools.partial(_reorder_sums, seed))["losses"])
    return {"stock": stock, "sluice": models.train("stacked", steps, models.SLUICE)["losses"]}


def _engine(kind: str = "stacked", sluice_section: dict[str, Any] | None = None, **section: Any) -> Any:
    options = {**models.SLUICE, **(sluice_section or {})}
    return models.engine(models.build(kind), models.expert_parallel(kind, **section), options)


def _layer(host: Any) -> Any:
    return models.moe_layers(host.module)[0][1]


def _loss(host: Any, step: int = 0) -> torch.Tensor:
    ids = models.batch(step)
    return host(input_ids=ids, labels=ids, use_cache=False).loss


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


def one_rank_refuses() -> str:
    """Rank 1 has a wrong width. It gets its own error, rank 0 an error that names rank 1, and the group continues."""
    host = _engine()
    layer = _layer(host)
    width = 32 + (4 if dist.get_rank() == 1 else 0)
    try:
        layer(torch.randn(2, 4, width))
        raise AssertionError("no error")
    except (RuntimeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    layer(torch.randn(2, 4, 32))
    host.sluice.unswap()
    return text


def container_hooked_after_the_swap() -> str:
    """Returns the error of each rank when rank 1 hooks the container of experts, which is no longer called."""
    host = _engine()
    layer = _layer(host)
    x = torch.randn(2, 4, 32)
    layer(x)
    hook = layer.experts.register_forward_hook(lambda *_: None) if dist.get_rank() == 1 else None
    try:
        layer(x)
        raise AssertionError("no error")
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    if hook is not None:
        hook.remove()
    layer(x)
    host.sluice.unswap()
    return text


def unequal_options() -> None:
    """The ranks ask for different numbers of chunks."""
    _engine(sluice_section={"chunks": 2 + dist.get_rank()})


def one_rank_skips() -> None:
    """Rank 1 omits the second forward."""
    host = _engine(sluice_section={"timeout": 10})
    with torch.no_grad():
        _layer(host)(torch.randn(2, 4, 32))
        if dist.get_rank() == 0:
            _layer(host)(torch.randn(2, 4, 32))


def one_rank_dies(where: str) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a step. Returns the error in the loop of rank 0, and the delay of the error."""
    host = _engine()
    host.backward(_loss(host))

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        layer = models.moe_layers(host.module)[1 if where == "forward" else 0][1]
        if where == "forward":
            layer.register_forward_pre_hook(die)
        else:  # in the first layer's backward, after the second layer's
            layer.register_full_backward_pre_hook(die)
    began = time.monotonic()
    try:
        host.backward(_loss(host, 1))
        return {"error": "none"}
    except Exception as error:
        seconds = time.monotonic() - began
        host.sluice.unswap()
        return {"error": f"{type(error).__name__}: {error}", "peer": getattr(error, "peer", None), "s": seconds}


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


def comms_records() -> dict[str, int]:
    """Records in the host's logger for forward and backward."""
    import deepspeed.comm as comm

    host = _engine()
    comm.configure(enabled=True, prof_all=True, verbose=False)
    try:
        host.backward(_loss(host))
        logger = comm.comm.comms_logger
        records = {name: sum(entry[0] for entry in sizes.values()) for name, sizes in logger.comms_dict.items()}
    finally:
        comm.configure(enabled=False)
        comm.comm.comms_logger.comms_dict.clear()
    host.sluice.unswap()
    return records


def checkpoint(folder: str, writer: str, config: dict[str, Any]) -> Any:
    """Makes stock load a checkpoint of Sluice, or the reverse. Returns later losses, and the contents of the files."""
    sections = {"stock": None, "sluice": models.SLUICE}
    other = {"stock": "sluice", "sluice": "stock"}[writer]
    hosts = {
        name: models.engine(
            models.build("deepseek_v3", 3 if name == writer else 4),
            models.expert_parallel("deepseek_v3"),
            sections[name],
            **config,
        )
        for name in (writer, other)
    }

    def train(host: Any, first: int) -> list[float]:
        losses = []
        for step in range(first, first + 3):
            loss = _loss(host, step)
            host.backward(loss)
            host.step()
            losses.append(float(loss.detach()))
        return losses

    train(hosts[writer], 0)
    hosts[writer].save_checkpoint(folder, tag="x")
    dist.barrier()
    path, _ = hosts[other].load_checkpoint(folder, tag="x")
    assert path is not None
    losses = {name: train(host, 3) for name, host in hosts.items()}
    contents = contents_of(os.path.join(folder, "x"))
    hosts["sluice"].sluice.unswap()
    dist.barrier()
    return losses, contents
