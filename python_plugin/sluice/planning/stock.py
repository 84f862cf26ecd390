# SPDX-License-Identifier: Apache-2.0
"""Models the step of one MoE layer of stock DeepSpeed (`MoE`) and of stock Megatron-Core (`MoELayer`, "alltoall").

The model counts the operations of these layers, forward and backward, on the most loaded rank: rows that are padded,
multiplied, moved and exchanged. The rates of a machine give the seconds. Nothing is fitted to a measured step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .planner import Workload
from .rates import FORMS, Rates

# The overhead of a torch call in the host's code, forward or backward, measured on machine B of docs/benchmarks with
# layers that have hardly any arithmetic. Megatron-Core's linear layers are autograd functions in Python.
OP_SECONDS = {"DeepSpeed": 3.5e-6, "Megatron-Core": 7.5e-6}
BYTES = {"f32": 4, "bf16": 2, "f16": 2}
SCALAR, INDEX = 4, 8  # bytes of a probability or logit, and of an index
PARTS = ("gate", "computation", "movement", "exchange", "calls")


@dataclass(frozen=True)
class Step:
    """Describes one step of one layer on a rank. seconds: by part. rows: multiplied by the rank's experts, with
    padding. sent: bytes that leave the rank. kept: bytes of rows that the forward keeps for the backward. calls: of
    torch."""

    seconds: dict[str, float]
    rows: float
    flops: float
    sent: float
    kept: float
    calls: int

    @property
    def total(self) -> float:
        """Returns the seconds without the gate, since prices of Sluice exclude the gate too."""
        return sum(self.seconds.values()) - self.seconds["gate"]


class _Count:
    """Accumulates the operations of a layer. Rows have the model's width."""

    def __init__(self, work: Workload, rates: Rates, grouped: bool) -> None:
        self.work, self.rates, self.grouped = work, rates, grouped
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.row = work.model_width * BYTES[work.dtype]
        self.local = work.num_experts // work.world_size
        self.flops = self.sent = self.kept = 0.0

    def move(self, rows: float, times: float = 1.0, width: float | None = None) -> None:
        """Adds moves of rows. times: 1 to read and write them, 0.5 to only read or only write them."""
        size = self.row if width is None else width * BYTES[self.work.dtype]
        self.seconds["movement"] += times * self.rates.rows(rows * size)

    def gate(self, each: float) -> None:
        """Adds the gate: f32 logits with gradients, and `each` bytes of masks and probabilities by token and expert."""
        work, rates = self.work, self.rates
        flops = 2.0 * work.num_tokens * work.model_width * work.num_experts
        seconds = sum(flops * rates.gemm("f32", form, work.num_tokens) for form in FORMS)
        self.flops += 3 * flops
        self.seconds["gate"] += seconds + rates.rows(work.num_tokens * work.num_experts * each / 2)

    def experts(self, rows: float) -> None:
        """Adds all GEMMs and the activation for `rows` rows in total."""
        work, rates = self.work, self.rates
        matrices = 3 if work.gated else 2
        touched = rows * (work.model_width + work.hidden_width * (matrices - 1)) * BYTES[work.dtype]
        for form in FORMS:
            backward = form != "forward"
            flops = 2.0 * rows * work.model_width * work.hidden_width * matrices
            seconds = flops * rates.gemm(work.dtype, form, rows / self.local)
            seconds += matrices * (1 if self.grouped else self.local) * rates.gemm_call
            if form != "weight_grad":
                seconds += rows * work.hidden_width * rates.activation(work.activation, backward)
            self.seconds["computation"] += seconds * rates.cache_miss(backward, touched)
            self.flops += flops

    def exchange(self, rows: float, width: float, times: int) -> None:
        """Adds `times` consecutive all-to-alls of `rows`. The rank's own share is not sent. width: bytes of a row."""
        ranks = self.work.world_size
        size = rows * width * (ranks - 1) / ranks
        self.sent += times * size
        self.seconds["exchange"] += times * self.rates.exchange(ranks, size)

    def step(self, rows: float, calls: int, op_seconds: float, is_device: bool) -> Step:
        """Returns the step. On a device, calls of the host overlap the work; on a CPU they do not."""
        called, worked = calls * op_seconds, sum(self.seconds.values())
        self.seconds["calls"] = max(0.0, called - worked) if is_device else called
        return Step(self.seconds, rows, self.flops, self.sent, self.kept, calls)


def capacity(work: Workload, expert_skew: float) -> int:
    """Returns rows of each expert and rank in DeepSpeed's layer without dropped tokens: all experts have as many as
    the most loaded one, whose rows are `expert_skew` times the mean."""
    mean = work.num_tokens * work.top_k / work.num_experts
    return min(work.num_tokens, math.ceil(round(mean * expert_skew, 6)))


def deepspeed(
    work: Workload, rates: Rates, expert_skew: float = 1.0, op_seconds: float = OP_SECONDS["DeepSpeed"],
    is_device: bool = False,
) -> Step:  # fmt: skip
    """Models DeepSpeed's step. Every expert gets `capacity` padded rows of each rank. Experts run one after another."""
    count = _Count(work, rates, grouped=False)
    tokens, copies = work.num_tokens, work.num_tokens * work.top_k
    slots = capacity(work, max(expert_skew, work.skew))
    rows = slots * work.num_experts
    several = work.world_size > 1 and count.local > 1  # an expert's rows of all ranks are not contiguous
    count.gate({1: 210.0, 2: 250.0}.get(work.top_k, 120.0))
    if work.top_k == 2:  # probabilities of both routes are products of rows
        count.flops += 8.0 * tokens * work.num_experts
    # Forward: a row of zeros is appended to the tokens, rows are gathered into the slots, and the experts' rows are
    # concatenated; then a row of zeros again, a gather of each token's rows, the product with probabilities, and a sum.
    for moved, times in ((tokens, 1.0), (rows, 1.0), (rows, 1.0), (rows, 1.0), (copies, 1.0), (copies, 1.0)):
        count.move(moved, times)
    count.move(copies + tokens, 0.5)
    # Backward: gradients of the product, added to zeros; the experts' gradients, concatenated; gradients of gathered
    # tokens, added to zeros; their sum with the gate's gradient.
    for moved, times in ((copies, 1.0), (copies, 2.0), (rows, 0.5), (copies, 1.5), (rows, 1.0), (tokens, 0.5),
                         (rows, 1.5), (tokens, 1.5)):  # fmt: skip
        count.move(moved, times)
    count.move(rows, 2.0 if several else 0.0)
    for width in (work.model_width, work.hidden_width):  # gradients of both biases
        count.move(rows, 0.5, width)
    count.experts(rows)
    count.exchange(rows, count.row, 4)
    count.seconds["exchange"] += rates.exchange(work.world_size, INDEX)  # ranks agree on the capacity
    hidden = (4 if work.gated else 2) * work.hidden_width * BYTES[work.dtype]
    count.kept = rows * (count.row + hidden) + copies * count.row
    calls = {1: 133, 2: 206}.get(work.top_k, 126) + 35 * count.local
    return count.step(rows, calls + (9 + 3 * count.local if work.world_size > 1 else 0), op_seconds, is_device)


def megatron(
    work: Workload, rates: Rates, expert_skew: float = 1.0, grouped: bool = True,
    op_seconds: float = OP_SECONDS["Megatron-Core"], is_device: bool = False,
) -> Step:  # fmt: skip
    """Models Megatron-Core's step. Rows are sorted by expert, not padded. Two more exchanges send the probabilities."""
    count = _Count(work, rates, grouped)
    tokens, copies = work.num_tokens, work.num_tokens * work.top_k
    rows = copies * work.skew
    count.gate(120.0)
    for moved, times in ((copies, 1.0), (tokens, 0.5), (copies, 1.5)):  # permute; unpermute adds to zeros
        count.move(moved, 2 * times)  # forward and backward
    if count.local > 1:  # sorted by expert after the exchange, concatenated after the experts, sorted by rank
        count.move(rows, 2 * 3.0)
    count.move(rows, 1.0 + 2.5, work.hidden_width)  # the product with the probabilities, and its gradients
    if work.gated:
        count.move(rows, 1.5 + 3.0, work.hidden_width)
    count.experts(rows)
    count.exchange(rows, count.row, 4)
    count.exchange(rows, SCALAR, 2)
    count.seconds["exchange"] += rates.exchange(work.world_size, INDEX * work.num_experts)  # counts of rows
    hidden = (5 if work.gated else 3) * work.hidden_width * BYTES[work.dtype]
    count.kept = rows * (count.row + hidden)
    calls = 124 + 27 * count.local if work.world_size > 1 else 82 + 26 * count.local
    return count.step(rows, calls, op_seconds, is_device)


MODELS: dict[str, Callable[..., Step]] = {"DeepSpeed": deepspeed, "Megatron-Core": megatron}
