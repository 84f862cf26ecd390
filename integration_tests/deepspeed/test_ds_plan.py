# SPDX-License-Identifier: Apache-2.0
"""Tests the "plan" of a pipeline: the bits of stock with the same partition, with any recomputation."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks


# Layer 0 is slow. A layer's kept activations of a micro-batch take 1000 bytes.
def _model(folder: Path, stages: int, **changes: Any) -> str:
    layer = {
        **{"forward_seconds": 1.0, "backward_seconds": 2.0, "recompute_seconds": 1.0},
        **{"activation_bytes": 1000, "checkpoint_bytes": 100, "output_bytes": 100},
    }
    first = {**layer, "forward_seconds": 3.0, "backward_seconds": 6.0, "recompute_seconds": 3.0}
    layers = [first, *(layer for _ in range(5))]
    values = {"sluice_stages": 1, "stages": stages, "micro_batches": 4, "layers": layers, **changes}
    path = folder / f"model{stages}.json"
    path.write_text(json.dumps(values))
    return str(path)


def _printed(folder: Path, model: str, *words: str) -> str:
    """Writes the output of `sluice plan --stages` for a model to a file; returns its path."""
    command = [sys.executable, "-m", "sluice", "plan", "--stages", model, "--json", *words]
    path = folder / "plan.json"
    path.write_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return str(path)


def _same(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    for what in {"losses", "evaluations", "parameters", "optimizer"} & stock.keys():
        assert ours[what] == stock[what], what


def _check(answers: list[Any], parts: list[int], recomputed: set[int], forwards: int) -> None:
    for stock, ours in answers:
        assert ours["been"][0] == stock["been"][0] == parts
        _same(stock, ours)
        assert set(stock["forwards"].values()) == {forwards}
        for name, count in ours["forwards"].items():
            # Each of the host's backwards recomputes. A stage that passes on several tensors may run several.
            assert count >= 2 * forwards if int(name) in recomputed else count == forwards, (name, count)


ZERO1 = {"zero_optimization": {"stage": 1}}
TWO: dict[str, dict[str, Any]] = {
    "f32": {"kind": "dropout"},
    "clipped": {"kind": "dropout", "config": {"gradient_clipping": 0.1}},
    "tuples": {"kind": "words"},
    "bf16": {"kind": "plain", "dtype": "bfloat16"},
    "bf16 zero 1": {"kind": "dropout", "dtype": "bfloat16", "config": ZERO1},
}


def _offloading(folder: Path, kinds: list[str]) -> str:
    """Returns a printed plan of two stages with layers of these kinds."""
    plan = json.loads(Path(_printed(folder, _model(folder, 2))).read_text())
    for layer, kind in zip(plan["layers"], kinds):
        layer["kind"] = kind
    path = folder / "offload.json"
    path.write_text(json.dumps(plan))
    return str(path)


KINDS = ["offload", "recompute", "offload", "keep", "offload", "offload"]


@pytest.mark.parametrize("case", TWO)
@pytest.mark.parametrize("tier", ["host", "file"])
def test_PlanThatOffloads_BothTiers_SameBitsAsStock(pipe2: Ranks, tmp_path: Path, case: str, tier: str) -> None:
    keys = {"plan": _offloading(tmp_path, KINDS), "offload": "host" if tier == "host" else str(tmp_path)}
    before = set(tmp_path.iterdir())
    job = {"steps": 3, "stages": 2, "parts": [0, 2, 6], "pipeline": keys, **TWO[case]}
    for stock, ours, copies, _ in pipe2.run("cases_plan:offloaded", **job):
        assert ours["been"] == stock["been"]
        _same(stock, ours)
        assert copies["out_bytes"] == copies["in_bytes"] > 0 == copies["held_bytes"]
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("full", [0, 1])
def test_PlanThatOffloads_FullDiskOfOneRank_FailsTheBatchOnAllAndTheNextRuns(
    pipe2: Ranks, tmp_path: Path, full: int
) -> None:
    keys = {"plan": _offloading(tmp_path, KINDS), "offload": str(tmp_path)}
    job = {"steps": 3, "stages": 2, "parts": [0, 2, 6], "pipeline": keys, "kind": "plain"}
    for stock, ours, copies, said in pipe2.run("cases_plan:offloaded", full=full, **job):
        assert f"{tmp_path}/sluice-swap-" in said and "File too large" in said, said
        _same(stock, ours)
        assert copies["held_bytes"] == 0


@pytest.mark.parametrize("case", TWO)
def test_PlanUnderABudget_RecomputesLayers_SameBitsAsStock(pipe2: Ranks, tmp_path: Path, case: str) -> None:
    plan = _printed(tmp_path, _model(tmp_path, 2), "--budget", "3000")
    layers = json.loads(Path(plan).read_text())["layers"]
    recomputed = {index for index, layer in enumerate(layers) if layer["kind"] == "recompute"}
    parts = [0, sum(layer["stage"] == 0 for layer in layers), 6]
    assert 0 < len(recomputed) < 6 and parts != [0, 3, 6], layers
    answers = pipe2.run(
        *("cases_plan:by_key",), **{"steps": 5, "stages": 2, "parts": parts, "pipeline": {"plan": plan}, **TWO[case]}
    )
    _check(answers, parts, recomputed, forwards=20)


def test_Plan_TwoReplicas_SameBitsAsStockCutSo(pipe2x2: Ranks, tmp_path: Path) -> None:
    """The plan is made from the file of a model."""
    job = {"kind": "tied", "dtype": "bfloat16", "config": ZERO1, "pipeline": {"plan": _model(tmp_path, 2)}}
    _check(pipe2x2.run("cases_plan:by_key", steps=5, stages=2, parts=[0, 2, 6], **job), [0, 2, 6], set(), forwards=20)


def test_Plan_FourStages_SameBitsAsStockCutSo(pipe4: Ranks, tmp_path: Path) -> None:
    plan = _printed(tmp_path, _model(tmp_path, 4))
    stage_of = [layer["stage"] for layer in json.loads(Path(plan).read_text())["layers"]]
    parts = [sum(stage < s for stage in stage_of) for s in range(5)]
    assert parts != [0, 2, 4, 5, 6]  # not the host's partition
    job = {"kind": "dropout", "pipeline": {"plan": plan}}
    _check(pipe4.run("cases_plan:by_key", steps=5, stages=4, parts=parts, **job), parts, set(), forwards=20)


@pytest.mark.parametrize("kind", ["slow ones first", "slow backwards first"])
def test_PlanAdaptive_SlowLayersOnOneStage_SpreadWithTheBitsOfStock(pipe2: Ranks, kind: str) -> None:
    for stock, ours in pipe2.run("cases_plan:adaptive", steps=8, hooked=False, stages=2, kind=kind):
        assert stock["been"] == [[0, 3, 6]] * 9
        # Only some step must have this partition: a stall of the machine makes any layer slow, and then layers move.
        assert [0, 1, 6] in ours["been"], (ours["been"], ours["layers"])
        assert ours["layers"]["moves"] >= 1
        learned = [ours["layers"][f"{kind}_s"] + ours["layers"][f"{kind}_byte_s"] for kind in ("drain", "commit")]
        assert max(learned) > 0 and (learned[0] == 0 or ours["layers"]["link"] != 1e8)
        _same(stock, ours)


def test_PlanAdaptive_LayersThatAreLeftOutForAWhile_StagesFollowWithTheBitsOfStock(pipe2: Ranks) -> None:
    """Six layers take equally long. While layers 3 and 4 are off, each stage gets two of the other four."""
    job = {"steps": 18, "hooked": False, "stages": 2, "kind": "switched", "off": {"3": [3, 4], "11": []}}
    for stock, ours in pipe2.run("cases_plan:adaptive", **job):
        assert stock["been"] == [[0, 3, 6]] * 19
        assert [0, 2, 6] in ours["been"][4:12] and [0, 3, 6] in ours["been"][12:], (ours["been"], ours["layers"])
        _same(stock, ours)


@pytest.mark.parametrize("case", ["f32", "bf16", "zero 1", "bf16 zero 1"])
def test_PlanAdaptive_FrozenLayers_EveryStageKeepsOneThatTrains(pipe2: Ranks, case: str) -> None:
    """The first four layers are slow. Each stage would get two of them, but the first two are frozen."""
    job = {"config": ZERO1 if "zero 1" in case else {}, "dtype": "bfloat16" if "bf16" in case else "float32"}
    job |= {"steps": 8, "hooked": False, "stages": 2, "kind": "slow frozen ones first", "parts": [0, 4, 6]}
    for stock, ours in pipe2.run("cases_plan:adaptive", **job):
        assert stock["been"] == [[0, 4, 6]] * 9
        assert [0, 3, 6] in ours["been"] and [0, 2, 6] not in ours["been"], (ours["been"], ours["layers"])
        assert "refused" not in ours["layers"], ours["layers"]
        _same(stock, ours)


# Budgets in bytes, and partitions at the start. A layer takes 38 kB with gradients and moments, the same again while it
# arrives, and about 6 kB for each of two micro-batches in flight, less if it is recomputed. Without a budget the two
# slow layers at the front would be separated at once. With room for four layers, the second stage cannot take two more
# in one move.
LAYER_BYTES = 38_000
BUDGETS = {
    "room for four layers": (260_000, [0, 3, 6]),
    "too full": (220_000, [0, 5, 6]),
    "room for none": (50_000, [0, 3, 6]),
}


def _most_layers(before: list[int], after: list[int]) -> int:
    """Returns the most layers on a stage in a move: those that it has afterwards, plus once more those that arrive."""
    runs = [(set(range(*old)), set(range(*new))) for old, new in zip(pairwise(before), pairwise(after))]
    return max(len(new) + len(new - old) for old, new in runs)


@pytest.mark.parametrize("case", BUDGETS)
def test_PlanAdaptive_UnderABudget_NoStageTakesMore(pipe2: Ranks, case: str) -> None:
    budget, begin = BUDGETS[case]
    job = {"hooked": False, "budget": budget, "stages": 2, "kind": "slow ones first", "parts": begin}
    for stock, ours in pipe2.run("cases_plan:adaptive", steps=8, **job):
        assert set(map(tuple, stock["been"])) == {tuple(begin)}
        moves = [(old, new) for old, new in pairwise(ours["been"]) if old != new]
        # Moves depend on measured seconds, and a stall of the machine makes any layer slow. The budget always holds.
        assert all(_most_layers(*move) * LAYER_BYTES <= budget for move in moves), (moves, ours["layers"])
        assert not moves or case != "room for none", (moves, ours["layers"])
        assert (ours["layers"]["verdict"] == "over_budget") == (case == "room for none"), ours["layers"]
        assert ours["recomputed"] or case != "too full" or ours["been"][-1][1] < 5, ours["layers"]
        _same(stock, ours)


def test_PlanAdaptive_FullStageWhoseLayersCannotMove_RunsSomeAgain(pipe2: Ranks) -> None:
    """Five layers take 38 kB each and 6 kB for each of two micro-batches. A recomputed layer only keeps its input."""
    job = {"hooked": True, "budget": 225_000, "stages": 2, "kind": "plain", "parts": [0, 5, 6]}
    for stock, ours in pipe2.run("cases_plan:adaptive", steps=8, **job):
        assert ours["been"] == stock["been"] == [[0, 5, 6]] * 9
        assert ours["recomputed"] and set(ours["recomputed"]) < set(range(5)), (ours["recomputed"], ours["layers"])
        assert ours["layers"]["verdict"] != "over_budget", ours["layers"]
        _same(stock, ours)


def test_PlanAdaptive_LayersThatCannotMove_StayAndSayWhy(pipe2: Ranks) -> None:
    for stock, ours in pipe2.run("cases_plan:adaptive", steps=5, hooked=True, stages=2, kind="slow ones first"):
        assert ours["been"] == stock["been"] == [[0, 3, 6]] * 6
        assert ours["layers"]["moves"] == 0 and "has hooks" in ours["layers"]["refused"]
        _same(stock, ours)


def test_PlanAdaptive_Watching_SendsNothing(pipe2: Ranks) -> None:
    for sent, known, report in pipe2.run("cases_plan:watched", steps=6, stages=2, kind="plain"):
        assert sent == []
        assert known == 2 and report["moves"] == 0 and report["verdict"] not in ("unknown", "pays"), report


def test_Plan_ThatCannotBeUsed_IsRefusedOnAllRanks(pipe2: Ranks, tmp_path: Path) -> None:
    good, other = _model(tmp_path, 2), _model(tmp_path, 4)
    offload = json.loads(Path(_printed(tmp_path, good)).read_text())
    offload["layers"][0]["kind"] = "offload"
    (tmp_path / "offload.json").write_text(json.dumps(offload))
    away, tied = str(tmp_path / "offload.json"), str(tmp_path / "tied.json")
    for index, layer in enumerate(offload["layers"]):
        layer["stage"], layer["kind"] = index // 3, "offload" if index == 2 else "keep"
    Path(tied).write_text(json.dumps(offload))
    again, five = tmp_path / "again.json", tmp_path / "five"
    again.write_text(Path(tied).read_text().replace('"offload"', '"recompute"'))
    five.mkdir()
    shorter = _model(five, 2, layers=json.loads(Path(good).read_text())["layers"][:5])
    for rank, kind in enumerate(("recompute", "keep")):  # files of one name on two machines
        (tmp_path / f"plan{rank}.json").write_text(again.read_text().replace('"recompute"', f'"{kind}"'))
    by_rank = {"plan": str(tmp_path / "plan{rank}.json")}
    cases: list[tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = [
        ([{"plan": str(tmp_path / "none.json")}] * 2, {}, ["none.json: No such file"] * 2),
        ([{"plan": other}] * 2, {}, ["6 layers on 4 stages, and the model has 6 on 2"] * 2),
        ([{"plan": shorter}] * 2, {}, ["5 layers on 2 stages, and the model has 6 on 2"] * 2),
        ([{"plan": good, "memory_budget": 300}] * 2, {}, ["OVER_BUDGET: .* raise every budget by 1200 bytes"] * 2),
        ([{"plan": good, "memory_budget": 1500}] * 2, {}, ["^$"] * 2),
        ([{"plan": good}, {"plan": away}], {}, ['"pipeline": "pipeline" is .*model2.* on rank 0 and .*offload'] * 2),
        ([by_rank] * 2, {}, ['moving layers: "kinds" is .*recompute.* on rank 0 and .* on rank 1'] * 2),
        ([{"plan": str(again)}] * 2, {"kind": "ends tied"}, ["recomputes it, but layer 2 is tied"] * 2),
        ([{"plan": away, "offload": "/no/folder"}] * 2, {}, ["/no/folder/sluice-swap-"] * 2),
        ([{"plan": tied}] * 2, {"kind": "ends tied"}, ["offloads it, but layer 2 is tied"] * 2),
        ([{"plan": away, "separate_wgrad": True}] * 2, {}, ['remove "separate_wgrad" and'] * 2),
        ([{"plan": good}] * 2, {"kind": "ends tied"}, ["tied to others by 'ends'"] * 2),
        ([{"plan": good}] * 2, {"kind": "frozen 0 1"}, ["stage 0 would have no trainable parameter of its own"] * 2),
    ]
    for pipelines, job, words in cases:
        said = pipe2.run("cases_plan:refused", pipelines=pipelines, **{"kind": "plain", **job})
        assert all(re.search(text, one) for text, one in zip(words, said)), (words, said)


def test_Plan_OneStage_IsRefused(tmp_path: Path) -> None:
    with Ranks(1) as ranks:
        said = ranks.run("cases_plan:refused", pipelines=[{"plan": _model(tmp_path, 1)}], kind="plain")
    assert "the pipeline has one stage" in said[0]
