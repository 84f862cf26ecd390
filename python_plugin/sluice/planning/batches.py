# SPDX-License-Identifier: Apache-2.0
"""Predicts a batch of a pipeline without running it, by `sluice_pipeline_predict`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._library import load
from ..errors import InvalidArgument, OverBudget
from .errors import BadInput

OPEN = "adaptive"  # the library chooses one of the other policies
PLACEMENTS = {None: -1, "looped": 0, "v": 1}


@dataclass(frozen=True)
class Batch:
    """Has the fields of sluice_pipeline_workload_t: seconds and bytes of one micro-batch, by virtual stage in the order
    of the layers; an empty list stands for zeros. memory_budget: bytes of each stage. op_seconds(op, virtual_stage,
    micro_batch, begin_seconds, seconds) returns the duration of an op, which replaces `seconds`; `predict` raises what
    it raises."""

    num_stages: int
    num_micro_batches: int
    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]
    weight_seconds: Sequence[float] = ()
    message_seconds: Sequence[float] = ()
    activation_bytes: Sequence[int] = ()
    held_bytes: Sequence[int] = ()
    memory_budget: Sequence[int] = ()
    policy: str = "backward_first"
    num_virtual: int = 1
    placement: str | None = None
    separate_wgrad: bool | None = None
    in_flight: int = 0
    rendezvous: bool = False
    shares_cards: bool = False
    op_seconds: Callable[[str, int, int, float, float], float] | None = None


@dataclass(frozen=True)
class Prediction:
    """Describes a predicted batch. policy: as used. stages: the members of sluice_stage_prediction_t by name."""

    policy: str
    separate_wgrad: bool | None  # as requested
    seconds: float
    bubble: float
    in_flight: int
    is_chosen: bool
    stages: tuple[dict[str, Any], ...]

    @property
    def most_bytes(self) -> int:
        """Returns the largest number of bytes that a stage may take."""
        return max(stage["planned_bytes"] for stage in self.stages)


def policies() -> list[str]:
    """Returns the names of the policies of a pipeline."""
    library, names = load(), []
    while True:
        name = library.lib.sluice_pipeline_policy_name(len(names))
        if not name:
            return names
        names.append(library.ffi.string(name).decode())


def predict(batch: Batch) -> Prediction:
    """Predicts the batch. InvalidArgument if the policy does not support it, OverBudget if nothing fits. Any thread."""
    library = load()
    ffi = library.ffi
    value, kept = library.new("pipeline_workload"), []
    value.policy = policy = ffi.new("char[]", batch.policy.encode())
    kept.append(policy)
    for name in ("num_stages", "num_virtual", "num_micro_batches", "in_flight"):
        setattr(value, name, getattr(batch, name))
    value.placement, value.rendezvous = PLACEMENTS[batch.placement], int(batch.rendezvous)
    value.shares_cards = int(batch.shares_cards)
    raised: list[BaseException] = []
    if batch.op_seconds is not None:
        kept.append(_seconds_callback(ffi, batch.op_seconds, raised))
        value.op_seconds = kept[-1]
    value.separate_wgrad = -1 if batch.separate_wgrad is None else int(batch.separate_wgrad)
    count = batch.num_stages * batch.num_virtual
    for name, kind, wanted in (
        *((f"{name}_seconds", "double[]", count) for name in ("forward", "backward", "weight", "message")),
        *((f"{name}_bytes", "uint64_t[]", count) for name in ("activation", "held")),
        ("memory_budget", "uint64_t[]", batch.num_stages),
    ):
        given = getattr(batch, name)
        if given and len(given) != wanted:
            raise BadInput(f"{name} has {len(given)} entries instead of {wanted}")
        if given:
            kept.append(ffi.new(kind, list(given)))
            setattr(value, name, kept[-1])
    out = ffi.new("sluice_pipeline_prediction_t *")
    out.struct_size = ffi.sizeof(out[0])
    stages = ffi.new("sluice_stage_prediction_t[]", batch.num_stages)
    status = library.lib.sluice_pipeline_predict(value, out, stages)
    if raised:
        raise raised[0]
    library.check(status)
    names = [name for name, _ in ffi.typeof("sluice_stage_prediction_t").fields if name != "reserved"]
    of_stages = tuple({name: getattr(stages[s], name) for name in names} for s in range(batch.num_stages))
    numbers = out.seconds, out.bubble, out.in_flight, bool(out.is_chosen)
    return Prediction(ffi.string(out.policy).decode(), batch.separate_wgrad, *numbers, of_stages)


def _seconds_callback(ffi: Any, seconds_of: Callable[..., float], raised: list[BaseException]) -> Any:
    """Makes the callback for the library. An exception is kept in `raised`; the library gets NaN, which it refuses."""

    def asked(user: Any, op: Any, virtual_stage: int, micro_batch: int, begin_s: float, seconds: float) -> float:
        return float(seconds_of(ffi.string(op).decode(), virtual_stage, micro_batch, begin_s, seconds))

    def caught(kind: Any, error: BaseException, trace: Any) -> None:
        raised.append(error)

    return ffi.callback(
        "double(void *, const char *, int32_t, int32_t, double, double)", asked, error=math.nan, onerror=caught
    )


def candidates(batch: Batch) -> tuple[list[Prediction], dict[str, str]]:
    """Returns predictions of every policy that supports the batch, the fastest first, and for each other policy the
    reason. Both with and without separate weight gradients, if the batch leaves that open."""
    found, refused = [], {}
    for policy in policies():
        if policy == OPEN:
            continue
        for separate in (False, True) if batch.separate_wgrad is None else (batch.separate_wgrad,):
            try:
                found.append(predict(replace(batch, policy=policy, separate_wgrad=separate)))
            except (InvalidArgument, OverBudget) as error:
                refused.setdefault(policy, error.message)
    taken = {each.policy for each in found}
    found.sort(key=lambda each: (each.seconds, each.most_bytes))
    return found, {policy: why for policy, why in refused.items() if policy not in taken}


def checkpoint_interval(num_layers: int, num_stages: int) -> int:
    """Returns the number of layers between two checkpoints, if activations are recomputed: the factor of N / G_inter
    (layers of a stage) nearest to the square root of N [AxoNN V-A], and the smaller one if two are equally near."""
    own = max(1, -(-num_layers // num_stages))
    factors = [each for each in range(1, own + 1) if own % each == 0]
    return min(factors, key=lambda each: (abs(each - math.sqrt(num_layers)), each))
