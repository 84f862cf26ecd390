# SPDX-License-Identifier: Apache-2.0
"""Simulates, in virtual time, a batch of a pipeline in which layers move to another stage.

Stages run 1F1B, and a message takes no time. The rules of `sluice_layer_move_*` hold at each cut: the layers run on
their new stage from the first forward that the upper stage starts after it knows that the layers have arrived. If
layers move down, a gradient from the lower stage carries this information.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from . import batches

_FORWARD = 1 / 3  # share of the forward in a layer's time; mostly affects when gradients arrive
_SAME = 1e-9  # seconds: the library's simulation takes times that differ by less for one moment


class Batch(NamedTuple):
    """seconds: of the whole batch; triggers: by bound of the partition, the first micro-batch whose layers run on their
    new stage. -1: the layers move at the end of the batch, or nothing moves at this bound."""

    seconds: float
    triggers: tuple[int, ...]


def batch_of(
    seconds: Sequence[float], old: Sequence[int], new: Sequence[int], arrivals: Sequence[float], micro_batches: int
) -> Batch:
    """Simulates a batch that begins with the partition `old` and ends with `new`. seconds: of a micro-batch in each
    layer; arrivals: by bound, when the layers have arrived, in seconds. Pure."""
    sums, count = [0.0, *accumulate(seconds)], len(old) - 1
    triggers = [-1] * len(old)
    told = [float("inf")] * len(old)  # by bound: when the upper stage knows of the arrival

    def op_seconds(op: str, stage: int, micro_batch: int, begin_s: float, _: float) -> float:
        """Called by the library in the order in which ops start."""
        below, is_forward = stage + 1, op == "forward"
        if not is_forward and op != "backward":
            return 0.0
        if is_forward and new[below] != old[below] and triggers[below] < 0:
            known = arrivals[below] if new[below] > old[below] else told[below]
            if known <= begin_s + _SAME:
                triggers[below] = micro_batch
        first, end = ((new if 0 <= triggers[at] <= micro_batch else old)[at] for at in (stage, below))
        took = (sums[end] - sums[first]) * (_FORWARD if is_forward else 1 - _FORWARD)
        if not is_forward and begin_s + took >= arrivals[stage]:  # this gradient goes to the stage above
            told[stage] = min(told[stage], begin_s + took)
        return took

    zero = [0.0] * count
    batch = batches.Batch(count, micro_batches, zero, zero, policy="1f1b", separate_wgrad=False, op_seconds=op_seconds)
    return Batch(max(batches.predict(batch).seconds, *arrivals), tuple(triggers))
