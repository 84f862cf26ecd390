# SPDX-License-Identifier: Apache-2.0
"""Tests the random draws of the pipeline benchmark, and their simulation."""

import itertools

import pytest

from integration_tests.benchmarks.stages import stages_draws, stages_simulated

PLAN = {"stages": 4, "in_flight": 8, "forward_s": 1 / 3, "backward_s": 2 / 3, "micro_batches": 16, "pairs": 3}


def test_Delayed_OverDrawnStalls_IsWhatALinkDoesMomentByMoment() -> None:
    step = 1e-4
    for batch in (1, 2):
        stalls, at = [], 0.0
        for gap in itertools.islice(stages_draws.gaps(batch), 40):
            stalls.append((at + gap, at + gap + stages_draws.STALL_S))
            at = stalls[-1][1]
        for begin in (0.0, 0.3, stalls[2][0] + 0.01, stalls[5][0] - 0.02):
            now, left = begin, 0.5
            while left > 0:
                left -= 0.0 if any(first <= now < end for first, end in stalls) else step
                now += step
            assert stages_draws.delayed(batch, begin, 0.5) == pytest.approx(now - begin, abs=10 * step)


def test_Speedup_OfTheMeasuredCases_IsWhatIsKnown() -> None:
    two = stages_simulated.speedup({**PLAN, "stages": 2, "in_flight": 4}, 0.25, "1f1b_hint")
    assert two["speedup"] == pytest.approx(1.43, abs=0.01)  # one message at a time in each direction
    deep = stages_simulated.speedup(PLAN, 0.25, "backward_first")
    assert deep["speedup"] == pytest.approx(1.71, abs=0.01)  # a stage's two messages share its network card
    four = stages_simulated.speedup({**PLAN, "in_flight": 4}, 0.25, "backward_first")
    assert four["speedup"] == pytest.approx(1.31, abs=0.005)  # 1.32 with separate links
    jitter = stages_simulated.speedup({**PLAN, "sigma": 0.4}, 0.25, "backward_first")
    slow = stages_simulated.speedup({**PLAN, "slow": {"1": 1.5}}, 0.25, "backward_first")
    stall = stages_simulated.speedup({**PLAN, "stalls": {"rank": 1}}, 0.25, "backward_first")
    assert all(each["stock_s"] > deep["stock_s"] for each in (jitter, slow, stall))
    assert jitter["stock_s"] != slow["stock_s"]
    assert stages_simulated.speedup({**PLAN, "sigma": 0.4}, 0.25, "backward_first") == jitter
