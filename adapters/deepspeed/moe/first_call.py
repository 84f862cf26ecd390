# SPDX-License-Identifier: Apache-2.0
"""Makes checks for which a host's expert must run, once for each expert, in its first call with gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def random_state() -> torch.Tensor:
    """Returns the state that is compared before and after a call."""
    return torch.random.get_rng_state()


def foreign_leaves(result: torch.Tensor, rows: torch.Tensor, expert: nn.Module) -> list[torch.Tensor]:
    """Returns tensors other than the expert's parameters that need a gradient, which Sluice cannot give them.

    result  the expert's output for `rows`
    """
    own = {id(parameter) for parameter in expert.parameters()}
    return [leaf for leaf in _leaves(result, rows.grad_fn) if id(leaf) not in own]


def _leaves(result: torch.Tensor, stop: object) -> Iterator[torch.Tensor]:
    pending, seen = [result.grad_fn], {stop, None}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        pending.extend(following for following, _ in node.next_functions)
