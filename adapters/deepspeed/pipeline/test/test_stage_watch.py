# SPDX-License-Identifier: Apache-2.0
"""Tests the rates that StageWatch learns from moves of layers."""

from types import SimpleNamespace
from typing import Any

import pytest
from sluice.adapters.deepspeed.pipeline.stage_watch import StageWatch
from sluice.planning.layer_moves import MoveRates


def test_Rates_OfAStep_DoNotCountTheTransferAgainAndAnOldRateFades() -> None:
    """A drain sends 100 bytes in two of its three seconds. Then a step sends 100 bytes after its batch, in two
    of its 2.5 seconds, and the price counts these as time of the batch."""
    live: Any = SimpleNamespace(is_under_way=False, exposed_s=2.5, late_bytes=100)
    watch, engine = StageWatch(None, live), SimpleNamespace(module=SimpleNamespace(parts=[0, 2, 4]))
    watch._note_move(3.0, 2.0, 100, was_drain=True)
    watch._note_rates(watch._move_s, watch._travel_s)
    assert watch._rates.rates == MoveRates(50.0, commit_s=0.0, drain_s=1.0)
    watch._steps = [(0, 2, 4)]
    assert watch._goes_on(engine)
    watch._note_rates(watch._move_s, watch._travel_s)
    assert watch._rates.rates == MoveRates(50.0, commit_s=0.5, drain_s=0.5)
    watch._note_rates(0.0, 0.0)  # a batch without a move
    watch._note_move(2.0, 1.0, 100, was_drain=True)
    watch._note_rates(watch._move_s, watch._travel_s)
    # The newer of two drains weighs 1, and the older one, which has faded to 0.5 s, weighs 0.75.
    drain_s = pytest.approx((1.0 + 0.75 * 0.5) / 1.75)
    assert watch._rates.rates == MoveRates(100.0, commit_s=0.25, drain_s=drain_s)
