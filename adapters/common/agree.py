# SPDX-License-Identifier: Apache-2.0
"""Compares values between all ranks of a group before the first swap.

The values go through the store of torch.distributed and not by a collective. A rank that does not take part (Sluice is
missing or switched off there) therefore becomes an error that names it, and not a hang.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sluice.errors import Mismatch
from torch.distributed import distributed_c10d as c10d

_rounds: dict[tuple[int, ...], itertools.count[int]] = {}
DEFAULT_WAIT_S = 600.0  # ranks come here together; only loading a model may delay some


class DisagreementError(Mismatch):
    """The ranks of one expert-parallel group were configured differently."""


def exchange(
    ranks: Sequence[int], rank: int, value: Any, wait_s: float | None, absent: str | None = None
) -> dict[int, Any]:
    """Returns every rank's value, by rank. Collective over `ranks`; all must call it equally often. absent: the error
    text for a rank that does not take part."""
    if len(ranks) == 1:
        return {rank: value}
    number = next(_rounds.setdefault(tuple(ranks), itertools.count()))
    prefix = f"sluice/swap/{'.'.join(map(str, ranks))}/{number}"
    store = c10d._get_default_store()
    store.set(f"{prefix}/{rank}", json.dumps(value))
    deadline = time.monotonic() + (DEFAULT_WAIT_S if wait_s is None else wait_s)
    answers = {}
    for peer in ranks:
        try:
            store.wait([f"{prefix}/{peer}"], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except Exception as error:
            why = absent or (
                f"did not enable Sluice for the group of ranks {list(ranks)}: check that Sluice is "
                'installed, its config has the same "sluice" section and SLUICE is not 0'
            )
            raise DisagreementError(f"rank {peer} {why} ({type(error).__name__})") from None
        answers[peer] = json.loads(store.get(f"{prefix}/{peer}"))
    return answers


def require_equal(what: str, answers: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises DisagreementError with ranks and values for the first key that differs."""
    first = next(iter(answers))
    for peer, answer in answers.items():
        for key in sorted(set(answer) | set(answers[first])):
            mine, theirs = answers[first].get(key), answer.get(key)
            if mine != theirs:
                raise DisagreementError(f'{what}: "{key}" is {mine!r} on rank {first} and {theirs!r} on rank {peer}')
