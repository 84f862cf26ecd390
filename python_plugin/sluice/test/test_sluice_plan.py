# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice plan`: machines, configs of hosts, choices with reasons, and errors that name the field."""

import functools
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from sluice import __main__ as entry
from sluice.errors import InvalidArgument
from sluice.planning import machines, model, moe_layers
from sluice.planning.errors import BadInput
from sluice.planning.planner import Choice, Planner, Workload

WORK = Workload(1024, 4096, 4096, 64, 2, 64, "f16")
FEW_RANKS = Workload(1024, 4096, 8192, 8, 2, 8, "f16")  # as FLAGS
FLAGS = "--ranks 8 --model-width 1024 --hidden-width 4096 --experts 8 --top-k 2 --tokens 8192 --dtype f16".split()
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def run(command):
    return functools.partial(command, "plan")


@pytest.mark.parametrize("name", machines.names())
def test_Profiles_EachIsReadableAndHasItsSources(name: str) -> None:
    machine = machines.load(name)
    assert machine.name == name and machine.data["provenance"] == "profile"
    assert {"cluster", "gemm", "exchange", "node_exchange", "host_copy"} <= machine.sources.keys()
    assert Planner(machine).predict(WORK, Choice(4, "keep", "keep", "deferred")).seconds > 0


def _budget_between(planner: Planner, work: Workload) -> int:
    """Returns a budget that is too small for the fastest policy of all chunks, and more than the smallest needs."""
    every = planner.choose(work.with_(memory_budget=1 << 50)).candidates
    least = min(c.total_bytes for c in every)
    return least + (next(c for c in every if c.verdict == "chosen").total_bytes - least) * 3 // 4


def test_Plan_ActivationOfAConfigOrFlag_IsPriced(tmp_path, run) -> None:
    data = {**machines.load("h200-8x8").data, "relu_seconds": 1e-15, "relu_grad_seconds": 1e-15}
    machine, config = tmp_path / "m.json", tmp_path / "config.json"
    machine.write_text(json.dumps({**data, "activation_seconds": 1e-9, "activation_grad_seconds": 1e-9}))
    words = ("--machine", str(machine), "--ranks", "8", "--config", str(config), "--tokens", "1024", "--json")
    seconds = []
    of_configs, of_flags = ("silu", "quick_gelu", "relu", "relu2"), ("gelu", "relu", "identity")  # flags win
    for word, flags in [(word, ()) for word in of_configs] + [("silu", ("--activation", word)) for word in of_flags]:
        config.write_text(json.dumps({**MIXTRAL, "hidden_act": word}))
        status, out, err = run(*words, *flags)
        assert status == 0, err
        seconds.append(json.loads(out)["layers"][0]["prediction"]["seconds"])
    silu, quick_gelu, *relu, gelu, flag, identity = seconds
    assert {*relu, flag, identity} == {relu[0]} and {silu, quick_gelu, gelu} == {silu} and relu[0] < silu


def test_Plan_WrongOption_IsNamedOnceAndAsItWasWritten(run) -> None:
    status, _, err = run(*FLAGS, "--machine", "h200-8x8", "--budget", "20Gigs")
    assert status == 2 and err.startswith("sluice plan: --budget 20Gigs: it ") and err.count("\n") == 1, err
    assert "INVALID_ARGUMENT" not in err and '"sluice"' not in err, err


def test_Machine_NameBeyondAscii_IsReadAsItStands(tmp_path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**machines.load("h200-8x8").data, "name": "Büro, 8 Karten"}, ensure_ascii=False))
    planner = Planner(machines.load(str(path)))
    assert planner.machine.name == "Büro, 8 Karten" and planner.choose(WORK).chosen is not None


def test_Machine_UnreadableFile_IsNamed(tmp_path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(b"\x80\x81")
    with pytest.raises(BadInput, match="machine .*m.json: .*can't decode"):
        machines.load(str(path))
    with pytest.raises(BadInput, match="m.json: not JSON"):
        machines.parse("[" * 100_000, "m.json")
    for sources in ("[1]", '{"exchange": 1}', "null"):
        with pytest.raises(BadInput, match="m.json: sources must be an object"):
            machines.parse(f'{{"sluice_profile": 1, "sources": {sources}, "machine": {{}}}}', "m.json")


def test_Machine_BadFields_AreNamed(tmp_path) -> None:
    good = machines.load("h200-8x8").data
    path = tmp_path / "m.json"
    for change, text in (
        ({"exchange": {"bytes_per_second": -1}}, "exchange.* is -1; it is bytes per second, above 0"),
        ({"warp_drive": 1}, 'unknown field "warp_drive"'),
        ({"op_seconds": -2}, "op_seconds is -2; it is a time in seconds, 0 or more"),
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(InvalidArgument, match=text):
            Planner(machines.load(str(path)))
    for text, message in (
        ("{", "not JSON"),
        ("[]", "it must be an object"),
        ('{"sluice_profile": 2, "machine": {}}', "sluice_profile is 2; this version reads 1"),
        ('{"sluice_profile": 1, "nodes": 8}', "unknown field 'nodes' in a profile; known are"),
        ('{"sluice_profile": 1}', "the field 'machine' is missing"),
    ):
        with pytest.raises(BadInput, match=message):
            machines.parse(text, "m.json")


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 3,
}  # fmt: skip
MEGATRON = {
    "num_layers": 8, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16, "num_moe_experts": 64,
    "moe_router_topk": 6, "moe_ffn_hidden_size": 1408, "moe_layer_freq": "([0]*3+[1]*5)", "gated_linear_unit": True,
    "params_dtype": "torch.bfloat16", "micro_batch_size": 2, "seq_length": 4096,
}  # fmt: skip
FROM_MEGATRON = (2048, 1408, 64, 6, 5, 8192, "bf16", True)
SCRIPT = """#!/bin/bash
# --num-experts 3
SEQ=4096
MODEL_ARGS=(
    --num-layers 8 --hidden-size 2048
    --ffn-hidden-size 8192
    --seq-length ${SEQ} --micro-batch-size ${MICRO:-2}
    --bf16
    --swiglu
)
MOE_ARGS="--num-experts 64 --moe-router-topk=6 --moe-ffn-hidden-size 1408 \\
    --moe-layer-freq '([0]*3+[1]*5)' --lr ${LR}"
torchrun pretrain_gpt.py ${MODEL_ARGS[@]} $MOE_ARGS
"""
# Sections of one YAML file; and a recipe, which has flags, and variables that nobody sets.
SECTIONS = "train:\n  micro_batch_size: 2\nmodel:\n" + "".join(
    f"  {key}: {value}\n" for key, value in MEGATRON.items() if key != "micro_batch_size"
)
_FLAGS = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu"}
RECIPE = "ENV_VARS:\n  NCCL_ALGO: Ring\nMODEL_ARGS:\n  --data-path: ${DATA}/x\n  --max-position-embeddings: ${MOST}\n"
RECIPE += "".join(f"  --{_FLAGS.get(key, key).replace('_', '-')}: {value}\n" for key, value in MEGATRON.items())


def _read(tmp_path, content, **flags) -> model.Model:
    """Reads a config with this content: data, or text, which is YAML if it begins with a key."""
    is_yaml = isinstance(content, str) and content.split()[0].endswith(":")
    if is_yaml:
        pytest.importorskip("yaml")
    path = tmp_path / ("config.yaml" if is_yaml else "config.json")
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return model.with_tokens(model.Model(**flags).over(model.read_config(str(path))))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (MIXTRAL, (4096, 14336, 8, 2, 32, None, "bf16", True)),
        (DEEPSEEK, (7168, 2048, 256, 8, 58, None, "bf16", True)),
        (MEGATRON, FROM_MEGATRON),
        # Megatron's defaults: K 2, H 4 M, two matrices.
        ({"num_layers": 4, "hidden_size": 64, "num_moe_experts": 8, "fp16": True},
         (64, 256, 8, 2, 4, None, "f16", False)),
        (SECTIONS, FROM_MEGATRON),
        (RECIPE, FROM_MEGATRON),
        (SCRIPT, FROM_MEGATRON),
    ],
    ids=["mixtral", "deepseek", "Megatron", "defaults", "YAML", "recipe", "script"],
)  # fmt: skip
def test_Config_OfEachHost_IsUnderstood(tmp_path, content, wanted: tuple) -> None:
    got = _read(tmp_path, content)
    names = ("model_width", "hidden_width", "num_experts", "top_k", "layers", "tokens", "dtype", "gated")
    assert tuple(getattr(got, each) for each in names) == wanted


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({**MIXTRAL, "hidden_size": -1}, "hidden_size is -1; it must be a whole number above 0"),
        ({**MIXTRAL, "torch_dtype": "float8"}, "torch_dtype is 'float8'; known are"),
        ({**MIXTRAL, "sluice": {"chnks": 4}}, "config.json: .*'chnks'"),
        ({**MEGATRON, "moe_router_topk": 0}, "config .*: moe_router_topk is 0; it must be a whole number above 0"),
        ({**MEGATRON, "params_dtype": "torch.float8"}, "params_dtype is 'float8'; known are"),
        ({**MEGATRON, "moe_layer_freq": "__import__('os')"}, "moe_layer_freq is .*; it must be a number, or list"),
        ({**MEGATRON, "moe_layer_freq": [1, 0]}, "moe_layer_freq has 2 items for 8 layers"),
        ({**MEGATRON, "context_parallel_size": 0}, "config .*: context_parallel_size is 0"),
        ("model: [", "not YAML"),
        ("echo hello", "not JSON: .*; and no script with Megatron's flags"),
        ({"train_batch_size": 4, "sluice": {"memory_bugdet": 1}}, "did you mean"),
    ],
)  # fmt: skip
def test_Config_Wrong_IsRefusedByFileAndField(tmp_path, content, text: str) -> None:
    with pytest.raises(BadInput, match=text) as caught:
        _read(tmp_path, content)
    assert str(caught.value).count(str(tmp_path)) == 1


def test_Config_TransformersWithASectionOfOurs_BothAreRead(tmp_path) -> None:
    got = _read(tmp_path, {**MIXTRAL, "sluice": {"memory_budget": "1MiB", "chunks": 4}})
    assert (got.model_width, got.num_experts, got.layers, got.memory_budget, got.chunks) == (4096, 8, 32, 1 << 20, 4)


def test_Config_WithoutExperts_IsRefusedWhenFlagsHaveBeenHeard(tmp_path) -> None:
    open_ = _read(tmp_path, {**MIXTRAL, "num_local_experts": None}, tokens=64)
    with pytest.raises(BadInput, match="--experts is missing: give it, or a --config of a mixture of experts"):
        model.complete(open_)
    assert model.complete(model.Model(num_experts=16).over(open_)).num_experts == 16
    with pytest.raises(BadInput, match="none of its layers has experts"):
        model.complete(_read(tmp_path, {**MIXTRAL, "is_moe": False}, tokens=64))


def test_Config_ScriptWithAnUnknownVariable_TokensAreAsked(tmp_path, run) -> None:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("SEQ=4096\n", ""))  # the script does not set a variable: the value is unknown
    words = ["--machine", "h200-8x8", "--ranks", "8", "--config", str(path)]
    status, _, err = run(*words)
    assert status == 2 and "micro-batch is 2: give --sequence-length or --tokens" in err
    assert run(*words, "--sequence-length", "4096")[0] == 0


LINE = "--num-layers 8 --hidden-size 64 --num-experts 8 --seq-length 4096 --micro-batch-size 2 --bf16"


@pytest.mark.parametrize(
    "flags, wanted",
    [
        ("", (None, 8192, 8, None)),
        ("--expert-model-parallel-size 4", (4, 8192, 8, None)),
        ("--context-parallel-size 2", (None, 4096, 8, None)),
        ("--tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2", (None, 1024, 8, None)),
        ("--tensor-model-parallel-size 4", (None, 8192, 8, None)),
        ("--pipeline-model-parallel-size 4", (None, 8192, 2, 8)),
        ("--pipeline-model-parallel-size 2 --moe-layer-freq ([0]*3+[1]*5)", (None, 8192, 4, 8)),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", (None, 8192, 4, 10)),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4 "
         "--microbatch-group-size-per-virtual-pipeline-stage 3", (None, 8192, 4, 12)),
    ],
)  # fmt: skip
def test_Config_MegatronParallelism_GivesRanksTokensAndLayersOfARank(tmp_path, flags: str, wanted) -> None:
    got = _read(tmp_path, f"{LINE} {flags}")
    assert (got.ranks, got.tokens, got.layers, got.max_outstanding) == wanted


def test_Config_SaysTheRanks_CommandNeedsNone(tmp_path, run) -> None:
    path = tmp_path / "arguments"
    path.write_text(f"{LINE} --expert-model-parallel-size 4")
    words = ["--machine", "h200-8x8", "--config", str(path)]
    status, out, _ = run(*words, "--json")
    assert status == 0 and json.loads(out)["layers"][0]["workload"]["world_size"] == 4
    path.write_text(LINE)
    status, _, err = run(*words)
    assert status == 2 and "--ranks is missing" in err


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({}, {"ranks": 4, "tokens": 128, "num_experts": 8, "top_k": 2, "gated": True}),
        ({"top_k": 3, "expert_activation": "geglu_tanh"}, {"top_k": 3, "activation": "gelu_tanh"}),
        ({"enabled": False, "top_k": 3}, {"ranks": None, "top_k": 2}),
        ({"score_apply": "pre"}, {"tokens": 256, "top_k": 1}),  # each route is a row
        ({"num_experts_attr": "sets", "top_k_attr": "picks"}, {"num_experts": 16, "top_k": 4}),
    ],
)
def test_Config_AutoEp_WithTheConfigOfTheModel_GivesSizes(tmp_path, section: dict, wanted: dict) -> None:
    ours, theirs = tmp_path / "ds.json", tmp_path / "config.json"
    theirs.write_text(json.dumps({**MIXTRAL, "sets": 16, "picks": 4}))

    def read(**more: object) -> model.Model:
        experts = {"enabled": True, "autoep_size": 4, "preset_model": "mixtral", **section, **more}
        ours.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "expert_parallel": experts}))
        both = model.read_configs([str(ours), str(theirs)])
        return model.complete(model.with_tokens(model.Model(sequence_length=64).over(both)))

    got = read()
    assert {name: getattr(got, name) for name in wanted} == wanted
    with pytest.raises(BadInput, match='/ds.json: "expert_parallel": autoep_size is 0'):
        read(autoep_size=0, enabled=True)


@pytest.mark.parametrize(
    "freq, layers",
    [
        (1, 12), (2, 6), ("3", 4), ([0, 1] * 6, 6), ("[0]*3+[1]*9", 9), ("([1]+[0]*2)*4", 4),
        ("([0, 1]*2 + [1])*2+[0]*2", 6),
    ],
)  # fmt: skip
def test_Config_MegatronLayerFreq_NumberListOrPattern(tmp_path, freq, layers: int) -> None:
    assert _read(tmp_path, {**MEGATRON, "num_layers": 12, "moe_layer_freq": freq}).layers == layers


@pytest.mark.parametrize("text", ["", "[1]*", "[1]*1000000", "([1]*100000)*2", "[1]+x", "([1]", "[1])", "[]", "1+1"])
def test_Pattern_Wrong_IsRefused(text: str) -> None:
    with pytest.raises(BadInput, match="moe_layer_freq"):
        moe_layers.pattern(text)


def test_Config_DeepSpeed_GivesTokensAndBudget(tmp_path) -> None:
    section = {"enabled": True, "memory_budget": "2GiB", "policy": "S4"}
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "sluice": section}
    got = _read(tmp_path, config, sequence_length=2048)
    assert (got.tokens, got.dtype, got.memory_budget) == (8192, "bf16", 2 << 30)
    assert got.policy == ("redispatch", "recompute")
    # Missing values are required only after flags and other configs were read.
    open_ = model.Model(1024, 4096, 8, 2).over(_read(tmp_path, config))
    with pytest.raises(BadInput, match="micro-batch is 4: give --sequence-length or --tokens"):
        model.complete(open_)
    assert model.complete(model.Model(tokens=64).over(open_)).tokens == 64
    # transformers' Trainer replaces "auto" when it starts.
    auto = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    found = _read(tmp_path, auto)
    assert found.dtype is None and found.micro_batch is None
    assert _read(tmp_path, {**auto, "bf16": {"enabled": True}}).dtype == "bf16"


def test_Plan_Fits_SaysWhyNotTheOthers(tmp_path, run) -> None:
    picture = tmp_path / "plan.svg"
    words = ["--machine", "a100-8x8-1600g", *FLAGS, "--layers", "4", "--budget", "4GiB", "--picture", str(picture)]
    status, out, _ = run(*words)
    assert status == 0
    assert "chosen: n = " in out and "slower by" in out and "error not measured" in out and "layers 0-3" in out
    assert len(ElementTree.fromstring(picture.read_text()).findall(".//{*}title")) > 50
    assert "holds chunk" in picture.read_text()
    status, out, _ = run(*words, "--json")
    made = json.loads(out)
    assert status == 0 and made["layers"][0]["fits"] and made["sources"]["cluster"]
    assert all(candidate["reason"] for candidate in made["layers"][0]["candidates"])


def test_Plan_HostBudgetOfAConfig_IsHonoured(tmp_path, run) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"sluice": {"enabled": True, "host_memory_budget": "1MiB"}}))
    status, out, _ = run("--machine", "a100-8x8-1600g", *FLAGS, "--config", str(config))
    assert status == 0 and "1 MiB for offloaded rows" in out and "over host budget by" in out
    status, out, _ = run("--machine", "a100-8x8-1600g", *FLAGS, "--policy", "S1", "--host-budget", "1MiB")
    assert status == 1 and "raise host_memory_budget" in out


def test_Plan_BudgetBetweenPolicies_ShowsWhatKeepsPartOfItsChunks(tmp_path, run) -> None:
    planner = Planner(machines.load("a100-8x8-200g"))
    budget = _budget_between(planner, FEW_RANKS)
    picture = tmp_path / "plan.svg"
    words = ["--machine", "a100-8x8-200g", *FLAGS, "--budget", str(budget), "--picture", str(picture)]
    status, out, _ = run(*words)
    assert status == 0 and re.search(r" +\d+ \S+ in \d+ of \d+ .* (slower by|chosen)", out)
    assert "holds chunk" in picture.read_text()
    layer = json.loads(run(*words, "--json")[1])["layers"][0]
    parts = [c for c in layer["candidates"] if c["choice"]["kept_chunks"]]
    assert parts and all(c["total_bytes"] <= budget and c["reason"] for c in parts)
    for part in parts:  # the same policy for all chunks is refused
        whole = {**part["choice"], "kept_chunks": 0}
        assert [c["verdict"] for c in layer["candidates"] if c["choice"] == whole] == ["over budget"]
    # A fixed policy applies to all chunks.
    layer = json.loads(run(*words, "--policy", "S4", "--json")[1])["layers"][0]
    assert not [c for c in layer["candidates"] if c["choice"]["kept_chunks"]]


def test_Plan_PolicyByChunkOfAConfig_IsPriced(tmp_path, run) -> None:
    config, picture = tmp_path / "ds.json", tmp_path / "plan.svg"
    policy = {"input": ["keep", "redispatch"], "pre_activation": "keep"}
    config.write_text(json.dumps({"sluice": {"enabled": True, "chunks": 2, "policy": policy}}))
    words = ["--machine", "a100-8x8-1600g", *FLAGS, "--config", str(config), "--picture", str(picture)]
    status, out, _ = run(*words)
    assert status == 0 and "chosen: n = 2, keep/redispatch+keep, weight gradients" in out
    assert "holds chunk" in picture.read_text()
    layer = json.loads(run(*words, "--json")[1])["layers"][0]
    assert (
        layer["chosen"]["restore_input"] == ["keep", "redispatch"]
        and layer["chosen"]["restore_pre_activation"] == "keep"
    )
    assert len(layer["candidates"]) == 2 and layer["chosen"]["policy"] == "keep/redispatch+keep"
    status, _, err = run(*words, "--chunks", "4")
    assert status == 2 and '"policy.input" names 2 chunks, and "chunks" is 4: give 4' in err


def test_Plan_Deduplicate_IsPricedBothWays(tmp_path, run) -> None:
    flags = [*FLAGS, "--ranks", "2", "--top-k", "4"]  # four of eight experts: nearly always on both ranks
    status, out, _ = run("--machine", "a100-8x8-200g", *flags)
    assert status == 0 and re.search(r"  deduplicated: .* speed\); 49 % of the rows travel with it", out)
    status, out, _ = run("--machine", "a100-8x8-200g", *flags, "--deduplicate")
    assert status == 0 and re.search(r"  not deduplicated: .* speed\); 49 % of the rows travel with it", out)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"sluice": {"enabled": True, "deduplicate": True}}))
    picture = tmp_path / "plan.svg"
    words = ["--config", str(config), "--json", "--picture", str(picture)]
    status, out, _ = run("--machine", "a100-8x8-200g", *flags, *words)
    layer = json.loads(out)["layers"][0]
    assert status == 0 and layer["workload"]["deduplicate"] and "holds chunk" in picture.read_text()
    assert layer["other_way"]["sent_rows"] == pytest.approx(8192 * 4 / 2)
    assert layer["prediction"]["sent_rows"] == pytest.approx(8192 * (1 - 1 / 70))
    assert layer["prediction"]["seconds"] < layer["other_way"]["seconds"]
    for none in (["--ranks", "1"], ["--top-k", "1"]):
        assert "deduplicated" not in run("--machine", "a100-8x8-200g", *flags, *none)[1]
    for on, other in (["--deduplicate"], "not deduplicated"), ([], "deduplicated"):
        status, out, _ = run("--machine", "a100-8x8-200g", *flags, *on, "--budget", "20GiB")
        assert status == 0 and re.search(rf"  {other}: .* speed\); 49 % of the rows travel with it", out)


def test_Plan_Routing_LayersTakeTheirOwnSkewAndBeginAgain(tmp_path, run) -> None:
    path = tmp_path / "routing.jsonl"
    even, hot = [8] * 8, [32, 8, 8, 8, 2, 2, 2, 2]  # over 8 ranks 1 and 4 times the mean
    steps = [{"step": step, "loads": [even, hot, even]} for step in range(3)]
    path.write_text("\n".join(map(json.dumps, [{"sluice_routing": 1, "layers": 3, "experts": 8}, *steps])))
    words = ("--machine", "h200-8x8", *FLAGS, "--layers", "8", "--routing", str(path), "--json")
    status, out, err = run(*words)
    assert status == 0, err
    found = [(row["layers"], row["workload"]["skew"]) for row in json.loads(out)["layers"]]
    assert found == [([0, 2, 3, 5, 6], 1.0), ([1, 4, 7], 4.0)]
    refusals = (
        (["--skew", "2"], "--skew and --routing exclude each other"),
        (["--experts", "16"], "recorded with 8 exp"),
    )
    for more, text in refusals:
        status, _, err = run(*words, *more)
        assert status == 2 and text in err, err


def test_Plan_DoesNotFit_SaysThatThereIsNoPicture(tmp_path, run) -> None:
    picture = tmp_path / "plan.svg"
    words = ("--machine", "h200-8x8", *FLAGS, "--picture", str(picture))
    status, out, err = run(*words, "--budget", "10MiB")
    assert status == 1 and not picture.exists() and "plan.svg: what would be drawn does not fit" in err
    assert "DOES NOT FIT" in out and "raise memory_budget to that" in out and "over budget by" in out
    assert "outside of passes" not in out  # nothing was predicted
    status, out, err = run(*words)
    assert status == 0 and picture.exists() and err == ""
    assert "not included: time of the host outside of passes" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--machine", "nowhere", *FLAGS], "neither a file nor a named profile"),
        (["--machine", "h200-8x8", "--ranks", "8"], "--model-width is missing"),
        (["--machine", "h200-8x8", *FLAGS, "--ranks", "7"], "experts divide evenly over ranks"),
        (["--machine", "h200-8x8", *FLAGS, "--budget", "lots"], '--budget lots: .* such as "20GiB"'),
        (["--machine", "h200-8x8", *FLAGS, "--host-budget", "some"], '--host-budget some: .* such as "20GiB"'),
        (["--machine", "h200-8x8", *FLAGS, "--skew", "0.5"], "skew is 0.5"),
        (["--machine", "h200-8x8", *FLAGS, "--tokens", "0"], "--tokens is 0"),
        (["--machine", "h200-8x8", *FLAGS, "--config", "no.json"], "no.json: No such file"),
        (["--machine", "h200-8x8", *FLAGS, "--picture", "no/such/x.svg"], "--picture .*: there is no folder no/such"),
        (["--machine", "h200-8x8", *FLAGS, "--picture", "/"], "--picture /: it is a folder"),
        (["--machine", "h200-8x8", *FLAGS, "--ranks", "0", "--routing", "x.jsonl"], "--ranks is 0; it must be above 0"),
        (["--machine", "h200-8x8", *FLAGS, "--outstanding", "0"], "--outstanding is 0; it must be above 0"),
        (["--machine", "h200-8x8", *FLAGS, "--layers", "100001"], "--layers is 100001; it must be at most 100000"),
        (["--machine", "h200-8x8", *FLAGS, "--chunks", "0"], "--chunks is 0; it must be above 0, and is chosen where"),
        (["--machine", "h200-8x8", *FLAGS, "--activation", "sin"], "--activation is 'sin'; known are identity, relu"),
    ],
)
def test_Plan_BadInput_IsNamed(words: list[str], text: str, run) -> None:
    status, _, err = run(*words)
    assert status == 2 and re.search(text, err), err


def test_Help_EveryCommand_HasAnExampleAndExitCodes(capsys) -> None:
    for command in ("doctor", "plan", "routing", "run", "simulate", "trace", "tune"):
        with pytest.raises(SystemExit) as ended:
            entry.main([command, "--help"])
        text = capsys.readouterr().out
        assert ended.value.code == 0 and f"\n  sluice {command}" in text and "exit status: 0" in text, command
        assert command == "run" or "--json" in text, command
