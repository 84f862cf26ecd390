# SPDX-License-Identifier: Apache-2.0
"""Tests pipelines of plain torch functions: the tensors that they send, and their errors."""

import pytest
import ranks
import torch  # noqa: F401  (before anything that pytest may import as `torch`)


@pytest.mark.parametrize("world,transport", [(4, None), (2, "c10d")])
def test_Edges_TensorsOfEveryDtypeAndShape_ArriveAsTheyWere(world, transport):
    seen = ranks.run(world, "pipeline_jobs:carried", transport=transport)
    assert min(seen) > 0


@pytest.mark.parametrize("where,at", [("load", 0), ("backward", 2)])
def test_CallbackRaises_AllAreToldAndTheNextBatchIsRight(where, at):
    for rank, (told, good, gone) in enumerate(ranks.run(3, "pipeline_jobs:failed", where=where, at=at)):
        for kind, text in told:
            if rank == at:
                assert (kind, text) == ("ValueError", "out of order")
            else:
                assert kind == "PeerRefused" and f"rank {at}" in text and "ValueError: out of order" in text, text
        assert good and gone


def test_CtrlC_WhileAStageWaits_IsRaisedThereAndToldToTheOthers():
    first, second = ranks.run(2, "pipeline_jobs:interrupted")
    assert second == "KeyboardInterrupt"
    assert "PeerRefused" in first and "rank 1" in first, first
    assert "KeyboardInterrupt" in first or "interrupted" in first, first  # in a callback, or while it waited


def test_Refused_ByNameOnAllRanks():
    for rank, (unknown, sparse) in enumerate(ranks.run(2, "pipeline_jobs:refused")):
        assert unknown.startswith("InvalidArgument") and "fastest" in unknown, unknown
        assert sparse.startswith("PeerRefused" if rank else "InvalidArgument") and "sparse" in sparse, sparse
