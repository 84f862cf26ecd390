# SPDX-License-Identifier: Apache-2.0
"""Rank-side: compares a training by the host with the same training through Sluice, number by number."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

LEAST = 1e-6  # differences of smaller numbers are absolute


class Tolerance(NamedTuple):
    """Has the largest relative differences that a row allows. 0: equal bits."""

    loss: float
    gradient: float  # of the norm of all gradients
    norm: float  # of parameters
    tensor: float | None  # of a whole tensor, by the norm of the difference; None: only norms are compared
    update: float | None = None  # of the change of a tensor since the start
    counts: bool = True  # whether routes must be the same


BITS = Tolerance(0.0, 0.0, 0.0, 0.0)


@dataclass
class Run:
    """Has the results of a training."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of gradients, before each update or as reported by the host
    evaluations: list[float] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)
    start: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters before the first step
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last one
    saved: dict[str, torch.Tensor] = field(default_factory=dict)  # the contents of the checkpoint's files, by path


def _gap(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), LEAST) if a == a and b == b else (0.0 if (a != a) == (b != b) else float("inf"))


def _of_numbers(what: str, stock: list[float], ours: list[float], most: float) -> list[str]:
    if len(stock) != len(ours):
        return [f"{what}: {len(ours)} of them, stock {len(stock)}"]
    gaps = [_gap(a, b) for a, b in zip(stock, ours)]
    if max(gaps, default=0.0) <= most:
        return []
    return [f"{what}: gaps {[float(f'{gap:.2g}') for gap in gaps]}, at most {most:g}; stock {stock}, Sluice {ours}"]


def _of_tensors(
    what: str, stock: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor], allowed: Tolerance
) -> list[str]:
    if list(stock) != list(ours):
        return [f"{what}: only in stock {sorted(set(stock) - set(ours))}, only here {sorted(set(ours) - set(stock))}"]
    found = []
    for name, tensor in stock.items():
        other = ours[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            found.append(f"{what} {name}: {other.dtype}{list(other.shape)}, stock {tensor.dtype}{list(tensor.shape)}")
            continue
        a, b = tensor.double(), other.double()
        norm = max(a.norm().item(), LEAST)
        off = {"norm": abs(a.norm() - b.norm()).item() / norm, "tensor": (a - b).norm().item() / norm}
        for kind, most in (("norm", allowed.norm), ("tensor", allowed.tensor)):
            if most is not None and not off[kind] <= most:
                found.append(f"{what} {name}: {kind} off by {off[kind]:.2g}, at most {most:g}")
    return found


def _of_updates(stock: Run, ours: Run, most: float) -> list[str]:
    """Compares the updates of tensors. The difference is relative to at least a bf16 rounding of the tensor."""
    found = []
    for name, start in stock.start.items():
        a, b = (run.parameters[name].double() - start.double() for run in (stock, ours))
        off = (a - b).norm().item() / max(a.norm().item(), 2**-8 * start.double().norm().item(), LEAST)
        if not off <= most:
            found.append(f"update of {name}: off by {off:.2g}, at most {most:g}")
    return found


def differences(stock: Run, ours: Run, allowed: Tolerance) -> list[str]:
    """Returns the differences as text; empty if all is equal."""
    found = _of_numbers("losses", stock.losses, ours.losses, allowed.loss)
    found += _of_numbers("gradient norms", stock.norms, ours.norms, allowed.gradient)
    found += _of_numbers("evaluations", stock.evaluations, ours.evaluations, allowed.loss)
    if allowed.counts and stock.counts != ours.counts:
        found.append(f"counts: stock {stock.counts}, Sluice {ours.counts}")
    found += _of_tensors("parameter", stock.parameters, ours.parameters, allowed)
    found += _of_updates(stock, ours, allowed.update) if allowed.update is not None else []
    found += _of_tensors("file", stock.saved, ours.saved, allowed)
    assert len(set(stock.losses)) > 1, "stock has trained nothing"
    return found


def tensors_in(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Returns all tensors in nested containers, by path."""
    if isinstance(value, torch.Tensor):
        return {path: value.detach().clone()}
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    return {where: tensor for key, inner in items for where, tensor in tensors_in(inner, f"{path}/{key}").items()}


def both_ways(host: str, row: dict[str, str]) -> dict[str, Any]:
    """Trains a row by the host and through Sluice, and returns the differences, or which side refused it and the error.

    HOST_ranks.py has `train(row, options or None, folder)` and `tolerance(row)`, and HOST_table.py has `options(row)`
    if there are any. The folder is the same for all ranks, and new in each training. If the row's "stock" is "hangs",
    only Sluice trains, and must refuse.
    """
    ranks, table = (importlib.import_module(f"{host}_{part}") for part in ("ranks", "table"))
    options = table.options(row) if hasattr(table, "options") else {}
    runs = []
    sides = (("stock", None), ("sluice", options))
    for who, given in sides[1:] if row.get("stock") == "hangs" else sides:
        with tempfile.TemporaryDirectory() as own:
            shared = [own]
            dist.broadcast_object_list(shared)
            try:
                runs.append(ranks.train(row, given, shared[0]))
            except Exception as error:
                print(f"{who} refused: {type(error).__name__}: {error}", flush=True)  # a peer may wait for this rank
                return {"refused_by": who, "type": type(error).__name__, "words": str(error)[:2000]}
            finally:
                dist.barrier()
    if len(runs) == 1:
        return {"differences": ["Sluice trains, and stock hangs"]}
    return {"differences": differences(*runs, ranks.tolerance(row))}
