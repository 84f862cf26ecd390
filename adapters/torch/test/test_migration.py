# SPDX-License-Identifier: Apache-2.0
"""Compares experts that swap places during training, with AdamW's state, with experts that stay."""

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)


@pytest.mark.parametrize("rate", [None, 50_000_000])
def test_Migration_ExpertsThatMoveInEveryStep_KeepTheirBits(rate):
    for same, phases, hidden in ranks.run(2, "migration_jobs:trained", rate=rate):
        assert same
        assert phases == ["committed"] * 8
        assert hidden >= 0


def test_Migration_Refused_NothingMovesAndAllAreTold():
    for rank, ((gaps, no, phase), is_old) in enumerate(ranks.run(2, "migration_jobs:refused")):
        assert gaps.startswith("InvalidArgument") and "not contiguous" in gaps, gaps
        assert no.startswith("InvalidArgument" if rank == 1 else "PeerRefused") and "no room" in no, no
        assert phase == "aborted" and is_old


def test_Migration_UndecidedRanksThatSettle_GoOnInOneEpoch():
    ended = ranks.finish(ranks.start(3, "migration_jobs:settled"))
    assert ended[2].result is None and ended[2].code < 0
    for rank, end in enumerate(ended[:2]):
        assert end.result == ["PeerLost", "undecided", [-1.0], 1, "committed", [float((rank + 2) % 3)]], end.result
