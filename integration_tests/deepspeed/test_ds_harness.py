# SPDX-License-Identifier: Apache-2.0
"""Tests the harness of ranks."""

import rank_harness
from rank_harness import MOST_GROUPS, Ranks


def test_Set_WithManyGroups_EndsBetweenTests(fresh2: Ranks) -> None:
    fresh2.run("rank_group:make_groups", count=2)
    first = fresh2.process_id(0)
    rank_harness.end_busy_sets()
    assert fresh2.groups() == 3  # two groups and the default group
    fresh2.run("rank_group:make_groups", count=MOST_GROUPS)
    assert fresh2.process_id(0) == first
    rank_harness.end_busy_sets()
    assert fresh2.groups() == 0
    fresh2.run("rank_group:make_groups", count=0)
    assert fresh2.process_id(0) != first
