# SPDX-License-Identifier: Apache-2.0
"""Tests how many ranks share a node: by host names, or as configured."""

import pytest
import torch  # noqa: F401  (before anything that pytest may import as `torch`)
from sluice.adapters.torch import Context, ContextOptions, EpGroup


@pytest.mark.parametrize(
    "hosts, per_node",
    [
        ("aabb", 2),
        ("aaabbb", 3),
        ("abcd", 1),
        ("aaaa", 4),
        ("aab", 0),  # unequal numbers
        ("abab", 0),  # not contiguous
        ("aabbaa", 0),
        ("a", 1),
    ],
)
def test_RanksPerNode_ByHostNames_IsThatOfEqualRuns(hosts: str, per_node: int) -> None:
    group = EpGroup.for_ranks()
    group._host_names = list(hosts)
    assert group.ranks_per_node() == per_node


def test_RanksPerNode_MoreThanTheGroupHas_IsOneNode() -> None:
    context = Context(None, ContextOptions(gemm="ref", ranks_per_node=8))
    assert context.alive
    context.close()
