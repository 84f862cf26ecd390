"""Time that the machine's host took is read from /proc/stat, and decides alone which rounds of a benchmark count."""

import pytest

from integration_tests.benchmarks.measuring import stolen

STAT = """cpu  10 0 10 100 0 0 0 900 0 0
cpu0 5 0 5 50 0 0 0 250 0 0
cpu1 5 0 5 50 0 0 0 650 0 0
cpu10 5 0 5 50 0 0 0 70000 0 0
intr 1 2 3 4 5 6 7 8 9
"""


@pytest.mark.parametrize(("cores", "ticks"), [({0}, 250), ({1}, 650), ({0, 1}, 650), ({7}, 0)])
def test_Stolen_OfTheseCores_IsTheMostOfAny(cores, ticks):
    assert stolen.stolen_s(STAT, cores) == ticks / stolen.TICKS_PER_S


def test_Stolen_KernelWithoutIt_IsNothing():
    assert stolen.stolen_s("cpu0 5 0 5 50\n", {0}) == 0


def test_Rounds_ThatLostTime_RunAgainWhileThereIsTime(monkeypatch):
    clock, lost = [0.0], [0.0]
    monkeypatch.setattr(stolen.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(stolen.Stolen, "_now", staticmethod(lambda: lost[0]))
    monkeypatch.setattr(stolen, "slowest", lambda values: values)
    guard = stolen.Stolen(0.05, 25.0)

    def spoiled(took, taken):
        guard.begin()
        clock[0] += took
        lost[0] += taken
        return guard.spoiled()

    assert not spoiled(10, 0.4)
    assert spoiled(10, 0.6)
    assert spoiled(10, 9)
    assert spoiled(10, 9)  # 5 s of waiting were left
    assert not spoiled(10, 9)
    assert guard.found() == {"share_of_rounds": [0.04, 0.9], "most": 0.05, "rounds_repeated": 3}
    assert guard.rounds == 5
    open_guard = stolen.Stolen(1.0, 25.0)
    open_guard.begin()
    clock[0] += 1
    lost[0] += 1
    assert not open_guard.spoiled()
