# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice plan --split`: choices, bytes within budgets, rates on shared ports, files, and errors with names."""

import copy
import functools
import json
import random
from xml.etree import ElementTree

import pytest
from sluice.planning import architecture, machines, split, split_file
from sluice.planning.errors import BadInput

SVG = "{http://www.w3.org/2000/svg}"
BLOCK = {
    "name": "block", "parameters": 12e6, "flops": 1.3e10, "activation_bytes": "20MiB", "checkpoint_bytes": "1MiB",
    "output_bytes": "1MiB", "repeat": 12,
}  # fmt: skip
FILE = {"sluice_split": 1, "batch": 32, "tokens": 512, "dtype": "bf16", "machine": "h200-8x8", "layers": [BLOCK]}
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "moe_intermediate_size": 128, "intermediate_size": 512, "num_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def run(plan):
    return functools.partial(plan, "--split")


def _splits(out: str) -> list[dict]:
    return json.loads(out)["splits"]


def test_Split_Model_IsATableWithTheBestAndTheFrontier(run, tmp_path) -> None:
    picture = tmp_path / "split.svg"
    status, out, err = run(FILE, "--ranks", "8", "--budget", "1GiB", "--picture", str(picture))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("8 ranks, 12 layers, a batch of 32 samples, 1 GiB on each rank; ")
    assert lines[1].startswith("best: pipeline ") and " s a step (" in lines[1]
    rows = [line.split() for line in lines[4:] if line[:6].strip().isdigit()]
    assert rows[0][-2:] == ["best,", "frontier"] and all(int(row[0]) * int(row[1]) == 8 for row in rows)
    assert len(rows) >= split.SIMULATED
    drawn = ElementTree.parse(picture).getroot()
    assert len(list(drawn.iter(f"{SVG}circle"))) == len(rows)
    assert any("frontier" in (each.text or "") for each in drawn.iter(f"{SVG}text"))


def test_Split_EveryPlan_StaysInTheBudgetAndTheFrontierIsPareto(run) -> None:
    status, out, _ = run(FILE, "--ranks", "8", "--budget", "700MiB", "--json")
    assert status == 0
    found = _splits(out)
    assert all(each["bytes"] <= 700 << 20 for each in found)
    assert [each["seconds"] for each in found] == sorted(each["seconds"] for each in found)
    for each in found:
        beaten = any(o["seconds"] <= each["seconds"] and o["bytes"] < each["bytes"] for o in found)
        assert each["on_frontier"] == (not beaten), each
    for each in found:  # every cut of a pipeline sends one layer's output per micro-batch
        sent = each["micro_batches"] * each["micro_batch"] << 20
        assert each["message_bytes"] == [sent] * (each["pipeline"] - 1) + [0]


def test_Split_ThatDoesNotFit_NamesTheSmallestBudgetToTheByte(run) -> None:
    status, out, _ = run(FILE, "--ranks", "4", "--budget", "50MiB", "--json")
    made = json.loads(out)
    smallest = made["smallest_budget"]
    assert status == 1 and not made["fits"] and made["splits"] == [] and f"{smallest} bytes" in made["shortfall"]
    status, out, _ = run(FILE, "--ranks", "4", "--budget", str(smallest), "--json")
    assert status == 0 and {each["bytes"] for each in _splits(out)} == {smallest}
    status, out, _ = run(FILE, "--ranks", "4", "--budget", str(smallest - 1))
    assert status == 1 and "DOES NOT FIT: no split fits " in out and str(smallest) in out


def test_Split_Choice_IsTheBestOfAllSplitsInVirtualTime(monkeypatch) -> None:
    """Ranking by the plan's own formula loses at most 1 % against simulating every split."""
    machine, draw = machines.load("h200-8x8"), random.Random(7)
    for _ in range(6):
        layers = tuple(
            split.Layer(
                "drawn", parameters=draw.randrange(10**6, 3 * 10**7), flops=draw.uniform(5e9, 5e10),
                activation_bytes=draw.randrange(8 << 20, 64 << 20), checkpoint_bytes=1 << 20, output_bytes=1 << 20,
            )
            for _ in range(10)
        )  # fmt: skip
        model, budget = split.Model(layers, 24, 512), 2 << 30
        chosen = split.Search(machine, model, budget).run(8).priced[0]
        with monkeypatch.context() as patch:
            patch.setattr(split, "SIMULATED", 10**6)
            best = split.Search(machine, model, budget).run(8).priced[0]
        assert chosen.seconds <= 1.01 * best.seconds


def _grid(p: int, d: int, order: str, node: int = 4) -> split.Grid:
    data = {
        "ranks_per_node": node,
        "exchange": {"bytes_per_second": 1e9, "startup_seconds": 1e-5},
        "node_exchange": {"bytes_per_second": 20e9, "startup_seconds": 1e-6},
    }
    return split.Grid(machines.Machine(data, {}), split.Split(p, d, 1, 1, "near", order))


def test_Grid_RanksOfANode_ShareItsPort() -> None:
    """8 ranks on two nodes with a port of 4 GB/s each."""
    inner = _grid(4, 2, split.STAGES_FIRST)  # a replica on each node: messages stay within, all four sums leave
    assert [inner.link(cut).bytes_per_second for cut in range(3)] == [20e9] * 3
    assert inner.ring_seconds(1e9, 2) == pytest.approx(2 / 2 * 1e9 / 1e9 + 2e-5)
    outer = _grid(4, 2, split.REPLICAS_FIRST)  # stages 0 and 1 on the first node: one cut leaves it, for two replicas
    assert [outer.link(cut).bytes_per_second for cut in range(3)] == [20e9, 2e9, 20e9]
    assert outer.link(1).latency_seconds == 1e-5 and outer.link(0).latency_seconds == 1e-6
    assert outer.ring_seconds(1e9, 2) == pytest.approx(1e9 / 20e9 + 2e-6)
    assert outer.ring_seconds(1e9, 1) == 0
    whole = _grid(1, 8, split.STAGES_FIRST)  # one ring over both nodes: one flow leaves each
    assert whole.ring_seconds(1e9, 8) == pytest.approx(2 * 7 / 8 * 1e9 / 4e9 + 14e-5)


def test_Seconds_MeasuredAtTwoSizes_AreOnTheirLine() -> None:
    machine, model = machines.load("h200-8x8"), split.Model((), 8)
    layer = split.Layer("measured", measured=((1, 2e-3, 5e-3), (4, 5e-3, 11e-3)))
    assert split.seconds_of(machine, model, layer, 2) == pytest.approx((3e-3, 7e-3))
    assert split.seconds_of(machine, model, layer, 8) == pytest.approx((9e-3, 19e-3))
    one = split.Layer("one", measured=((2, 2e-3, 4e-3),))
    assert split.seconds_of(machine, model, one, 8) == pytest.approx((8e-3, 16e-3))


def test_Recompute_AlwaysAndNever_AreTheExtremes(run) -> None:
    words = ("--ranks", "4", "--budget", "8GiB", "--micro-batch", "2", "--pipeline", "4", "--tier", "near", "--json")
    kinds = {}
    for recompute in ("always", "never"):
        status, out, _ = run(FILE, *words, "--recompute", recompute)
        assert status == 0
        kinds[recompute] = _splits(out)[0]
    assert set(kinds["always"]["kinds"]) == {"recompute"} and set(kinds["never"]["kinds"]) == {"keep"}
    assert kinds["always"]["bytes"] < kinds["never"]["bytes"] and kinds["always"]["seconds"] > kinds["never"]["seconds"]


def test_Config_OfAMixture_IsSplitWithItsExpertsOverReplicas(run) -> None:
    words = ("--ranks", "4", "--budget", "4GiB", "--machine", "h200-8x8", "--batch", "8", "--sequence-length", "64")
    status, out, err = run(CONFIG, *words, "--json")
    assert (status, err) == (0, "")
    found = _splits(out)
    assert {each["expert_ranks"] for each in found} > {1} and all(len(each["stage_of"]) == 6 for each in found)
    made = split_file.of_decoder(CONFIG, 8, 64)
    decoder = architecture.read(CONFIG)
    assert sum(layer.parameters for layer in made.layers) == decoder.dense
    assert sum(layer.experts.parameters for layer in made.layers if layer.experts) == 4 * 8 * 3 * 256 * 128


def test_SmallestBudget_WithExperts_FallsWithTheirRanks() -> None:
    machine, model = machines.load("h200-8x8"), split_file.of_decoder(CONFIG, 8, 64)
    needed = {}
    for experts in (1, 2, 4):
        wanted = split.Wanted(pipeline=1, experts=experts, micro_batch=1, tiers=("near",))
        found = split.Search(machine, model, 1, wanted).run(4)
        needed[experts] = found.smallest_budget
    assert needed[1] > needed[2] > needed[4] and not found.priced


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "8", "--pipeline", "3"), "--pipeline is 3, which does not divide --ranks 8"),
        (("--ranks", "8", "--data", "5"), "--data is 5, which does not divide --ranks 8"),
        (("--ranks", "8", "--pipeline", "2", "--data", "2"), "--pipeline 2 x --data 2 is 4 ranks, and --ranks 8"),
        (("--ranks", "16", "--pipeline", "16"), "--pipeline is 16: the model has 12 layers, and no stage"),
        (("--ranks", "128", "--pipeline", "128"), "--pipeline is 128: the model has 12 layers"),
        (("--ranks", "8", "--expert-ranks", "2"), "--expert-ranks is 2, and no layer of the model has experts"),
        (("--ranks", "24", "--data", "3"), "a batch of 32 samples does not divide over 3 replicas"),
        (("--ranks", "8", "--data", "8", "--micro-batch", "3"), "--micro-batch is 3, which does not divide the 4"),
        (("--ranks", "0",), "--ranks is 0"),
        (("--ranks", "8", "--machine", "cached"), "--machine cached: a calibration is of one number of ranks"),
        (("--ranks", "7", "--pipeline", "1"), "a batch of 32 samples does not divide over 7 replicas"),
    ],
)  # fmt: skip
def test_Split_ThatTheGroupsCannotForm_IsRefusedByName(run, words, message) -> None:
    status, out, err = run(FILE, "--budget", "1GiB", *words)
    assert (status, out) == (2, "") and message in err, err


def test_ExpertRanks_ThatDoNotDivide_AreRefusedByName(run) -> None:
    words = ("--budget", "4GiB", "--machine", "h200-8x8", "--batch", "24", "--sequence-length", "64")
    for given, message in (
        (("--ranks", "6", "--expert-ranks", "3"), "--expert-ranks is 3, which does not divide the 8 experts"),
        (
            ("--ranks", "8", "--pipeline", "4", "--expert-ranks", "4"),
            "--expert-ranks is 4, which does not divide --data 2",
        ),
    ):
        status, _, err = run(CONFIG, *words, *given)
        assert status == 2 and message in err, err


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("sluice_split",), 2, "sluice_split is 2; this version reads 1"),
        (("batch",), 0, "batch is 0; it must be a whole number from 1 on"),
        (("dtype",), "f8", "dtype is 'f8'; it must be one of f32, bf16, f16"),
        (("layers",), [], "layers is empty"),
        (("layers", 0, "parameters"), -1, "layers[0].parameters is -1"),
        (("layers", 0, "parametres"), 1, "unknown field 'parametres'"),
        (("layers", 0, "checkpoint_bytes"), "1GiB", "layers[0].checkpoint_bytes is"),
        (("layers", 0, "measured"), [{"micro_batch": 1}], "layers[0].measured[0]: the field 'forward_seconds"),
        (("layers", 0, "repeat"), 5000, "layers has more than 4096 layers"),
        (("layers", 0, "experts"), {"count": 2, "top_k": 3, "model_width": 8, "hidden_width": 8}, "experts.top_k is 3"),
    ],
)  # fmt: skip
def test_File_WrongField_IsRefusedByName(path, value, message) -> None:
    data = copy.deepcopy(FILE)
    at = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(BadInput) as caught:
        split_file.parse(json.dumps(data))
    assert message in caught.value.message


def test_File_BothFlopsAndMeasured_OrNeitherKind_IsRefused() -> None:
    both = {**FILE, "layers": [{"flops": 1, "measured": []}]}
    for words, message in (
        (json.dumps(both), "layers[0] has both flops and measured"),
        ("[]", "the file is []"),
        ("{}", "neither 'sluice_split' (docs/tools.md) nor 'model_type'"),
        ('{"model_type": "llama"}', "give --batch and --sequence-length"),
    ):
        with pytest.raises(BadInput) as caught:
            split_file.parse(words)
        assert message in caught.value.message
    with pytest.raises(BadInput) as caught:
        split_file.parse('{"model_type": "llama"}', 8, 64)
    assert "known architectures are qwen3_moe, gpt_oss" in caught.value.message


def test_Machine_WithoutABudgetOrLinks_IsRefused(run, tmp_path) -> None:
    data = {**machines.load("h200-8x8").data}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    status, _, err = run(FILE, "--ranks", "8", "--machine", str(path))
    assert status == 2 and "--budget is missing: machine h200-8x8 does not say what a device has" in err
    del data["exchange"]
    path.write_text(json.dumps(data))
    status, _, err = run(FILE, "--ranks", "8", "--budget", "1GiB", "--machine", str(path))
    assert status == 2 and "the field 'exchange' is missing" in err


def test_Batches_BeyondWhatIsSimulated_ContinueLinearly(monkeypatch) -> None:
    machine = machines.load("h200-8x8")
    layers = tuple(split.Layer(str(i), 10**6, flops=1e10, output_bytes=1 << 20) for i in range(4))
    search = split.Search(machine, split.Model(layers, 1024, 512), 0, split.Wanted(pipeline=4, micro_batch=1))
    short = search.run(4).priced[0]
    monkeypatch.setattr(split, "MOST_SIMULATED", 1024)
    whole = search.simulated(short)
    assert short.micro_batches == 1024 and short.batch_seconds == pytest.approx(whole.batch_seconds, rel=1e-3)
    assert short.bubble == pytest.approx(whole.bubble, abs=1e-3)
