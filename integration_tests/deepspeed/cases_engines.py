# SPDX-License-Identifier: Apache-2.0
"""Rank-side: cases of whole engines beyond the list of traps: tokens, checkpoints, copies, records and ends. The cases
assert here, and return values for the comparison of ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pickle
from collections.abc import Iterator
from typing import Any

import ds_models as models
import sluice
import torch
import torch.distributed as dist
from cases_traps import _layer, _one_step, _swapped
from deepspeed.moe.sharded_moe import MOELayer
from ds_models import SLUICE, build, ds_config, engine
from sluice.adapters.deepspeed.moe.layer import SluiceMOELayer
from sluice.errors import InvalidArgument


def uneven_tokens(lengths: list[int], k: int, drop: bool) -> list[float]:
    """Trains with different numbers of tokens on the ranks, including none."""
    host = _swapped([{"k": k, "drop_tokens": drop}, {"k": k, "drop_tokens": drop, "expert": "tuple"}])
    losses = []
    for step in range(3):
        losses.append(float(_one_step(host, step, lengths[dist.get_rank()])))
        host.step()
    host.sluice.unswap()
    return losses


def uneven_tokens_in_stock() -> None:
    """Runs a step of stock DeepSpeed with different numbers of tokens on the ranks."""
    host = engine(build([{}]), ds_config())
    _one_step(host, 0, [12, 16][dist.get_rank()])


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


def checkpoint(folder: str, writer: str, layers: list[dict[str, Any]], config: dict[str, Any]) -> Any:
    """Makes stock load a checkpoint of Sluice, or the reverse. Returns the files' contents, and later losses."""
    sections = {"stock": None, "sluice": SLUICE}
    other = {"stock": "sluice", "sluice": "stock"}[writer]
    hosts = {}
    losses = {}
    for name in (writer, other):
        hosts[name] = engine(build(layers, seed=0 if name == writer else 1), ds_config(**config), sections[name])
    for step in range(3):
        _one_step(hosts[writer], step)
        hosts[writer].step()
    hosts[writer].save_checkpoint(folder, tag="x")
    dist.barrier()
    path, _ = hosts[other].load_checkpoint(folder, tag="x")
    assert path is not None
    for name, host in hosts.items():
        losses[name] = []
        for step in range(3, 6):
            losses[name].append(float(_one_step(host, step)))
            host.step()
    contents = contents_of(os.path.join(folder, "x"))
    hosts["sluice"].sluice.unswap()
    dist.barrier()
    return losses, contents


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


def reset_of_an_engine() -> None:
    """Two layers share a context, whose totals appear once and whose peak is reset."""
    host = _swapped([{}, {}])
    _one_step(host)
    found = sluice.stats(host, reset_peak=True)
    (total,) = found["contexts"]
    assert [layer["contexts"] for layer in found["layers"]] == [[0], [0]]
    assert total["peak_bytes"] > total["current_bytes"]
    assert [each["peak_bytes"] for each in sluice.stats(host)["contexts"]] == [total["current_bytes"]]
    host.sluice.unswap()


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
