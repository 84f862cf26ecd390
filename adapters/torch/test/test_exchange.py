# SPDX-License-Identifier: Apache-2.0
"""Tests the communicator over c10d by itself: order, failures, deadlines, signals."""

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)

OK, PEER_LOST, TIMED_OUT, ABORTED, EXTERNAL = 0, -10, -11, -12, -13
SOON = 30  # seconds, on the busiest machine: below NEVER of the jobs and the groups' own 60


def test_Exchange_UnevenBlocksTwoInFlight_ArriveIntact():
    ranks.run(3, "exchange_jobs:uneven")


def test_Wait_PeerIsLate_ExpiresNamingItThenSucceeds():
    results = ranks.run(3, "exchange_jobs:late", times=3)
    for expiries in results[:-1]:
        assert sum(peer == 2 for _, peer, _ in expiries) >= 3 and min(expiries)[0] <= 1.0
        for took, peer, text in expiries:
            assert 0.25 < took and 0 <= peer < 3 and "has not arrived" in text
    assert results[-1] == []


def test_Wait_NoThreadCanBeStarted_FailsAndTheNextKeepsItsDeadline():
    refused, expired = ranks.run(2, "exchange_jobs:threadless", deadline=120)[0]
    assert refused[:2] == (EXTERNAL, -1) and "no thread can be started" in refused[2], refused
    assert expired[:2] == (TIMED_OUT, 1), expired


@pytest.mark.parametrize("posted_first", [True, False])
def test_Wait_PeerIsKilled_IsLostByNameSoon(posted_first):
    ended = ranks.finish(ranks.start(3, "exchange_jobs:dead", posted_first=posted_first))
    assert ended[-1].code == -9
    for end in ended[:-1]:
        assert end.error is None, end.error
        status, took, (peer, text), again = end.result
        assert status == PEER_LOST and took < SOON, (status, took, peer, text)
        # The killed rank, or one that learnt of it first and closed its connections.
        assert peer >= 0 and text
        assert again in (PEER_LOST, ABORTED)
    assert any(end.result[2][0] == 2 for end in ended[:-1])


def test_Abort_AfterSilence_EndsAllRanksSoon():
    results = ranks.run(3, "exchange_jobs:silent")
    (status0, took0, why0), (status1, took1, why1), (status2, _, why2) = results
    assert status0 == TIMED_OUT and why0[0] in (1, 2) and took0 < SOON, results[0]
    assert status1 == PEER_LOST and took1 < SOON, results[1]
    assert status2 == PEER_LOST, results[2]


def test_Abort_FromAnotherThread_EndsTheWait():
    results = ranks.run(2, "exchange_jobs:aborted_elsewhere", times=3)[0]
    assert [status for status, _ in results] == [ABORTED] * 3
    assert min(took for _, took in results) < 1, results  # the best of three: the machine may be busy


@pytest.mark.alone
def test_CtrlC_DuringWait_RaisesWithinASecond():
    results = ranks.run(2, "exchange_jobs:interrupted", times=3)[0]
    assert None not in results
    assert min(results) < 1 and max(results) < SOON, results  # the best of three: the machine may be busy


def test_Destroy_MessagesOutstanding_Returns():
    assert ranks.run(2, "exchange_jobs:close_unfinished") == [True, True]
