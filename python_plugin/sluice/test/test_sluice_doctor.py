# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice doctor --config`: what would be swapped or why not, with wrong keys by name."""

import json
import subprocess
import sys

import pytest
from sluice import doctor, doctor_config

STEP = {"train_micro_batch_size_per_gpu": 8}
ON = {"enabled": True}
MIXTRAL = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    for name in ("SLUICE", "SLUICE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)


def ask(folder, content, name="given.json"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return list(doctor_config.examine(str(path)))


def _ds(section=ON, stage=None, **more):
    return {**STEP, **({"zero_optimization": {"stage": stage}} if stage else {}), **more, "sluice": section}


EP, DEEP_EP = {"enabled": True}, {"enabled": True, "autoep_size": 2, "comm_backend": "deepep"}
WITH_COMMENTS = '{\n  // the batch\n  "train_batch_size": 8,\n  "sluice": {"enabled": true},\n}'
DEEPSPEED = {
    "on": (_ds(), "ok", ["every deepspeed.moe.layer.MoE", "chunks adaptive", "is an error"]),
    "on, warn": (
        _ds({**ON, "chunks": 4, "policy": "S4", "on_unsupported": "warn"}), "ok",
        ["chunks 4 | policy S4", "left to DeepSpeed"],
    ),
    "comments as DeepSpeed takes them": (WITH_COMMENTS, "ok", ["every deepspeed.moe.layer.MoE"]),
    "no section": (STEP, "bad", ['no "sluice" section', "no layer would be swapped"]),
    "section misspelt": ({**STEP, "slucie": ON}, "bad", ['"slucie"', '"sluice"']),
    "off": (_ds({"enabled": False}), "note", ['"enabled" is not true']),
    "key misspelt": (_ds({**ON, "chnks": 2}), "bad", ["'chnks'", '"chunks"']),
    "value misspelt": (_ds({**ON, "gemm": "onedn"}), "bad", ["gemm", '"onednn"']),
    "auto": (_ds({**ON, "chunks": "auto"}), "bad", ['the word "auto"']),
    "ZeRO 3": (_ds(stage=3), "bad", ["ZeRO stage 3", '"stage": 2']),
    "a pipeline": (_ds({**ON, "pipeline": {"policy": "gpipe"}}), "ok", ["ops of a pipeline run as", "(policy gpipe)"]),
    "a pipeline under ZeRO 2": (
        _ds({**ON, "pipeline": {}}, 2), "bad", ["pipeline engine itself refuses", '"stage": 1']
    ),
    "AutoEP": (_ds(expert_parallel=EP), "ok", ["every AutoEP layer"]),
    "AutoEP over DeepEP": (
        _ds(expert_parallel=DEEP_EP), "bad", ['"comm_backend" is "deepep"', "take that key out"]
    ),
    "AutoEP under ZeRO 3": (
        _ds(stage=3, expert_parallel=EP), "bad", ["ZeRO stage 3: AutoEP layers are not swapped", '"stage": 2']
    ),
    "AutoTP": (_ds(tensor_parallel={"autotp_size": 2}), "bad", ["autotp_size is 2"]),
    "no JSON": ("{", "bad", ["given.json"]),
    "a list": ("[1]", "bad", ["not an object"]),
    "something else": ({"scripts": {}}, "bad", ["not a config of DeepSpeed", "model_type"]),
}  # fmt: skip


def test_DeepSpeedConfig_AutoEpUnderWarn_NotesIt(tmp_path):
    noted, swapped = ask(tmp_path, _ds({**ON, "on_unsupported": "warn"}, expert_parallel=DEEP_EP))
    assert (noted.state, swapped.state) == ("note", "ok") and "AutoEP" in noted.detail


@pytest.mark.parametrize("word, state, said", [("0", "note", "SLUICE=0"), ("1", "ok", "every deepspeed.moe.layer.MoE")])
def test_DeepSpeedConfig_EnvironmentOverrides(tmp_path, monkeypatch, word, state, said):
    monkeypatch.setenv("SLUICE", word)
    (finding,) = ask(tmp_path, _ds({"enabled": word == "0"}))
    assert finding.state == state and said in finding.detail


def test_Config_Missing_IsNamed(tmp_path):
    (finding,) = doctor_config.examine(str(tmp_path / "nothing.json"))
    assert finding.state == "bad" and "nothing.json: No such file" in finding.detail


TRANSFORMERS = {
    "experts": (MIXTRAL, "ok", ["6 layers of this mixtral with 8 experts", 'experts_implementation="sluice"']),
    "a section": ({**MIXTRAL, "sluice": {"chunks": 2}}, "ok", ["chunks 2"]),
    "a policy by chunk": (
        {**MIXTRAL, "sluice": {"chunks": 2, "policy": {"pre_activation": ["keep", "recompute"]}}},
        "ok",
        ["6 layers of this mixtral", "chunks 2 | policy"],
    ),
    "a wrong key": ({**MIXTRAL, "sluice": {"chnks": 2}}, "bad", ["'chnks'", '"chunks"']),
    "a key of the user": (
        {**MIXTRAL, "sluice": {"gemm": "blas", "gemm_library": "/x.so"}},
        "bad",
        ['"gemm_library" (it names code to load)', "the model's own config", "sluice.configure(gemm=..., gemm_library"],
    ),
    "off": ({**MIXTRAL, "sluice": {"enabled": False}}, "note", ["leaves the experts to transformers"]),
    "dense": ({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 6}, "bad", ["without experts"]),
    "a family of its own": ({**MIXTRAL, "model_type": "jetmoe"}, "bad", ["jetmoe do not read"]),
    "quantised": ({**MIXTRAL, "quantization_config": {"bits": 4}}, "bad", ["quantization_config"]),
    "a wrong field": ({**MIXTRAL, "hidden_size": "64"}, "bad", ["hidden_size is '64'"]),
}


SCRIPT = "--num-layers 8 --hidden-size 64 --num-experts 8 --moe-router-topk 2 --transformer-impl local"
NAMED = f"{SCRIPT} --spec sluice.megatron moe_block_spec"
RECIPE = "MODEL_ARGS:\n  --num-layers: 8\n  --num-experts: 8\n"
FLEX, SPLIT = "--moe-token-dispatcher-type flex", "--tensor-model-parallel-size 2"
OF_CORE = {"num_layers": 8, "hidden_size": 64, "num_moe_experts": 8}
MEGATRON = {
    "a line of flags": (NAMED, "ok", ["every MoE layer of 8 experts", "chunks adaptive"]),
    "no spec": (SCRIPT, "bad", ["no --spec", "add --spec sluice.megatron moe_block_spec"]),
    "another spec": (f"{SCRIPT} --spec my.spec layer", "bad", ["no --spec"]),
    "flex": (f"{NAMED} {FLEX}", "bad", ['"flex" is not supported', 'use "alltoall"']),
    "experts split": (f"{NAMED} {SPLIT}", "bad", ["over 2 tensor-parallel ranks"]),
    "experts whole": (f"{NAMED} {SPLIT} --expert-tensor-parallel-size 1", "ok", ["every MoE layer"]),
    "grouped by Transformer Engine": (
        f"{NAMED.replace('--transformer-impl local', '')} --moe-grouped-gemm", "bad",
        ["TEGroupedMLP", "leave --moe-grouped-gemm out"],
    ),
    "fp8": (f"{NAMED} --fp8-format hybrid", "bad", ["fp8 and fp4 are not supported", "bf16"]),
    "a recipe": (RECIPE, "bad", ["no --spec"]),
    "a recipe with the spec": (
        f"{RECIPE}  --spec: sluice.megatron moe_block_spec\n", "ok", ["every MoE layer of 8 experts"]
    ),
    "a config of core": (OF_CORE, "ok", ["through sluice.megatron.with_sluice"]),
    "dense": ({**OF_CORE, "num_moe_experts": 0}, "bad", ["without experts"]),
}  # fmt: skip


HOSTS = {"DeepSpeed": DEEPSPEED, "transformers": TRANSFORMERS, "Megatron": MEGATRON}
CASES = {f"{host}: {what}": case for host, cases in HOSTS.items() for what, case in cases.items()}


@pytest.mark.parametrize("what", CASES)
def test_Config_OfEachHost_SaysWhatWouldBeSwappedOrWhyNot(tmp_path, what):
    content, state, words = CASES[what]
    (finding,) = ask(tmp_path, content, "given.yaml" if "a recipe" in what else "given.json")
    text = f"{finding.detail} {finding.advice}"
    assert finding.state == state and all(word in text for word in words), finding


def test_MegatronsFlags_UnderWarn_NoteWhatIsLeft(tmp_path, monkeypatch):
    path = tmp_path / "train.sh"
    path.write_text(f"{NAMED} {FLEX}")
    monkeypatch.setenv("SLUICE_OPTIONS", '{"on_unsupported": "warn"}')
    (finding,) = doctor_config.examine(str(path))
    assert finding.state == "note" and "layers stay with Megatron" in finding.detail
    monkeypatch.setenv("SLUICE_OPTIONS", '{"chnks": 2}')
    (finding,) = doctor_config.examine(str(path))
    assert finding.state == "bad" and "'chnks'" in finding.detail


def test_Command_WithAConfig_ExitsByWhatItFinds(tmp_path):
    path = tmp_path / "ds_config.json"
    for section, code in ((ON, 0), ({**ON, "chnks": 2}, 1)):
        path.write_text(json.dumps(_ds(section)))
        command = [sys.executable, "-m", "sluice", "doctor", "--json", "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        found = json.loads(done.stdout)["findings"][-1]
        assert (done.returncode, found["check"]) == (code, "config"), done.stdout[-1500:] + done.stderr[-500:]


LIBRARY, LOCK = "deepspeed_shm_comm.so", "lock"


@pytest.mark.parametrize(
    ("there", "state", "said"),
    [
        (None, "note", "compiles it for minutes, without output"),
        ([], "note", "an interrupted build leaves a lock"),
        ([LIBRARY], "ok", "is built in"),
        ([LOCK], "bad", "without a library"),
        ([LIBRARY, LOCK], "bad", "is there: a build is under way, or was interrupted"),
    ],
)
def test_DeepSpeedsOp_BuiltOrNot_LocksAreNamed(tmp_path, monkeypatch, there, state, said):
    folder = tmp_path / "deepspeed_shm_comm"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if there is not None:
        folder.mkdir()
    for name in there or ():
        (folder / name).touch()
    found = doctor.shared_memory_op("deepspeed_shm_comm")
    assert found.state == state and said in f"{found.detail} -> {found.advice}", found
    assert (str(folder / LOCK) in found.detail) == (LOCK in (there or ())) and folder.exists() == (there is not None)
