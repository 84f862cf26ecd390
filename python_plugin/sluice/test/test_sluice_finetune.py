# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice plan --finetune`: bytes by part, what fits and what to change, errors; `--lora-rank` elsewhere."""

import functools
import json
import re
from dataclasses import replace

import pytest
from sluice import __main__ as entry
from sluice.planning import architecture, finetune, simulate
from sluice.planning.planner import Workload, weight_bytes

QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "moe_intermediate_size": 768, "intermediate_size": 6144, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "head_dim": 64,
    "num_key_value_heads": 8, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "torch_dtype": "bfloat16", "attention_bias": True,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
SMALL = {
    **QWEN3, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 64, "num_experts": 8,
    "num_key_value_heads": 2, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture
def run(plan):
    return functools.partial(plan, "--finetune")


def _json(run, data: object, *words: str) -> dict:
    status, out, err = run(data, *words, "--json")
    assert err == "" and status in (0, 1)
    made = json.loads(out)
    assert made["fits"] == (status == 0) and made["total_bytes"] == sum(made["bytes"].values())
    return made


@pytest.mark.parametrize(
    ("config", "weight_format", "gigabytes"),
    [
        (QWEN3, "bf16", 57.98), (QWEN3, "fp8", 29.00), (QWEN3, "int4", 14.95), (QWEN3, "mxfp4", 15.40),
        (GPT_OSS, "bf16", 38.24), (GPT_OSS, "mxfp4", 10.15),
    ],
)  # fmt: skip
def test_Experts_OfWholeModels_TakeThePublishedBytes(config, weight_format: str, gigabytes: float) -> None:
    """Published bytes of codes and scales without biases: elements x bits, and a scale per block (1 byte per 32, 4 per
    128 x 128, 2 per 128)."""
    decoder = architecture.read(config)
    experts = decoder.moe_blocks[0].experts
    name = "plain" if weight_format == "bf16" else weight_format
    per_element = {"plain": 2, "fp8": 1 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 128}[name]
    layers = len(decoder.moe_blocks)
    found = layers * finetune.expert_bytes(replace(experts, biases=0), name, "bf16", 1)
    assert found == pytest.approx(gigabytes * 1e9, rel=1e-3)
    elements = layers * experts.count * 3 * experts.model_width * experts.hidden_width
    assert found == pytest.approx(elements * per_element, rel=1e-3)
    assert 4 * finetune.expert_bytes(experts, name, "bf16", 4) == finetune.expert_bytes(experts, name, "bf16", 1)


def test_Finetune_WholeModel_IsATableOfParts(run) -> None:
    status, out, err = run(QWEN3, "--ranks", "2", "--memory", "64GiB", "--expert-format", "mxfp4")
    assert (status, err) == (0, "")
    parts = {name: int(value.replace(",", "")) for name, value in re.findall(r"^  ([a-z ]+?) +([\d,]+) ", out, re.M)}
    assert set(parts) == {*finetune.PARTS, "in all"}
    assert parts["in all"] == sum(value for name, value in parts.items() if name != "in all") <= 64 << 30
    of_experts = 48 * 128 * 16 * (2048 + 2 * 768 + 768 + 2048)
    of_attention = 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    trained, held = of_experts + of_attention, of_experts // 2 + of_attention
    assert parts["adapters"] == parts["gradients"] == 4 * held and parts["optimizer"] == 8 * held
    assert f"{trained:,} parameters are trained" in out and " tokens/s on cpu-1x-10g " in out
    assert f"memory_budget to {parts['exchange buffers'] + parts['contexts']}" in out


def test_Finetune_ThatDoesNotFit_SaysWhatToChangeAndIsRight(run) -> None:
    words = ["--ranks", "2", "--memory", "32GiB"]
    status, out, _ = run(QWEN3, *words)
    assert status == 1 and "DOES NOT FIT: " in out
    made = _json(run, QWEN3, *words)
    alone = [line.split(": ") for line in made["advice"] if line.startswith("--") and "memory" not in line]
    assert {"--checkpoint", "--expert-format mxfp4", "--ranks 4"} <= {change for change, _ in alone}
    for change, says in alone:
        changed = [*words, *change.split()]
        if change == "--targets without experts":
            changed = [*words, "--targets", "attention"]
        if change.startswith("--ranks"):
            changed = ["--memory", "32GiB", *change.split()]
        assert _json(run, QWEN3, *changed)["fits"] == says.endswith(", fits"), (change, says)
    (together,) = [line for line in made["advice"] if line.startswith("together fit: ")]
    both = together.removeprefix("together fit: ").replace(",", "").split()
    assert _json(run, QWEN3, *words, *both)["fits"]


def test_Finetune_SmallestMemory_IsExact(run) -> None:
    made = _json(run, SMALL, "--memory", "10MiB", "--tokens", "64")
    assert not made["fits"] and made["choice"] is None and made["memory_budget"] is None
    total = made["total_bytes"]
    assert f"--memory {total} (" in made["advice"][-1]
    assert _json(run, SMALL, "--memory", str(total), "--tokens", "64")["fits"]
    assert not _json(run, SMALL, "--memory", str(total - 1), "--tokens", "64")["fits"]


def test_Finetune_Options_ChangeWhatTheySay(run) -> None:
    words = ["--memory", "8GiB", "--tokens", "128"]
    base = _json(run, SMALL, *words)
    low = _json(run, SMALL, *words, "--lora-rank", "8")
    assert 2 * low["bytes"]["adapters"] == base["bytes"]["adapters"]
    attention = _json(run, SMALL, *words, "--targets", "q_proj,v_proj,q_proj")
    assert attention["trained"] == 3 * 16 * ((256 + 256) + (256 + 128))
    assert attention["seconds"]["experts"] < base["seconds"]["experts"]  # frozen, and without adapters
    again = _json(run, SMALL, *words, "--checkpoint")
    assert again["bytes"]["activations"] < base["bytes"]["activations"]
    assert again["seconds"]["experts"] > base["seconds"]["experts"]
    two = _json(run, SMALL, *words, "--ranks", "2")
    assert two["bytes"]["experts"] * 2 == base["bytes"]["experts"] and two["bytes"]["gathered weights"] > 0
    kept = _json(run, SMALL, *words, "--ranks", "2", "--keep-dense")
    assert "gathering" in two["seconds"] and "gathering" not in kept["seconds"]
    assert kept["bytes"]["dense weights"] + kept["bytes"]["gathered weights"] == base["bytes"]["dense weights"]
    wide = _json(run, SMALL, *words, "--dtype", "f32")
    assert wide["bytes"]["experts"] == 2 * base["bytes"]["experts"]
    assert _json(run, GPT_OSS, "--memory", "64GiB", "--tokens", "64")["expert_format"] == "mxfp4"


@pytest.mark.parametrize(
    ("data", "words", "message"),
    [
        (SMALL, ("--ranks", "3"), "--ranks is 3, which does not divide the 8 experts of a layer"),
        (SMALL, ("--ranks", "0"), "--ranks is 0; it must be above 0"),
        (SMALL, ("--targets", "q_proj,qproj"), "--targets names 'qproj'; this model has q_proj, k_proj"),
        (SMALL, ("--targets", "gate_proj"), "--targets names 'gate_proj'"),  # each MLP of this model is a mixture
        (SMALL, ("--targets", ","), "--targets is empty"),
        (SMALL, ("--expert-format", "f32"), "plain experts have the dtype of the rest, bf16: give --dtype f32"),
        ({**SMALL, "moe_intermediate_size": 80}, ("--expert-format", "mxfp4"), "a width of 80, but mxfp4"),
        ({**SMALL, "quantization_config": {"quant_method": "gptq"}}, (), "quant_method is 'gptq'; known are"),
        ({**SMALL, "model_type": "llama"}, (), "model_type is 'llama'; known architectures are"),
        ({**SMALL, "mlp_only_layers": [0, 1, 2]}, (), "no layer of the model has experts"),
        ({**SMALL, "vocab_size": None}, (), "the field 'vocab_size' is missing"),
        ({**SMALL, "hidden_size": "wide"}, (), "hidden_size is 'wide'"),
        ("[]", (), "it must be an object, not list"),
        ("{", (), "not JSON"),
    ],
)  # fmt: skip
def test_Finetune_BadInput_IsRefusedByName(run, data, words, message) -> None:
    status, out, err = run(data, "--memory", "8GiB", "--tokens", "64", *words)
    assert (status, out) == (2, "") and message in err, err


# ---- adapters and frozen weights in plan and simulate ----

WORK = Workload(1024, 4096, 4096, 8, 2, 8)


def test_Plan_LoraRank_IsPricedAndRefused(capsys) -> None:
    flags = "--ranks 8 --model-width 1024 --hidden-width 4096 --experts 8 --top-k 2 --tokens 4096".split()
    found = {}
    for words in ((), ("--lora-rank", "16"), ("--expert-format", "mxfp4")):
        assert entry.main(["plan", "--machine", "h200-8x8", *flags, *words, "--json"]) == 0
        found[words] = json.loads(capsys.readouterr().out)["layers"][0]["prediction"]["backward"]
    assert found["--lora-rank", "16"] < found[()] and found["--expert-format", "mxfp4"] < found["--lora-rank", "16"]
    assert entry.main(["plan", "--machine", "h200-8x8", *flags, "--lora-rank", "-1"]) == 2
    assert "lora_rank is -1; it must be in [0, 65535]" in capsys.readouterr().err


def test_Simulate_FrozenExperts_HaveNoGradients() -> None:
    values = 2 * 1024 * 4096
    assert simulate.expert_bytes(WORK) == 2 * values * 2
    packed = sum(sum(weight_bytes("int8", "bf16", *shape)) for shape in ((4096, 1024), (1024, 4096)))
    assert simulate.expert_bytes(WORK.with_(weight_format="int8")) == packed
    adapters = 2 * 4 * 8 * (2 * 1024 + 2 * 4096)
    assert simulate.expert_bytes(WORK.with_(weight_format="int8", lora_rank=8)) == packed + adapters
