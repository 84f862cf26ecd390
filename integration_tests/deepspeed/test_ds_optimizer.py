# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's Adam and AdamW through Sluice, offloaded or not: "sluice": {"optimizer": true}.

Their trainings with and without other features are in integration_tests/pairs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from host_release import OVERFLOW, WINDOW, old_host_fails
from rank_harness import Ranks


@pytest.mark.parametrize("stage, is_offloaded", [(1, True), (2, True), (2, False)])
def test_InfiniteGradient_OnOneRank_LeavesEveryByteOnAllAndTrainingAsWithoutIt(
    ranks2: Ranks, stage: int, is_offloaded: bool
) -> None:
    old_host_fails(OVERFLOW)
    for answer in ranks2.run("cases_optimizer:skipped", stage=stage, is_offloaded=is_offloaded):
        assert answer["changed"] == []
        assert answer["skipped"] == 1
        assert answer["losses"] == answer["others"]


@pytest.mark.parametrize("clipping", [0.0, 0.1])
@pytest.mark.parametrize(
    "stage, dtype, groups, micro_batches",
    [(1, "float32", 3, 1), (2, "float32", 1, 1), (1, "float32", 1, 3), (2, "float32", 3, 3), (2, "bfloat16", 1, 1)],
)
def test_Offloaded_LayerWithoutGradient_IsNotUpdated(
    ranks2: Ranks, stage: int, dtype: str, groups: int, micro_batches: int, clipping: float
) -> None:
    old_host_fails(WINDOW, stage == 2 and micro_batches > 1)
    job = {"stage": stage, "dtype": dtype, "groups": groups, "micro_batches": micro_batches, "clipping": clipping}
    for answer in ranks2.run("cases_optimizer:left_out", **job):
        assert answer["changed"] == [False] * 3
        assert answer["one_pass"]
        for mine, torchs in zip(answer["mine"], answer["torch"], strict=True):
            assert mine == pytest.approx(torchs, rel=2e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("by_script", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_GroupThatIsFrozenWhole_IsNamed(ranks2: Ranks, stage: int, by_script: bool) -> None:
    for said in ranks2.run("cases_optimizer:frozen_group", stage=stage, by_script=by_script):
        assert said.startswith("UnsupportedError") and "parameter group 1 (layer 1)" in said, said


def test_InfiniteGradient_ThatTheHostDoesNotLookFor_GoesIntoTheParameters(ranks2: Ranks) -> None:
    old_host_fails(OVERFLOW)
    for answer in ranks2.run("cases_optimizer:unchecked", stage=1):
        assert answer["updates"] > 0 and answer["skipped"] == 0
        assert answer["finite"] == 0 < answer["of"], answer


@pytest.mark.parametrize("kind, calls", [("cpu", ["create_adam", "destroy_adam"]), ("fused", [])])
def test_Adam_MadeByTheScript_IsComputedByTheLibraryToo(ranks2: Ranks, kind: str, calls: list[str]) -> None:
    for answer in ranks2.run("cases_optimizer:made_by_the_script", kind=kind):
        assert answer["calls"] == calls
        assert answer["updates"] == answer["moved"] > 0


class _Recorder:
    """A stock op that only records its arguments."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(name)


def test_CpuAdamOp_WhatTheLibraryDoesNotDo_IsTheStockOpsWhichKnowsAllOptimizers() -> None:
    from sluice.adapters.deepspeed.optimizer.adam_ops import CpuAdamOp

    stock = _Recorder()
    op = CpuAdamOp(lambda: stock)
    op.create_adam(3, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    assert stock.calls == []  # the stock op was not requested, so it was not built
    delegated = ["adam_rollback", "adam_update_multi", "zenflow_adam_create", "zenflow_adam_run_worker"]
    for name in delegated:
        getattr(op, name)(3)
    assert stock.calls == ["create_adam", *delegated]
    op.create_adam(4, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
    half = [torch.zeros(8, dtype=torch.bfloat16) for _ in range(4)]
    op.adam_update(4, 1, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, *half)
    op.destroy_adam(4)
    assert stock.calls[-3:] == ["create_adam", "adam_update", "destroy_adam"]
    assert op.updates == 0


def test_FusedAdamOp_MomentsInSixteenBits_AreTheStockOps() -> None:
    from sluice.adapters.deepspeed.optimizer.adam_ops import FusedAdamOp

    stock = _Recorder()
    op = FusedAdamOp(lambda: stock)
    numbers = (1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    full = [[torch.ones(8)] for _ in range(4)]
    op.multi_tensor_adam(1 << 16, torch.zeros(1), full, *numbers)
    assert stock.calls == [] and op.updates == 1
    assert not torch.equal(full[1][0], torch.ones(8))
    half = [[torch.zeros(8, dtype=torch.bfloat16)] for _ in range(4)]
    op.multi_tensor_adam(1 << 16, torch.zeros(1), half, *numbers)
    assert stock.calls == ["multi_tensor_adam"] and op.updates == 1


def test_TransformersTrainer_WithAutoValuesAndOffload_TrainsAsStock(ranks2: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="./test installs it")
    mine, torchs = (ranks2.run("cases_optimizer:trainer", is_ours=ours, folder=str(tmp_path)) for ours in (True, False))
    for ours, theirs in zip(mine, torchs):
        assert theirs["kinds"] == ["MOELayer"] * 2 and ours["kinds"] == ["SluiceMOELayer"] * 2
        assert len(theirs["losses"]) == 4
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["updates"] >= 4 and theirs["updates"] == 0
