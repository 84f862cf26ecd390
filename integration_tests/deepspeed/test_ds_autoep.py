# SPDX-License-Identifier: Apache-2.0
"""Tests DeepSpeed's AutoEP (`expert_parallel` in ds_config) through Sluice: against stock, and with experts that move
against none that moves."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks
from test_ds_deciding import SIZES, _reports
from test_ds_placement import check_files, differ
from test_ds_traps import check_told, cross_loaded

HOST = importlib.util.find_spec("deepspeed")
AUTO_EP = Path(HOST.submodule_search_locations[0]) / "module_inject" / "auto_ep_layer.py"
pytestmark = pytest.mark.skipif(not AUTO_EP.exists(), reason="this DeepSpeed has no AutoEP (0.19.2 brought it)")

# Plain gradient descent does not amplify rounding errors of gradients. Adam divides by the gradient's size, so that a
# gradient near zero changes a parameter by a whole learning rate, whatever the gradient's sign.
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
# At a loss near 4 neighbouring f32 numbers differ by 2.4e-7, relative 1e-7, and sums run in another order.
LOSS = 1e-6
WEIGHT = 1e-6  # for parameters up to 1: a few times 2^-24, after eight steps of 0.1 times a gradient
PRESETS = ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "qwen3_5_moe", "minimax_m3")
LAYOUTS = ("looped", "stacked", "transposed")


def _daily(names: Iterable[str], *daily: str) -> list[Any]:
    """Returns parameters of a test. Those that are not in `daily` run only with --full."""
    return [pytest.param(name, marks=() if name in daily else (pytest.mark.full,), id=name) for name in names]


def _gaps(answer: list[Any]) -> tuple[float, float]:
    """Returns the largest relative difference of losses, and the largest difference of an element of a parameter."""
    stock, ours = answer
    losses = max(abs(a - b) / abs(a) for a, b in zip(stock["losses"], ours["losses"], strict=True))
    assert stock["weights"].keys() == ours["weights"].keys()
    weights = max(
        abs(a - b) for name in stock["weights"] for a, b in zip(stock["weights"][name], ours["weights"][name])
    )
    return losses, weights


def _compare(answers: list[Any], loss: float = LOSS, weight: float = WEIGHT) -> None:
    for rank, answer in enumerate(answers):
        stock, ours = answer
        assert set(stock["kinds"]) == set(ours["kinds_after"]) == {"AutoEPMoELayer"}
        assert set(ours["kinds"]) == {"SluiceAutoEPMoELayer"} and set(ours["stats"]) == {"sluice"}
        assert stock["counts"] == ours["counts"], rank  # the same routes in every step
        assert stock["losses"][0] != stock["losses"][-1]
        gaps = _gaps(answer)
        print(f"rank {rank}: losses differ by at most {gaps[0]:.1e}, parameters {gaps[1]:.1e}")
        assert gaps[0] <= loss and gaps[1] <= weight, (rank, gaps)


@pytest.mark.parametrize("kind", _daily(PRESETS, "mixtral", "qwen2_moe", "deepseek_v3", "minimax_m3"))
def test_Presets_ModelsOfTransformers_LossesAndParametersAsStock(ranks2: Ranks, kind: str) -> None:
    answers = ranks2.run("cases_autoep:parity", kind=kind, config=SGD)
    _compare(answers)
    assert all(ours["sent"] > 0 for _, ours in answers)


@pytest.mark.parametrize("layout", _daily(LAYOUTS, "looped", "transposed"))
def test_Patterns_EachLayoutOfExperts_LossesAndParametersAsStock(ranks2: Ranks, layout: str) -> None:
    """AutoEP finds the blocks by names in the config. Blocks have a router with bias and a gated shared expert."""
    _compare(ranks2.run("cases_autoep:parity", kind=layout, config=SGD))


SECTIONS: dict[str, dict[str, Any]] = {
    "grouped": {"use_grouped_mm": True},
    "grouped, gate and up in one": {"use_grouped_mm": True, "gate_up_impl": "fused"},
    "combined by bmm": {"combine_impl": "legacy_bmm"},
    "scores before experts": {"score_apply": "pre"},
    "one rank alone": {"size": 1},
    "swiglu_clamped": {"expert_activation": "swiglu_clamped"},
    "swiglu_oai": {"expert_activation": "swiglu_oai"},
    "geglu_tanh": {"expert_activation": "geglu_tanh"},
    "top 1": {"top_k": 1},
    "sigmoid scores, scaled": {"score_func": "sigmoid", "route_norm": False, "route_scale": 2.5},
    "groups of experts": {"num_expert_groups": 2, "num_limited_groups": 1},
}


@pytest.mark.parametrize("what", _daily(SECTIONS, "grouped", "scores before experts", "swiglu_oai"))
def test_Section_EachChoice_LossesAndParametersAsStock(ranks2: Ranks, what: str) -> None:
    _compare(ranks2.run("cases_autoep:parity", kind="stacked", section=SECTIONS[what], config=SGD))


def test_Activation_RegisteredByOthers_IsKnownByWhatItDoes(ranks2: Ranks) -> None:
    answers = ranks2.run("cases_autoep:parity_of_a_known_formula")
    for answer in answers:
        assert _gaps(answer)[0] <= 1e-5


CONFIGS: dict[str, dict[str, Any]] = {
    "zero 1": {"config": {"zero_optimization": {"stage": 1}}},
    "zero 2": {"config": {"zero_optimization": {"stage": 2}}},
    "accumulation": {"config": {"gradient_accumulation_steps": 2}},
    "checkpointing": {"checkpointing": True},
    "clipping": {"config": {"gradient_clipping": 0.05}},
    "S2": {"sluice": {"policy": "S2"}},
    "reuse": {"sluice": {"reuse": True, "chunks": None}},
}


@pytest.mark.parametrize("what", _daily(CONFIGS, "zero 2", "checkpointing"))
def test_Training_EachConfig_AsStock(ranks2: Ranks, what: str) -> None:
    how = CONFIGS[what]
    config = {**SGD, **how.get("config", {})}
    _compare(ranks2.run("cases_autoep:parity", kind="mixtral", **{**how, "config": config}))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1])
def test_Bf16_FirstSteps_AsStockUpToItsRounding(ranks2: Ranks, stage: int) -> None:
    """Compares two steps, because later a rounded score can change a route. 2^-9 is half of bf16's last place."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **SGD}
    for answer in ranks2.run("cases_autoep:parity", kind="deepseek_v3", steps=2, config=config):
        losses, weights = _gaps(answer)
        assert losses <= 2**-9 and weights <= 2**-6, (losses, weights)


@pytest.mark.parametrize("grouped", [False, True])
def test_Autocast_FirstSteps_AsStockUpToItsRounding(ranks2: Ranks, grouped: bool) -> None:
    """The host's loop multiplies in autocast's dtype, its grouped GEMMs in the dtype of the rows."""
    how = {"section": {"use_grouped_mm": grouped}, "autocast": "bfloat16", "config": SGD}
    for answer in ranks2.run("cases_autoep:parity", kind="stacked", steps=2, **how):
        losses, _ = _gaps(answer)
        assert losses <= (1e-5 if grouped else 2**-9), losses


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_FourRanks_ExpertParallelAndExpertData_AsStock(ranks4: Ranks, size: int) -> None:
    _compare(ranks4.run("cases_autoep:parity", kind="deepseek_v3", section={"size": size}, config=SGD, steps=4))


def test_Lengths_UnequalOnTheRanks_AsStock(ranks2: Ranks) -> None:
    _compare(ranks2.run("cases_autoep:parity_of_lengths", lengths=[[12, 5, 20, 3], [4, 17, 20, 9]], config=SGD))


@pytest.mark.parametrize("which", _daily(["fc_gate", "fc_down", "experts"], "fc_gate"))
def test_FrozenExperts_StayAndTheRestTrainsAsStock(ranks2: Ranks, which: str) -> None:
    for answer in ranks2.run("cases_autoep:parity_with_frozen", which=which):
        losses, _ = _gaps(answer)
        assert losses <= 1e-5


# ---- layers that cannot be swapped ----

REFUSALS = {
    "activation": ['activation "swiglu_squared"', "not supported by the library"],
    "deepep": ['"comm_backend": "deepep"', "take that key out"],
    "zero 3": ["ZeRO stage 3", "stage 2 or less"],
    "folded": ["2 tensor-parallel ranks", '"autotp_size": 1'],
    "hook": ["container of its experts has hooks"],
    "forward": ["its _forward was replaced on the instance"],
    "subclass": ["Mine is a subclass of AutoEPMoELayer"],
}


@pytest.mark.parametrize("what", _daily(REFUSALS, "activation", "zero 3"))
def test_Unsupported_IsRefusedByNameOrLeftToTheHost(fresh2: Ranks, what: str) -> None:
    for kind, message in fresh2.run("cases_autoep:refused", what=what, policy="error"):
        assert kind == "UnsupportedError" and "(AutoEP)" in message and "'layers.0.moe'" in message, message
        assert all(word in message for word in REFUSALS[what]) and '"on_unsupported": "warn"' in message, message
    for layers, refused in fresh2.run("cases_autoep:refused", what=what, policy="warn"):
        assert layers + len(refused) == 2 and all(word in refused[0] for word in REFUSALS[what])


ERRS = {
    "other width": [["PeerRefused", "rank 1", "width 36"], ["ValueError", "width 36, the layer 32"]],
    "hook on the container": [["PeerRefused", "the container of its experts"], ["UnsupportedError", "after the swap"]],
}


@pytest.mark.parametrize("how", ERRS)
def test_RankErrs_OthersLearnAndGoOn(ranks2: Ranks, how: str) -> None:
    check_told(ranks2.run("cases_autoep:rank_errs", how=how), ERRS[how])


# ---- other uses of a layer by the host ----

ZERO = {
    "f32": {},
    "zero 1": {"zero_optimization": {"stage": 1}},
    "zero 2": {"zero_optimization": {"stage": 2}},
    "bf16": {"bf16": {"enabled": True}},
    "zero 1, bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
}


@pytest.mark.parametrize("name", _daily(("f32", "zero 1", "zero 2", "zero 1, bf16"), "zero 1"))
def test_Checkpoint_WrittenByOne_LoadsInTheOther(ranks2: Ranks, tmp_path: Path, name: str) -> None:
    contents = cross_loaded(ranks2, "cases_autoep:checkpoint", tmp_path, "bf16" in name, config=ZERO[name])
    assert any("experts.w1" in key for keys in contents.values() for key in keys)


def test_StatsDecisionsAndCopies_OfALayer(ranks2: Ranks) -> None:
    assert ranks2.run("cases_autoep:numbers") == [["sluice", "sluice"]] * 2


# ---- experts that move between ranks ----


def _trainings() -> list[Any]:
    """Returns parameters: the ranks, the model, the configuration, the number of steps and of steps between moves."""
    every = [(2, "stacked", name, 14, 3) for name in ZERO] + [(4, "looped", name, 9, 2) for name in ("f32", "zero 2")]
    often = [(2, kind, name, 201, 4) for kind in ("stacked", "deepseek_v3") for name in ZERO]
    daily = (every[0], every[4], every[5])
    return [pytest.param(*each, marks=() if each in daily else pytest.mark.full) for each in every + often]


@pytest.mark.parametrize(("world", "kind", "name", "steps", "every"), _trainings())
def test_Move_EveryFewSteps_HasTheBitsOfNone(
    request: pytest.FixtureRequest, world: int, kind: str, name: str, steps: int, every: int
) -> None:
    case = {"kind": kind, "steps": steps, "every": every, "config": ZERO[name]}
    answers = request.getfixturevalue(f"ranks{world}").run("cases_autoep:moved_training", **case)
    assert differ(answers) == []
    assert all(still["losses"][-1] != still["losses"][0] for still, _ in answers)


@pytest.mark.parametrize(("world", "chosen", "stage"), SIZES)
def test_Move_OfEachSize_HasTheBitsOfNone(request: pytest.FixtureRequest, world: int, chosen: int, stage: int) -> None:
    case = {"shape": {"experts": max(8, 2 * world), "chosen": chosen}, "size": world, "kind": "stacked"}
    case |= {"steps": 8, "every": 2, "config": {"zero_optimization": {"stage": stage}}}
    answers = request.getfixturevalue(f"ranks{world}").run("cases_autoep:moved_training", **case)
    assert differ(answers) == []
    assert all(still["losses"][-1] != still["losses"][0] for still, _ in answers)


@pytest.mark.parametrize("name", _daily(ZERO, "f32"))
def test_Adaptive_SkewedLoads_MoveWithTheBitsOfNone(ranks2: Ranks, name: str) -> None:
    answers = ranks2.run("cases_autoep:decided", kind="stacked", steps=14, config=ZERO[name])
    reports = _reports(answers)
    assert any(report["moved_experts"] >= 2 for report in reports), reports
    assert differ([answer[:2] for answer in answers]) == []


@pytest.mark.parametrize("name", ["f32", "zero 1, bf16", pytest.param("zero 2", marks=pytest.mark.full)])
def test_Checkpoint_WhileExpertsAreAway_IsThatOfNone(ranks2: Ranks, tmp_path: Path, name: str) -> None:
    answers = ranks2.run("cases_autoep:checkpoint_away", kind="looped", folder=str(tmp_path), config=ZERO[name])
    check_files(answers, "expert", 0.02 if "bf16" in name else 1e-5)
