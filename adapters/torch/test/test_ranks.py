# SPDX-License-Identifier: Apache-2.0
"""Tests that ranks leave no temporary files, however they end, and that their output is reported."""

import tempfile

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how, code", [("returns", 0), ("raises", 0), ("dies", -9)])
def test_Finish_HoweverARankEnds_NothingStaysAndItsLogIsPrinted(temporary, capsys, how, code):
    first, second = ranks.finish(ranks.start(2, "ending_jobs:ends", how=how))
    assert (first.code, first.result, second.code) == (0, how, code)
    assert "last words" in second.output
    printed = capsys.readouterr().out
    assert ("last words" in printed) == (how != "returns")
    assert ("ValueError: such a pity" in printed) == (how == "raises")


def test_Run_ARankThatFails_NothingStays(temporary):
    with pytest.raises(AssertionError, match="such a pity"):
        ranks.run(2, "ending_jobs:ends", how="raises")


def test_Finish_ARankThatHangs_IsEndedAndNothingStays(temporary):
    started = ranks.start(2, "ending_jobs:ends", how="hangs", deadline=2)
    with pytest.raises(AssertionError, match="missed the deadline"):
        ranks.finish(started)
    assert all(process.returncode is not None for process in started.processes)


def test_Start_JobThatCannotBeSent_NothingStays(temporary):
    with pytest.raises(TypeError, match="pickle"):
        ranks.start(2, "ending_jobs:ends", how=(letter for letter in "no"))
