# SPDX-License-Identifier: Apache-2.0
"""Tests `sluice merge`: the merged checkpoint computes the same as PEFT's merge_and_unload, in any layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tf_models
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from sluice.__main__ import main
from transformers import AutoModelForCausalLM

ATTENTION = {"deepseek_v3": ["q_a_proj", "o_proj"]}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = tf_models.batch()


def saved(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **lora: Any) -> tuple[Path, Path]:
    """Writes a checkpoint in several files, and an adapter whose B is not zero."""
    model = tf_models.make(kind, "eager", dtype)
    model.save_pretrained(folder / "base", max_shard_size="40KB")
    assert len(list((folder / "base").glob("*.safetensors"))) > 1
    lora = {"target_modules": ATTENTION.get(kind, ["q_proj", "o_proj"]), "target_parameters": STACKS, **lora}
    peft = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, **lora))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    peft.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def merged(base: Path, adapter: Path, out: Path) -> int:
    return main(["merge", str(base), str(adapter), str(out)])


@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"target_parameters": STACKS[1:]}], ids=str)
@pytest.mark.parametrize("kind", tf_models.KINDS)
def test_Merged_EachLayout_AsPeft(tmp_path: Path, kind: str, lora: dict[str, Any]) -> None:
    base, adapter = saved(tmp_path, kind, **lora)
    assert merged(base, adapter, tmp_path / "out") == 0
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    wanted = logits(stock.merge_and_unload())
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    gap = (logits(ours) - wanted).abs().max() / wanted.abs().max()
    assert gap < 1e-5 and (wanted - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in base.iterdir()}


def test_Merged_Bfloat16_IsRoundedOnce(tmp_path: Path) -> None:
    base, adapter = saved(tmp_path, "gpt_oss", torch.bfloat16)
    assert merged(base, adapter, tmp_path / "out") == 0
    exact = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    exact = PeftModel.from_pretrained(exact, adapter).merge_and_unload()
    ours = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).named_parameters())
    for name, wanted in exact.named_parameters():
        if name.endswith(("q_proj.weight", "down_proj", "gate_up_proj")):
            off = (ours[name].float() - wanted).abs() / wanted.abs().clamp(min=1e-6)
            assert off.max() <= 2**-8, name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "IA3"}, "the adapter is IA3"),
        ({"use_dora": True}, "use_dora=True: merge it with PEFT"),
        ({"bias": "all"}, "bias='all'"),
        ({"target_parameters": STACKS[:1]}, "2 wrappers of"),
    ],
    ids=str,
)
def test_AdapterThatIsNotPlain_IsRefusedAndNothingWritten(tmp_path: Path, capsys: Any, change: Any, says: str) -> None:
    base, adapter = saved(tmp_path, "qwen3_moe")
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    assert merged(base, adapter, tmp_path / "out") == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_BadFiles_AreRefusedByName(tmp_path: Path, capsys: Any) -> None:
    base, adapter = saved(tmp_path, "qwen3_moe")
    assert merged(tmp_path / "nothing", adapter, tmp_path / "out") == 2
    assert "nothing/config.json is missing" in capsys.readouterr().err
    assert merged(base, base, tmp_path / "out") == 2
    assert "adapter_config.json is missing" in capsys.readouterr().err
    assert merged(base, adapter, base) == 2
    assert "exists: name a new folder" in capsys.readouterr().err
    other = tf_models.make("mixtral", "eager")
    other.save_pretrained(tmp_path / "other")
    assert merged(tmp_path / "other", adapter, tmp_path / "out") == 2
    assert "and the adapter has A" in capsys.readouterr().err
    config = base / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "gptq"}}))
    assert merged(base, adapter, tmp_path / "out") == 2
    assert "is quantised (gptq), which is not mxfp4" in capsys.readouterr().err and not (tmp_path / "out").exists()
    shutil.rmtree(base)
