# SPDX-License-Identifier: Apache-2.0
"""Tests how Sluice is switched on and off, and the errors of sections, ranks and layers that it cannot run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks

STOCK, SWAPPED = ["MOELayer"], ["SluiceMOELayer"]
ON = {"enabled": True, "timeout": 60}
# A rank that fails in initialize does not change the host's groups, so all tests here share one set of ranks.
START = "cases_switch:start"


@pytest.mark.parametrize(
    "section, environment, kinds",
    [
        (None, None, STOCK),
        (ON, None, SWAPPED),
        ({"enabled": False}, "1", SWAPPED),
        ({"enabld": True}, "0", STOCK),
        ({"enabled": True, "chunks": None, "gemm": None, "timeout": None}, None, SWAPPED),
    ],
)
def test_Switch_ConfigAndEnvironment_Decide(ranks2: Ranks, section: Any, environment: str | None, kinds: Any) -> None:
    assert ranks2.run(START, section=section, environment=environment) == [kinds, kinds]


@pytest.mark.parametrize("form", ["path", "base64"])
def test_Switch_ConfigAsPathOrBase64_Decides(ranks2: Ranks, form: str, tmp_path: Path) -> None:
    assert ranks2.run(START, section=ON, form=form, folder=str(tmp_path)) == [SWAPPED, SWAPPED]


@pytest.mark.parametrize(
    "section, environment, words",
    [
        ({"enabld": True}, None, ["'enabld'", '"enabled"']),
        (ON, "on", ["SLUICE='on'", "require"]),
    ],
)
def test_Switch_WrongSection_IsNamed(ranks2: Ranks, section: Any, environment: str | None, words: list[str]) -> None:
    for answer in ranks2.try_run(START, section=section, environment=environment):
        assert answer["error"]["type"] == "ConfigError", answer
        assert all(word in answer["error"]["message"] for word in words), answer["error"]["message"]


def test_Switch_SectionNameMisspelt_IsPointedOut(fresh2: Ranks) -> None:
    assert fresh2.run(START, extra={"slucie": {"enabled": True}}) == [STOCK, STOCK]
    assert 'a key "slucie": did you mean "sluice"?' in fresh2.output(0)


def test_Require_DenseModel_IsAnError(ranks2: Ranks) -> None:
    for answer in ranks2.try_run(START, environment="require", layers=[]):
        assert answer["error"]["type"] == "UnsupportedError"
        assert "holds no deepspeed.moe.layer.MoE" in answer["error"]["message"]


def test_Enabled_DenseModel_Runs(ranks2: Ranks) -> None:
    assert ranks2.run(START, section=ON, layers=[]) == [[], []]


def test_Ranks_DifferentOptions_ErrorNamesRanksAndValues(ranks2: Ranks) -> None:
    sections = [{**ON, "chunks": 2}, {**ON, "chunks": 4}]
    for answer in ranks2.try_run(START, per_rank=sections):
        message = answer["error"]["message"]
        assert '"chunks" is 2 on rank 0 and 4 on rank 1' in message


def test_Ranks_OneSwitchedOff_ErrorNamesIt(fresh2: Ranks) -> None:
    first, _ = fresh2.try_run("cases_switch:one_does_not_swap")
    assert first["error"]["type"] == "DisagreementError"
    assert "rank 1 did not enable Sluice" in first["error"]["message"]


REFUSALS = {
    "batchnorm": "BatchNorm2d at '1' mixes rows",
    "dropout": "Dropout at '2' draws random numbers",
    "subclass": "OwnLayer is a subclass of MOELayer",
    "gate": "the gate's forward takes",
    "container": "the container of its experts has hooks",
    "own container": "its experts are held by a OwnExperts",
    "tensor parallel": "tensor parallelism (groups.mpu: 2 ranks)",
    "tensor-parallel experts": "tensor parallelism (its experts: 2 ranks)",
    "partitioned": "partitioned (ZeRO stage 3)",
    "one rank only": "(on rank 1)",
    "experts do not divide": "its gate chooses among 5 experts, and each of its 2 ranks must hold an equal share",
    "float64": "torch.float64",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_Unsupported_IsAnErrorAndNothingStaysSwapped_OrIsLeftToTheHostOnAllRanks(ranks2: Ranks, what: str) -> None:
    for kind, message in ranks2.run("cases_switch:refused", what=what, policy="error"):
        assert kind == "UnsupportedError"
        assert REFUSALS[what] in message and "moes.0.deepspeed_moe" in message and "on_unsupported" in message
    for kinds, refusals in ranks2.run("cases_switch:refused", what=what, policy="warn"):
        assert kinds[0] != "SluiceMOELayer"
        assert REFUSALS[what] in refusals[0]
        assert "tensor" in what or kinds[1] == "SluiceMOELayer"


def test_ZeroThree_IsTheHostsOwnErrorByName(fresh2: Ranks) -> None:
    for answer in fresh2.try_run(START, section=ON, extra={"zero_optimization": {"stage": 3}}):
        assert answer["error"]["type"] == "AssertionError"
        assert re.search("MoE (is )?not supported with (ZeRO )?Stage 3", answer["error"]["message"]), answer


@pytest.mark.parametrize("k", [1, 2])
def test_UseTutel_WhereItIsInstalled_SluiceTakesItsPlace(ranks2: Ranks, k: int) -> None:
    for stock, swapped in ranks2.run("cases_switch:tutel_wanted", k=k):
        assert swapped == pytest.approx(stock, rel=1e-5)


def test_Unsupported_SeenWhenCalled_IsAnError(ranks2: Ranks) -> None:
    for evaluates in (False, True):
        how = {"kind": "draws", "policy": "error", "evaluates": evaluates}
        for kind, cause in ranks2.run("cases_switch:seen_when_called", **how):
            assert kind == "External" and "draws random numbers per row" in cause
    assert ranks2.run("cases_switch:seen_when_called", kind="draws", policy="warn") == ["ran", "ran"]
    # A lost gradient is an error with any value of "on_unsupported".
    for kind, cause in ranks2.run("cases_switch:seen_when_called", kind="outside", policy="warn"):
        assert kind == "External" and "are not its parameters (of shape [16])" in cause


@pytest.mark.parametrize("policy, name", [("S1", "S1"), ("S2", "S2"), ({"input": "offload"}, "offload + keep")])
def test_Policy_ThatModulesCannotDo_FallsUnderOnUnsupported(fresh2: Ranks, policy: Any, name: str) -> None:
    for kind, message in fresh2.run("cases_switch:policy_for_modules", policy=policy, on_unsupported="error"):
        assert kind == "UnsupportedError"
        assert f"policy {name} is not possible" in message and "'moes.1.deepspeed_moe'" in message, message
        assert '"on_unsupported": "warn"' in message
    for (kept,) in fresh2.run("cases_switch:policy_for_modules", policy=policy, on_unsupported="warn"):
        assert f"policy {name} is not possible" in kept and "'moes.1.deepspeed_moe'" in kept
    banner = fresh2.output(0)
    assert f"| policy {name} (none in 1) | GEMMs" in banner
    assert "WARNING: policy none: MoE layer 'moes.1.deepspeed_moe'" in banner


@pytest.mark.parametrize(
    "section, said",
    [
        ({"reuse": True}, "| chunks adaptive | buffers reused, policy chosen among S1 to S4 |"),
        (
            {"chunks": 3, "policy": "S4", "memory_budget": "12.5MiB"},
            "| chunks 3 | policy S4 | memory_budget 12.5 MiB |",
        ),
    ],
)
def test_Banner_SaysThePlanThatTheSectionAsksFor(fresh2: Ranks, section: dict[str, Any], said: str) -> None:
    assert fresh2.run(START, section={**ON, **section}) == [SWAPPED, SWAPPED]
    assert said in fresh2.output(0)
