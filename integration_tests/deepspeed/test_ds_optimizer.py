"""ZeRO-Offload's optimizer by key: "sluice": {"optimizer": true}."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_harness import Ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_Offloaded_WithKey_TrainsAsTorchsAndCompilesNothing(ranks2: Ranks, stage: int, dtype: str) -> None:
    for answer in ranks2.run("cases_optimizer:offloaded", stage=stage, dtype=dtype):
        assert answer["op"] == "CpuAdamOp"
        assert answer["updates"] > 0
        assert answer["one_pass"]
        assert answer["mine"] == pytest.approx(answer["torch"], rel=1e-5)


def test_CpuAdam_MadeByTheScript_IsComputedByTheLibraryToo(ranks2: Ranks) -> None:
    for answer in ranks2.run("cases_optimizer:made_by_the_script"):
        assert answer["calls"] == ["create_adam", "destroy_adam"]
        assert answer["updates"] == answer["moved"] > 0


def test_TransformersTrainer_WithOffloadByItsDsConfig_TrainsAsByTorchsAdam(ranks2: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="./test installs it")
    mine, torchs = (ranks2.run("cases_optimizer:trainer", is_ours=ours, folder=str(tmp_path)) for ours in (True, False))
    for ours, theirs in zip(mine, torchs):
        assert len(theirs["losses"]) == 4
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
        assert ours["updates"] >= 4 and theirs["updates"] == 0
