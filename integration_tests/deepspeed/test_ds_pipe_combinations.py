"""DeepSpeed's pipeline engine by key over combinations of all its options: losses, parameters and optimizer as in
stock.

To the bit, since gradients accumulate in the order of micro-batches, whatever arrives first. The smallest one runs
every day.
"""

from __future__ import annotations

import pipe_combinations as combinations
import pytest
from host_release import CHECKPOINTING, old_host_fails
from rank_harness import Ranks
from test_ds_pipe_parity import compare

DAILY_RANKS = 2
ROWS = combinations.drawn()


def _case(row: dict) -> object:
    ranks = row["stages"] * row["replicas"]
    marks = [pytest.mark.timeout(3600), *([pytest.mark.full] if ranks > DAILY_RANKS else [])]
    return pytest.param(row, id=f"{combinations.name_of(row)}-{row['steps']}", marks=marks)


@pytest.mark.parametrize("row", [_case(row) for row in ROWS])
def test_Combination_ManySteps_SameBitsAsStock(row: dict) -> None:
    if row["checkpointing"]:
        old_host_fails(CHECKPOINTING)
    # Stock's bf16 optimizer of ZeRO 0 fails in a stage that has a tied layer alone.
    words = ["deep", *(name for name in ("dropout", "tied", "delays") if row[name])]
    config: dict = {"zero_optimization": {"stage": row["zero"]}}
    if row["checkpointing"]:
        config["pipeline"] = {"activation_checkpoint_interval": 1, "use_reentrant": row["checkpointing"] == "reentrant"}
    ranks = Ranks(row["stages"] * row["replicas"])  # of its own: the host keeps a topology for good
    try:
        answers = ranks.run(
            "cases_pipe:parity",
            deadline=1700,
            steps=row["steps"],
            stages=row["stages"],
            kind=" ".join(words),
            dtype=row["dtype"],
            config=config,
            pipeline={"policy": row["policy"]},
        )
    finally:
        ranks.stop()
    compare(answers, batches=row["steps"])


def test_Combinations_EveryTwoValues_MeetInOne() -> None:
    met = {pair for row in ROWS for pair in combinations.pairs_of(row)}
    assert combinations.all_pairs() <= met
    assert len(ROWS) == 12 and sorted(row["steps"] for row in ROWS) == [20] * 9 + [200] * 3
    assert not combinations.all_pairs() <= {pair for row in ROWS[:-1] for pair in combinations.pairs_of(row)}
