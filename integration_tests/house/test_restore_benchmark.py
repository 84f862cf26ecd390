"""What restore.py says of its measurements, on made-up ones."""

from __future__ import annotations

from typing import Any

from integration_tests.benchmarks import restore


def _line(policy: str, chunks: int, peak: int, seconds: float, share: float | None = None) -> dict[str, Any]:
    return {
        "policy": policy,
        "chunks": chunks,
        "peak_bytes": peak,
        "seconds": [seconds, seconds * 1.1, seconds * 0.9],
        "of_delta": share,
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


def test_Verdicts_TooLittleOfDelta_DoesNotHold() -> None:
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
