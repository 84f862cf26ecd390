# SPDX-License-Identifier: Apache-2.0
"""Rank-side: traps of the host, one function for each, and other uses of its engines. The functions assert here, and
return values for the comparison of ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ds_models as models
import sluice
import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer
from ds_models import SLUICE, build, ds_config, engine, said
from sluice.adapters.deepspeed.moe.layer import SluiceMOELayer
from sluice.errors import InvalidArgument


def _swapped(layers: list[dict[str, Any]], sluice_section: dict[str, Any] | None = None, **config: Any) -> Any:
    return engine(build(layers), ds_config(**config), {**SLUICE, **(sluice_section or {})})


def _one_step(host: Any, step: int = 0, length: int | None = None) -> torch.Tensor:
    torch.manual_seed(step)
    x, target = models.batch(step, length)
    loss = host(x.to(next(host.module.parameters()).dtype), target)
    host.backward(loss)
    return loss.detach()


def _layer(host: Any, index: int = 0) -> Any:
    return host.module.moes[index].deepspeed_moe


def pointers_are_read_afresh() -> None:
    """Trap 2: ZeRO re-points `param.data`. Forward and backward must read the values at the new address."""
    host = _swapped([{"drop_tokens": False}])
    experts = list(_layer(host).experts.deepspeed_experts.parameters())
    x, target = models.batch(0)
    first = host(x, target)
    old = [parameter.data for parameter in experts]
    for parameter in experts:
        parameter.data = parameter.data.clone()
    for tensor in old:
        tensor.fill_(float("nan"))
    host.backward(first)  # the forward must have saved parameters, not addresses
    assert all(torch.isfinite(parameter.grad).all() for parameter in experts)
    again = host(x, target)
    assert torch.allclose(first, again, rtol=1e-6)
    for parameter in experts:
        parameter.data = parameter.data * 0.5
    assert not torch.equal(host(x, target), again)
    host.sluice.unswap()


def nothing_is_added_or_replaced(layers: list[dict[str, Any]]) -> None:
    """Trap 3, and unswap: checks names, objects, buffers and classes before, during and after the swap."""
    model = build(layers)
    before = _shape_of(model)
    host = engine(model, ds_config(), SLUICE)
    during = _shape_of(model)
    assert before == during
    _one_step(host)
    host.step()
    assert _shape_of(model) == before
    assert all(type(moe.deepspeed_moe) is SluiceMOELayer for moe in model.moes)
    assert all(isinstance(moe.deepspeed_moe, MOELayer) for moe in model.moes)
    attributes = [set(vars(moe.deepspeed_moe)) for moe in model.moes]
    host.sluice.unswap()
    host.sluice.unswap()
    assert _shape_of(model) == before
    for moe, names in zip(model.moes, attributes):
        assert type(moe.deepspeed_moe) is MOELayer
        assert "_sluice" not in vars(moe.deepspeed_moe)
        assert set(vars(moe.deepspeed_moe)) == names - {"_sluice"}
    _one_step(host, 1)


def _shape_of(model: Any) -> Any:
    return (
        [(name, id(parameter)) for name, parameter in model.named_parameters()],
        [(name, id(buffer)) for name, buffer in model.named_buffers()],
        [(name, type(module).__mro__[-3:]) for name, module in model.named_modules()],
        [(key, tuple(value.shape)) for key, value in model.state_dict().items()],
    )


def hooked_expert_runs_whole() -> None:
    """Without a configured n, a hooked module gets all rows in one call."""
    host = _swapped([{"ep_size": 1, "expert": "tuple"}], {"chunks": None})
    layer = _layer(host)
    calls: list[int] = []
    layer.experts.deepspeed_experts[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        layer.gate.wg.weight.zero_()
        for _ in range(20):
            layer(torch.randn(16, models.WIDTH), None)
    assert len(calls) == 20, calls
    host.sluice.unswap()


def attributes_as_stock() -> None:
    """Trap 6: l_aux, exp_counts and the times are those of stock."""
    host = _swapped([{}], wall_clock_breakdown=True)
    layer = _layer(host)
    x, target = models.batch(0)
    host(x, target)
    assert layer.exp_counts.dtype == torch.int64 and layer.exp_counts.shape == (4,)
    assert layer.l_aux.shape == () and layer.l_aux.dtype == torch.float32 and not layer.l_aux._is_view()
    layer.l_aux += 1.0  # Megatron changes l_aux in place
    assert layer.time_moe > 0 and layer.time_falltoall > 0 and layer.time_salltoall > 0 and layer.gate.gate_time > 0
    layer(x, torch.ones(x.shape[0] * x.shape[1]))
    assert layer.exp_counts.dtype == torch.float32  # exp_counts has the dtype of used_token
    host.sluice.unswap()


class Straight(models.Model):
    """Two layers without a loop, because dynamo skips a frame whose graph breaks inside a loop."""

    def forward(self, x: torch.Tensor, target: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        out, first_aux, _ = self.moes[0](h)
        h = h + out
        out, second_aux, _ = self.moes[1](h)
        loss = torch.nn.functional.mse_loss(self.last(h + out), target, reduction="sum") / 64
        return loss + 0.01 * (first_aux + second_aux)


def _straight() -> Straight:
    model = build([{"k": 2}, {"expert": "tuple"}])
    model.__class__ = Straight
    return model


def compiled(how: str) -> list[Any]:
    """Trap 9: compiles a model around the layers. Returns [losses of stock, losses, graphs, passes of Sluice].

    The harness disables dynamo while the host is imported, so that Inductor does not compile helpers of its gate.
    """
    stock = engine(_straight(), ds_config())
    losses: list[list[float]] = [[], []]
    for step in range(4):
        losses[0].append(float(_one_step(stock, step)))
        stock.step()
    stock.destroy()
    graphs: list[int] = []

    def eager(module: Any, _inputs: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    before = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    disabled, torch._dynamo.config.disable = torch._dynamo.config.disable, False
    try:
        model = _straight()
        host = engine(torch.compile(model, backend=eager) if how == "torch" else model, ds_config(), SLUICE)
        if how == "engine":
            host.compile(backend=eager)
        assert all(type(moe.deepspeed_moe) is SluiceMOELayer for moe in model.moes)
        for step in range(4):
            losses[1].append(float(_one_step(host, step)))
            host.step()
        passes = sluice.stats(model.moes[0])["contexts"][0]["num_passes"]
        host.sluice.unswap()
    finally:
        torch._dynamo.config.disable = disabled
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before
        torch._dynamo.reset()
    return [*losses, graphs, passes]


def autocast_keeps_no_copy() -> list[str]:
    """Trap 13: rows have autocast's dtype, and autograd saves the parameters and not casts of them."""
    host = _swapped([{"k": 2}])
    layer = _layer(host)
    kept: list[torch.Tensor] = []
    x = torch.randn(12, models.WIDTH)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = layer(x, None)
    assert out.dtype == torch.bfloat16
    weights = {tuple(p.shape) for p in layer.experts.parameters() if p.dim() == 2}
    casts = [t for t in kept if t.dtype == torch.bfloat16 and tuple(t.shape) in weights]
    assert not casts
    out.float().sum().backward()
    gradients = {str(p.grad.dtype) for p in layer.experts.parameters()}
    host.sluice.unswap()
    return sorted(gradients)


def no_grad_saves_nothing() -> None:
    """Trap 14: a forward under no_grad saves nothing."""
    host = _swapped([{}])
    layer = _layer(host)
    host.eval()
    with torch.no_grad():
        out = layer(torch.randn(12, models.WIDTH), None)
    assert not out.requires_grad
    assert sluice.stats(layer)["contexts"][0]["saved_bytes"] == 0
    host.sluice.unswap()


def alone_never_communicates() -> int:
    """Trap 10: only rank 0 runs a layer with ep_size 1. No rank waits, and no group is made."""
    from sluice.adapters.torch import group

    host = _swapped([{"ep_size": 1}])
    known = set(group._groups)
    if dist.get_rank() == 0:
        layer = _layer(host)
        x = torch.randn(8, models.WIDTH, requires_grad=True)
        layer(x, None).sum().backward()
        layer(x, None)
    assert set(group._groups) == known
    sent = sluice.stats(_layer(host))["contexts"][0]["bytes_sent"]
    host.sluice.unswap()
    return sent


def host_collectives_in_between() -> None:
    """Trap 10: the host has its own messages on the layer's ep_group in flight during Sluice's passes, at a different
    time on each rank. gloo matches messages in order of issue, so in a shared group messages would be mixed."""
    host = _swapped([{"k": 2, "top2_2nd_expert_sampling": False}], {"gemm": "native"})
    layer, rank = _layer(host), dist.get_rank()
    x = torch.randn(12, models.WIDTH, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    alone = layer(x, None)
    alone.sum().backward()
    wanted, gradient = alone.detach().clone(), x.grad.clone()
    mine = layer._sluice.backend.context.ep_group._joined.group
    assert mine is not layer.ep_group and mine is not dist.group.WORLD
    for step in range(6):
        x.grad = None
        total = torch.full((1000,), float(rank + 1 + step))
        got, sent = torch.full((50,), -1.0), torch.full((50,), 10.0 * step + rank)
        works = []

        def start(total: Any = total, got: Any = got, sent: Any = sent, works: Any = works) -> None:
            works.append(dist.all_reduce(total, group=layer.ep_group, async_op=True))
            works.append(dist.isend(sent, 1 - rank, group=layer.ep_group))
            works.append(dist.irecv(got, 1 - rank, group=layer.ep_group))

        at = (step + 2 * rank) % 3  # before, between or after the passes
        if at == 0:
            start()
        out = layer(x, None)
        if at == 1:
            start()
        out.sum().backward()
        if at == 2:
            start()
        for work in works:
            work.wait()
        assert torch.equal(out.detach(), wanted) and torch.equal(x.grad, gradient)
        assert (total == 2 * step + 3).all() and (got == 10 * step + 1 - rank).all()
    host.sluice.unswap()


def one_rank_skips(drop: bool, how: str) -> None:
    """Trap 11: rank 1 omits the layer, or calls another layer. Rank 0 raises."""
    host = _swapped([{"drop_tokens": drop}, {"drop_tokens": drop}], {"timeout": 10})  # also covers the swap
    x = torch.randn(12, models.WIDTH)
    with torch.no_grad():
        _layer(host)(x, None)
    if dist.get_rank() == 0:
        _layer(host)(x, None)
    elif how == "other layer":
        _layer(host, 1)(x, None)


def rank_errs(
    how: str,
    bad: int = 1,
    options: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    first_call: bool = False,
    **config: Any,
) -> str:
    """Runs `errs` with a layer with these options. first_call: the layer has not run before."""
    host = _swapped([options or {}], section, **config)
    layer = _layer(host)
    text = errs(layer, lambda width: layer(torch.randn(8, width), None), models.WIDTH, how, bad, first_call)
    host.sluice.unswap()
    return text


def errs(layer: Any, call: Callable[[int], Any], width: int, how: str, bad: int = 1, first_call: bool = False) -> str:
    """Rank `bad` uses a layer wrongly in this way. Returns each rank's error or warning. Then the rank undoes it, and
    the group goes on. call: calls the layer with rows of a width"""
    if not first_call:
        call(width)
    is_bad, undo = dist.get_rank() == bad, list[Callable[[], Any]]()
    if is_bad and how == "experts in f64":
        undo.append(layer.experts.double().float)
    elif is_bad and how.startswith("hook"):
        hooked = layer.experts if how == "hook on the container" else layer.experts.deepspeed_experts[0]
        undo.append(hooked.register_forward_hook(lambda *_: None).remove)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text, _ = (said(lambda: call(width + 4 * (is_bad and how == "other width"))) for _ in range(2))
    warned = [str(warning.message) for warning in caught if "sluice:" in str(warning.message)]
    assert len(warned) <= 1, warned
    for each in undo:
        each()
    call(width)
    return text or "".join(warned)


def adapters_on_experts(expert: str, before: bool) -> None:
    """Runs PEFT's LoRA on experts' Linears in each state (lora_states.py). before: add an adapter before the swap."""
    import lora_states  # imports transformers, which takes a second on each rank of the many files that import this one

    model = build([{"k": 2, "expert": expert}])
    if before:
        lora_states.add(model.moes[0].deepspeed_moe.experts, "earlier")
    host = engine(model, ds_config(), SLUICE)
    layer = _layer(host)
    x, target = models.batch(0)

    def call() -> tuple[torch.Tensor, str]:
        torch.manual_seed(1)
        loss = model(x, target)
        return loss, sluice.stats(layer)["layers"][0]["computed_by"]

    lora_states.compare(layer.experts, list(layer.experts.deepspeed_experts), call)
    host.sluice.unswap()


# ---- beyond the list of traps ----


def _tensors(value: Any, path: str = "") -> Iterator[str]:
    """Yields the place and shape of each tensor of a file, at any depth."""
    if isinstance(value, torch.Tensor):
        yield f"{path} {list(value.shape)} {value.dtype}"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _tensors(inner, f"{path}/{index}")


def contents_of(folder: str) -> dict[str, list[str]]:
    """Returns the places and shapes of the tensors in each file of a checkpoint, on rank 0."""
    files = sorted(os.listdir(folder)) if dist.get_rank() == 0 else []
    read = functools.partial(torch.load, weights_only=False, map_location="cpu")
    return {file: sorted(_tensors(read(os.path.join(folder, file)))) for file in files}


def cross_loaded(
    make: Callable[[str], Any], step: Callable[[Any, int], torch.Tensor], folder: str, writer: str
) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Makes stock load a checkpoint of Sluice, or the reverse. Returns later losses, and the files' contents.

    make: makes the engine "stock" or "sluice"; step: runs a forward and a backward
    """
    hosts = {name: make(name) for name in (writer, *({"stock", "sluice"} - {writer}))}

    def train(host: Any, first: int) -> list[float]:
        losses = []
        for number in range(first, first + 3):
            losses.append(float(step(host, number)))
            host.step()
        return losses

    train(hosts[writer], 0)
    hosts[writer].save_checkpoint(folder, tag="x")
    dist.barrier()
    for name, host in hosts.items():
        assert name == writer or host.load_checkpoint(folder, tag="x")[0] is not None
    losses = {name: train(host, 3) for name, host in hosts.items()}
    contents = contents_of(os.path.join(folder, "x"))
    hosts["sluice"].sluice.unswap()
    dist.barrier()
    return losses, contents


def checkpoint(folder: str, writer: str, layers: list[dict[str, Any]], config: dict[str, Any]) -> Any:
    """Runs `cross_loaded`."""
    sections = {"stock": None, "sluice": SLUICE}

    def make(name: str) -> Any:
        return engine(build(layers, seed=0 if name == writer else 1), ds_config(**config), sections[name])

    return cross_loaded(make, _one_step, folder, writer)


def copies_are_stock() -> None:
    """Checks that deepcopy and pickle of a swapped layer give a layer of the host."""
    host = _swapped([{"ep_size": 1, "drop_tokens": False}])
    layer = _layer(host)
    layer(torch.randn(8, models.WIDTH), None)
    group = layer.ep_group
    layer.l_aux = layer.gate.ep_group = layer.ep_group = None  # a layer cannot be copied with these
    twin = copy.deepcopy(layer)
    assert type(twin) is MOELayer and "_sluice" not in vars(twin)
    assert list(twin.state_dict()) == list(layer.state_dict())
    written = pickle.dumps(layer)
    assert b"sluice" not in written  # the file loads without Sluice
    again = pickle.load(io.BytesIO(written))
    assert type(again) is MOELayer and type(layer) is SluiceMOELayer
    for one in (layer, twin):
        one._set_ep_group(group)  # without a group, 0.15.4 exchanges rows with all ranks
    torch.manual_seed(0)
    x = torch.randn(8, models.WIDTH)
    assert torch.allclose(twin(x, None), layer(x, None), atol=1e-6)
    host.sluice.unswap()


def comms_records(section: dict[str, Any] | None) -> dict[str, int]:
    """Records in the host's logger for forward and backward. section: of ds_config; None: a call enables the logger."""
    import deepspeed.comm as comm

    host = _swapped([{}], **({} if section is None else {"comms_logger": section}))
    if section is None:
        comm.configure(enabled=True, prof_all=True, verbose=False)
    try:
        _one_step(host)
        logger = comm.comm.comms_logger if hasattr(comm, "comm") else comm.comms_logger
        records = {name: sum(entry[0] for entry in sizes.values()) for name, sizes in logger.comms_dict.items()}
        sizes = [size for name in ("sluice_forward", "sluice_backward") for size in logger.comms_dict[name]]
        assert all(size > 0 for size in sizes)
        comm.log_summary()
    finally:
        comm.configure(enabled=False)
        logger.comms_dict.clear()
    host.sluice.unswap()
    return records


def trace_and_stats(folder: str) -> list[str]:
    """Returns the trace of two steps."""
    host = _swapped([{"k": 2}])
    sluice.trace.start()
    _one_step(host)
    path = os.path.join(folder, f"trace{dist.get_rank()}.json")
    with contextlib.suppress(InvalidArgument):
        sluice.trace.stop(of=path)  # this names no layer, so recording continues
    events = sluice.trace.stop(path, of=host)
    assert {event["direction"] for event in events} == {"forward", "backward"}
    (numbers,) = sluice.stats(host.module.moes[0])["contexts"]
    assert numbers["bytes_sent"] > 0 and numbers["ranks"] == [0, 1] and numbers["num_passes"] == 2
    assert host.sluice.stats() == sluice.stats(_layer(host))
    asked = [sluice.stats(each) for each in (host, host.module, [_layer(host)], [host, host.module])]
    assert all(found == host.sluice.stats() for found in asked)
    assert sluice.decisions(host) == sluice.decisions(_layer(host)) == sluice.decisions(host.module.moes[0])
    (before,) = sluice.stats(_layer(host), reset_peak=True)["contexts"]
    (after,) = sluice.stats(_layer(host))["contexts"]
    assert before["peak_bytes"] > before["current_bytes"] and after["peak_bytes"] == before["current_bytes"]
    host.sluice.unswap()
    return sorted({event["lane"] for event in events})


def asked_without_sluice() -> list[str]:
    """Returns the output of `sluice.stats` and `sluice.decisions` for engines without a layer on Sluice."""
    off, stock, unswapped = _swapped([{}], {"enabled": False}), engine(build([{}]), ds_config()), _swapped([{}, {}])
    unswapped.sluice.unswap()
    left = engine(build([{}]), ds_config(), {**SLUICE, "enabled": True})
    left.sluice.unswap()
    left.sluice.refused = ["MoE layer 'moes.0': a reason"]  # the state after "on_unsupported": "warn"
    said = []
    for given in (off, stock, unswapped, left, stock.module, torch.nn.Linear(2, 2)):
        for ask in (sluice.stats, sluice.decisions):
            try:
                ask(given)
            except InvalidArgument as error:
                said.append(error.message)
    assert said[::2] == said[1::2]
    return said[::2]


def second_engine_on_the_same_ranks() -> None:
    """Two models share a group. Each ends separately, and a third model starts after both."""
    one, two = _swapped([{}]), _swapped([{"k": 2}])
    _one_step(one)
    _one_step(two)
    one.sluice.unswap()
    _one_step(two, 1)
    two.sluice.unswap()
    three = _swapped([{}])
    _one_step(three)
    three.sluice.unswap()
