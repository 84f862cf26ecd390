# SPDX-License-Identifier: Apache-2.0
"""Rank-side: compares an experts module of any family, with its experts split over all ranks, with the whole
module."""

from __future__ import annotations

import copy
from typing import Any

import sluice
import tf_compare
import tf_families
import torch
import torch.distributed as dist
from tf_compare import Rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import apply_expert_parallelism

MODEL, HIDDEN, EXPERTS, TOP_K = 37, 29, 6, 3
CLASS_OF = dict(tf_families.classes())
# The tokens of the first ranks, and whether only the first rank's experts are chosen.
CASES = (((23, 17), False), ((0, 9), False), ((12, 5), True), ((0, 0), False), ((1, 300), False))


class _Block(torch.nn.Module):
    """The unit that transformers' plan splits: a module with `experts`."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts


def share_out(whole: torch.nn.Module) -> torch.nn.Module:
    """Returns a copy whose experts are split over the ranks; each rank has its own batch."""
    block = _Block(copy.deepcopy(whole))
    stacked = [name for name, _ in whole.named_parameters(recurse=False)]
    plan = {f"experts.{name}": "grouped_gemm" for name in stacked} | {"experts": "ep_dispatch_experts"}
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    apply_expert_parallelism(block, mesh["ep"], mesh["tp"], plan, "sluice")
    return block.experts


def _rows_of_each(case: int) -> list[Rows]:
    """Returns the rows of every rank; all tokens of a case also choose expert 0, so that some choose it twice."""
    counts, first_alone = CASES[case]
    found = []
    for rank in range(dist.get_world_size()):
        tokens = counts[rank] if rank < len(counts) else 4
        given = tf_compare.rows(MODEL, EXPERTS, tokens, TOP_K, seed=10 * case + rank, hot=True)
        if first_alone:
            given.ids.remainder_(EXPERTS // dist.get_world_size())
        found.append(given)
    return found


def _joined(each: list[Rows]) -> Rows:
    return Rows(*(torch.cat([getattr(given, name) for given in each]) for name in ("tokens", "ids", "weights", "grad")))


def _whole_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns the whole gradient. Collective. For a parameter that is no DTensor it is the sum over ranks."""
    grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    dist.all_reduce(grad)
    return grad


def family(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the worst gap of every case to eager in f64 over all ranks' rows, and what computed the experts."""
    sluice.configure(**options)
    try:
        whole = tf_families.make(kind, CLASS_OF[kind], MODEL, HIDDEN, EXPERTS)
        experts = share_out(whole)
        gaps = []
        for case in range(len(CASES)):
            each = _rows_of_each(case)
            wanted = tf_compare.reference(whole, _joined(each), torch.float32)
            mine = each[dist.get_rank()]
            start = sum(given.tokens.shape[0] for given in each[: dist.get_rank()])
            for name in ("output", "tokens", "weights"):
                wanted[name] = wanted[name][start : start + mine.tokens.shape[0]]
            found = tf_compare.run(experts, mine, torch.float32)
            with torch.no_grad():
                found["without gradients"] = experts(mine.tokens, mine.ids, mine.weights)
            wanted["without gradients"] = wanted["output"]
            for name, parameter in experts.named_parameters():
                found[name] = _whole_gradient(parameter)
            gaps.append(max(tf_compare.gaps(found, wanted).values()))
        return {"gaps": gaps, "computed_by": sluice.stats(experts)["layers"][0]["computed_by"]}
    finally:
        sluice.configure()
