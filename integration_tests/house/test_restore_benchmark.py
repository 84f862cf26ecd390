"""What restore.py says of its measurements, on made-up ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from integration_tests.benchmarks.restore import restore, restore_budget, restore_budget_rank


def _line(policy: str, chunks: int, peak: int, seconds: float, share: float | None = None) -> dict[str, Any]:
    return {
        "policy": policy,
        "chunks": chunks,
        "peak_bytes": peak,
        "wall_s": [seconds, seconds * 1.1, seconds * 0.9],
        "of_bound": share,
    }


def _run(recompute_seconds: float, share: float) -> tuple[list[str], bool]:
    lines = [_line("none", 8, 1000, 1.0), _line("k/rec", 8, 390, recompute_seconds), _line("S4", 8, 200, 1.4, share)]
    return restore.verdicts(lines)


def test_Verdicts_SavedAtTheSameTime_Holds() -> None:
    text, good = _run(1.04, 0.995)
    assert good
    assert "k/rec at n = 8: -61 % in 1.04 of the step" in "\n".join(text)
    assert "S4 -80 %" in "\n".join(text)


def test_Verdicts_TooSlow_DoesNotHold() -> None:
    text, good = _run(1.06, 0.995)
    assert not good
    assert "none within 1.05" in "\n".join(text)


def test_Verdicts_TooLittleOfTheBound_DoesNotHold() -> None:
    assert not _run(1.04, 0.98)[1]


def test_Verdicts_PairsBesideEachOther_CountBeforeRounds() -> None:
    lines = [_line("none", 8, 1000, 1.0), _line("k/rec", 8, 390, 2.0), _line("S4", 8, 200, 1.4, 0.995)]
    lines[1]["pair_ratios"] = [1.0, 1.02, 9.0]
    text, good = restore.verdicts(lines)
    assert good
    assert "k/rec at n = 8: 1.020 of the step of none beside it" in "\n".join(text)


def test_Verdicts_SlowNone_IsAlsoComparedWithItsFastestN() -> None:
    lines = [_line("none", 8, 1000, 1.0), _line("none", 4, 1200, 0.8), _line("k/rec", 8, 300, 1.0)]
    assert "against none at its fastest n = 4: -75 % in 1.25 of its step" in "\n".join(restore.verdicts(lines)[0])


def test_BesideEq6_StatesOnBothSides_MakeTheShareSmaller() -> None:
    lines = [_line("none", 4, 1 << 20, 1.0), _line("S4", 4, 1 << 19, 1.0, 1.0), _line("k/rec", 4, 1, 1.0)]
    (text,) = restore.beside_eq6(lines, rows=2048, M=512, H=2048, E=8)
    states = 4 * restore.paper(2048, 512, 2048, 8, 4)["states"]
    wanted = 100 * (((1 << 19) + states) / ((1 << 20) + states) - 1)
    assert f"S4 {wanted:+.0f} (-50) %" in text and "k/rec" not in text
    share = restore.paper(2048, 512, 2048, 8, 4)["saved_share"]
    assert 0 < share < 1 and f"eq. 6 says {-100 * share:+.0f} %" in text


def test_Budget_PeakAboveOrResultsChanged_DoesNotHold() -> None:
    found = {"budget_bytes": 1000, "peak_bytes": 1000, "largest_difference": 1e-6, "layers": 4, "hot": None}
    found |= {"free_peak_bytes": 4000, "chunks": 8, "median_s": 0.5}
    assert restore_budget.holds(found)
    assert not restore_budget.holds({**found, "peak_bytes": 1001})
    assert not restore_budget.holds({**found, "largest_difference": 1e-2})
    assert "4 layers, balanced: budget 0.0 MiB" in restore_budget.show(found)
    assert "1 layer, one expert 10 times" in restore_budget.show({**found, "layers": 1, "hot": "10"})


def test_Arguments_BudgetInWords_IsBytes() -> None:
    parser = restore.arguments()
    assert parser.parse_args(["--budget", "1.5MiB"]).budget == 3 << 19
    assert parser.parse_args(["--budget", "4096"]).budget == 4096
    with pytest.raises(SystemExit):
        parser.parse_args(["--budget", "much"])


@pytest.mark.parametrize("hot, share", [("10", 10 / 17), ("all", 1.0)])
def test_HotIds_ShareOfTheFirstExpert_AndNoneTwice(hot: str, share: float) -> None:
    ids = restore_budget_rank.hot_ids(4096, 8, 2, hot, torch.Generator().manual_seed(1))
    assert float((ids[:, 0] == 0).double().mean()) == pytest.approx(share, abs=0.05)
    assert bool((ids[:, 0] != ids[:, 1]).all()) and int(ids.min()) == 0 and int(ids.max()) < 8
