# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice plan --stages`: problems in files, the table, Megatron's layout, and errors that name the field."""

import copy
import functools
import json
import re
from xml.etree import ElementTree

import pytest
from sluice import __main__ as entry
from sluice.errors import OverBudget
from sluice.planning import stages, stages_chosen, stages_file
from sluice.planning.errors import BadInput
from sluice.planning.stages_command import layout_of
from sluice.timeline import colours

SVG = "{http://www.w3.org/2000/svg}"
BLOCK = {
    "name": "block", "forward_seconds": 2e-3, "backward_seconds": 4e-3, "recompute_seconds": 2e-3,
    "activation_bytes": "100MiB", "checkpoint_bytes": "10MiB", "output_bytes": "10MiB", "parameter_bytes": "20MiB",
    "state_bytes": "60MiB",
}  # fmt: skip
MOE = {
    "model_width": 1024, "hidden_width": 4096, "num_tokens": 4096, "num_experts": 8, "top_k": 2, "world_size": 8,
    "dtype": "bf16", "gated": True, "activation": "silu",
}  # fmt: skip
PIPELINE = {
    "sluice_stages": 1,
    "stages": 4,
    "micro_batches": 8,
    "budget": "1GiB",
    "links": {"bytes_per_second": 1e10, "latency_seconds": 1e-5, "full_duplex": True},
    "layers": [{**BLOCK, "repeat": 16}],
}


@pytest.fixture
def run(plan):
    return functools.partial(plan, "--stages")


def test_Stages_Pipeline_IsATableOfStagesAndLayersWithReasons(run) -> None:
    status, out, err = run(PIPELINE)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "16 layers on 4 stages, 8 micro-batches, 1f1b"
    assert lines[1].startswith("a step takes ") and "no plan is faster" in lines[1]
    table = [line.split() for line in lines[4:8]]
    assert [row[0] for row in table] == ["0", "1", "2", "3"]
    assert [row[2] for row in table] == ["4", "3", "2", "1"]  # outstanding micro-batches
    for row in table:
        assert int(row[-2]) <= 100 and row[-1] == "%", row
    layers = [line for line in lines[8:] if " block " in line]
    assert len(layers) == 16
    for line in layers:
        assert "nothing is faster, and it fits" in line or "over its budget; this costs" in line, line
    assert any(" recompute " in line for line in layers) and any(" keep " in line for line in layers)


def test_Stages_Picture_DrawsStagesPoliciesAndBytesAgainstBudgets(run, tmp_path) -> None:
    path = tmp_path / "plan.svg"
    status, out, err = run(PIPELINE, "--picture", str(path))
    assert (status, err) == (0, "")
    drawn = ElementTree.parse(path)
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert out.splitlines()[0] in words[0]  # the title
    assert [word for word in words if word.startswith("stage ")] == [f"stage {s}" for s in range(4)]
    assert sum("of 1 GiB" in word for word in words) == 4
    assert sum(line.get("stroke") == colours.LIMIT for line in drawn.iter(f"{SVG}line")) == 4
    boxes = {
        t.text.split(":")[0]: rect for rect in drawn.iter(f"{SVG}rect") for t in rect if t.text.startswith("layer ")
    }
    assert list(boxes) == [f"layer {i} block" for i in range(16)]
    policies = {line.split()[3] for line in out.splitlines()[8:] if " block " in line}
    assert {"keep", "recompute"} <= policies and policies < set(words)
    assert len({rect.get("fill") for rect in boxes.values()}) == len(policies)


def test_Stages_PictureOfWhatDoesNotFit_ShowsByHowMuch(run, tmp_path) -> None:
    path = tmp_path / "plan.svg"
    status, _, _ = run(PIPELINE, "--budget", "100MiB", "--picture", str(path))
    assert status == 1 and "DOES NOT FIT" in path.read_text() and "of 100 MiB" in path.read_text()
    status, _, err = run(PIPELINE, "--picture", str(tmp_path / "nowhere" / "plan.svg"))
    assert status == 2 and "--picture" in err


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "it must be what `sluice plan --stages --json` prints, of form 1"),
        ({"form": 1, "fits": False, "layers": []}, "it says that nothing fits"),
        ({"form": 1, "fits": True, "layers": [{"kind": "keep", "moe": None}]}, "it has no MoE layer"),
        ({"form": 1, "fits": True, "layers": [7]}, "layers[0] must have a moe"),
        (
            {"form": 1, "fits": True, "layers": [{"moe": {"restore_input": "burn"}}]},
            "layers[0].moe.restore_input is 'burn'",
        ),
        ({"form": 1, "fits": True, "layers": [{"kind": "offload", "moe": None}]}, "layers[0].kind is 'offload'"),
    ],
)
def test_ReadMoe_FileThatIsNoPlan_IsRefusedByName(tmp_path, data, text) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(BadInput) as caught:
        stages_chosen.read_moe(str(path))
    assert str(path) in caught.value.message and text in caught.value.message


def test_Stages_MoeLayers_HavePlansAndSharesOfOneBudget(run, tmp_path) -> None:
    """Eight pairs of attention and experts, on one stage: a model without a pipeline."""
    pair = [{**BLOCK, "activation_bytes": "60MiB"}, {"name": "experts", "moe": MOE, "output_bytes": "8MiB"}]
    model = {"sluice_stages": 1, "machine": "a100-8x8-1600g", "layers": [{"layers": pair, "repeat": 4}]}
    free = json.loads(run(model, "--json")[1])
    most = free["stages"][0]["bytes"]
    status, out, err = run(model, "--json", "--budget", str(most * 7 // 10))
    assert (status, err) == (0, "")
    made = json.loads(out)
    assert [layer["name"] for layer in made["layers"]] == ["block", "experts"] * 4
    assert made["step_seconds"] > free["step_seconds"]
    assert made["stages"][0]["bytes"] <= most * 7 // 10
    for layer in made["layers"][1::2]:
        assert layer["moe"]["num_chunks"] >= 1 and layer["moe"]["policy"]
        assert 0 < layer["share_bytes"] < made["stages"][0]["bytes"]
    assert made["layers"][0]["moe"] is None and made["layers"][0]["share_bytes"] is None
    path = tmp_path / "plan.json"  # for a host that only gives MoE layers their plans
    path.write_text(json.dumps(free))
    found = stages_chosen.read_moe(str(path))
    assert [choice.tokens for choice in found] == [MOE["num_tokens"]] * 4
    assert [choice.num_chunks for choice in found] == [layer["moe"]["num_chunks"] for layer in free["layers"][1::2]]
    lines = run(model, "--budget", str(most * 7 // 10))[1].splitlines()
    assert lines[0] == "8 layers on 1 stage, 1 micro-batch"
    assert sum("(share of the budget " in line for line in lines) == 4


def test_Stages_OverBudget_NamesStageAndSmallestBudgetThatDoes(run) -> None:
    status, out, err = run(PIPELINE, "--budget", "100MiB")
    assert status == 1 and err == ""
    assert "DOES NOT FIT: no partition of 16 layers over 4 stages" in out and "what takes the fewest bytes:" in out
    made = json.loads(run(PIPELINE, "--budget", "100MiB", "--json")[1])
    assert not made["fits"] and made["blocking_stage"] is not None
    assert run(PIPELINE, "--budget", str(made["smallest_budget"]))[0] == 0
    assert run(PIPELINE, "--budget", str(made["smallest_budget"] - 1))[0] == 1


def test_Stages_Graph_EdgesAndOptionsOfItsOwn(run) -> None:
    options = [{"kind": "keep", "held_bytes": 100, "forward_seconds": 1}, {"held_bytes": 10, "forward_seconds": 2}]
    model = {
        "sluice_stages": 1,
        "stages": 2,
        "budget": [0, 125],
        "in_flight": 1,
        "layers": [{"output_bytes": 5, "options": options} for _ in range(5)],
        "edges": [[0, 1], [0, 2], [1, 3], [2, 3], [3, 4]],
    }
    made = json.loads(run(model, "--json")[1])
    assert made["fits"] and made["stages"][0]["budget_bytes"] == 0 and made["stages"][1]["bytes"] <= 125
    assert {layer["kind"] for layer in made["layers"]} <= {"keep", "mixed"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": []}, "num_layers is 0"),
        ({"stage": 2}, "the file: unknown field 'stage'; known are sluice_stages, machine, layers"),
        ({"sluice_stages": 2}, "sluice_stages is 2; this version reads 1"),
        ({"stages": 0}, "stages is 0; it must be a whole number from 1 on"),
        ({"stages": 20}, "no stage stays empty"),
        ({"schedule": "zigzag"}, "schedule is 'zigzag'; it must be one of 1f1b, gpipe, message_driven"),
        ({"budget": "lots"}, "budget is 'lots'; it must be bytes, or text such as \"20GiB\""),
        ({"budget": ["1GiB"]}, "budget has 1 entries; for 4 stages it must have 4"),
        ({"links": [{"bytes_per_second": 1}]}, "links has 1 entries; for 4 stages it must have 3"),
        ({"links": {"latency_seconds": 1}}, "links: the field 'bytes_per_second' is missing"),
        ({"edges": [[0]]}, "edges[0] is [0]; it must be [from, to]"),
        ({"edges": [[3, 1]]}, "edge 0 is from layer 3 to layer 1"),
        ({"layers": [{**BLOCK, "forward_seconds": -1}]}, "layers[0].forward_seconds is -1"),
        ({"layers": [BLOCK, {**BLOCK, "seconds": 1}]}, "layers[1]: unknown field 'seconds'"),
        ({"layers": [{**BLOCK, "repeat": 70000}]}, "layers has more than 65536 layers"),
        ({"layers": [{**BLOCK, "may_offload": 1}]}, "layers[0].may_offload is 1; it must be true or false"),
        ({"layers": [{**BLOCK, "checkpoint_bytes": "1GiB", "repeat": 4}]}, "layer 0: checkpoint_bytes is 1073741824"),
        ({"layers": [{"moe": MOE, "repeat": 4}]}, "is a MoE layer, and there is no machine to price it on"),
        (
            {"layers": [{"moe": {**MOE, "top_k": 9}, "repeat": 4}], "machine": "h200-8x8"},
            "layer 0: workload: top_k is 9",
        ),
        ({"layers": [{"moe": {"top_k": 2}}]}, "layers[0].moe: the field 'model_width' is missing"),
        ({"layers": [{"options": [{"kind": "drop"}]}]}, "layers[0].options[0].kind is 'drop'; it must be one of keep"),
        ({"machine": "abacus"}, "machine 'abacus': neither a file nor a named profile"),
    ],
)
def test_Stages_BadFiles_AreRefusedByField(run, change, text) -> None:
    status, out, err = run({**copy.deepcopy(PIPELINE), **change})
    assert (status, out) == (2, "")
    assert err.startswith("sluice plan: ") and text in err, err


def test_Stages_FilesThatAreNone_AreRefusedByName(run, capsys) -> None:
    assert run("{")[2].endswith(
        "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n"
    )
    assert "the file is []; it must be an object" in run("[]")[2]
    assert entry.main(["plan", "--stages", "/nowhere/model.json"]) == 2
    assert "--stages /nowhere/model.json: No such file or directory" in capsys.readouterr().err


def test_Parse_Example_IsThatOfTheHelp(capsys) -> None:
    """The problem in --help can be planned."""
    with pytest.raises(SystemExit):
        entry.main(["plan", "--stages=", "--help"])
    text = capsys.readouterr().out
    given = stages_file.parse(text[text.index("{", text.index("example:")) : text.rindex("}") + 1])
    assert given.machine == "h200-8x8" and len(given.problem.layers) == 5
    assert given.problem.budget_bytes == (3 << 30,) * 2


def test_Plan_ListsOfAnotherLength_AreRefused() -> None:
    layers = (stages.Layer(forward_seconds=1.0),) * 3
    with pytest.raises(BadInput, match="in_flight has 1 entries instead of 2 for 2 stages"):
        stages.plan(stages.Problem(layers, in_flight=(1,), num_stages=2))
    with pytest.raises(BadInput, match="schedule is 'x'; known are 1f1b"):
        stages.plan(stages.Problem(layers, schedule="x"))


def _chain(stages_there: int, **changes) -> str:
    layer = {"forward_seconds": 1, "backward_seconds": 2, "recompute_seconds": 1}
    layer |= {"activation_bytes": 100, "checkpoint_bytes": 10}
    return json.dumps({"sluice_stages": 1, "stages": stages_there, "layers": [layer] * 5, **changes})


def test_Chosen_ModelAndWhatIsPrintedOfIt_AreTheSamePlan(run, tmp_path) -> None:
    (tmp_path / "model.json").write_text(_chain(2))
    _, printed, _ = run(_chain(2), "--json")
    (tmp_path / "plan.json").write_text(printed)
    found = [stages_chosen.read(str(tmp_path / name), 5, 2) for name in ("model.json", "plan.json")]
    assert found[0] == found[1] and found[0].parts in ((0, 2, 5), (0, 3, 5)) and found[0].kinds == ("keep",) * 5
    under = stages_chosen.read(str(tmp_path / "model.json"), 5, 2, budget=150)
    assert "recompute" in under.kinds
    with pytest.raises(OverBudget, match="plan.json: .*over the budget of 150"):
        stages_chosen.read(str(tmp_path / "plan.json"), 5, 2, budget=150)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"form": 2}, "form is 2"),
        ({"fits": False}, "nothing fits"),
        ({"layers": [{"stage": 0, "kind": "keep"}] * 4}, "4 layers on 2 stages, and the model has 5 on 2"),
        ({"layers": [{"stage": s, "kind": "keep"} for s in (0, 1, 0, 1, 1)]}, "needs consecutive layers"),
        ({"layers": [{"stage": 0, "kind": "keep"}] * 5}, "at least one each"),
        ({"layers": [{"stage": 0, "kind": "kept"}] * 5}, r"layers\[0\] must have a stage"),
        ({"layers": [3] * 5}, r"layers\[0\] must have a stage"),
        ({"stages": None}, "must be lists"),
    ],
)
def test_Chosen_BadPlans_AreRefusedByField(run, tmp_path, change, text) -> None:
    _, printed, _ = run(_chain(2), "--json")
    (tmp_path / "plan.json").write_text(json.dumps({**json.loads(printed), **change}))
    with pytest.raises(BadInput, match=text):
        stages_chosen.read(str(tmp_path / "plan.json"), 5, 2)


LAYER = {name: value for name, value in BLOCK.items() if name not in ("name", "parameter_bytes", "state_bytes")}
EMBEDDING = {**LAYER, "name": "embedding", "forward_seconds": 1e-5, "backward_seconds": 1e-5}
LOSS = {**LAYER, "name": "loss", "forward_seconds": 6e-3, "backward_seconds": 12e-3}


def _printed(plan, layers: list, *words: str) -> tuple[int, str, str]:
    model = {"sluice_stages": 1, "stages": 4, "micro_batches": 8, "layers": layers}
    return plan("--stages", model, "--layout", "megatron", *words)


def test_Layout_OfLayers_IsALetterEach() -> None:
    names = ["embedding", "block", "block", "block", "mtp", "loss"]
    assert layout_of(names, [0, 0, 1, 1, 2, 2], 3) == "Et|tt|mL"
    assert layout_of(["a", "b", "c"], [0, 1, 1], 2) == "Et|ttL"
    assert layout_of(["embedding", "b", "c"], [0, 1, 2], 3) == "E|t|tL"


@pytest.mark.parametrize(
    ("names", "stage_of", "words"),
    [
        (["a", "b", "c"], [0, 1, 0], "not runs of consecutive layers"),
        (["a", "embedding", "c"], [0, 0, 1], "one embedding first"),
        (["embedding", "embedding", "c"], [0, 0, 1], "one embedding first"),
        (["mtp", "b", "loss"], [0, 0, 1], 'then layers named "mtp"'),
    ],
)
def test_Layout_WhatMegatronHasNoWordFor_IsRefused(names: list[str], stage_of: list[int], words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)):
        layout_of(names, stage_of, 2)


def test_Command_Layout_IsThePartitionOfThePlan(plan) -> None:
    layers = [EMBEDDING, {**LAYER, "name": "block", "repeat": 13}, LOSS]
    assert _printed(plan, layers) == (0, "Etttt|tttt|tttt|tL\n", "")  # the loss is as slow as three layers


def test_Command_LayoutUnderABudget_SaysWhatItCannotSay(plan) -> None:
    status, out, err = _printed(plan, [{**LAYER, "name": "block", "repeat": 8}], "--budget", "700MiB")
    assert status == 0 and out == "Ett|tt|tt|ttL\n"
    assert "the plan has recompute for layers 0" in err
    status, out, err = _printed(plan, [{**LAYER, "name": "block", "repeat": 8}], "--budget", "1MiB")
    assert (status, out) == (1, "") and "DOES NOT FIT" in err
