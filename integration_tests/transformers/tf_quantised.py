"""Small checkpoints as gpt-oss (MXFP4) and as Qwen3 and DeepSeek (FP8) have them on disk, and the same models dense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import sluice
import tf_models
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

IDS = tf_models.batch(rows=2, length=9)
LUT = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Widths that the formats want: whole blocks of 32 for MXFP4, ragged blocks of 128 for FP8.
WIDTHS: dict[str, dict[str, int]] = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32},
    "qwen3_moe": {"hidden_size": 160, "moe_intermediate_size": 136},
    "deepseek_v3": {"hidden_size": 160, "moe_intermediate_size": 136},
}


def write(kind: str, folder: Path) -> None:
    """The quantised checkpoint in `folder/packed`, and what it stands for, in bfloat16, in `folder/dense`."""
    model = tf_models.make(kind, "eager", dtype=torch.bfloat16, **WIDTHS[kind])
    generator = torch.Generator().manual_seed(5)
    packed: dict[str, torch.Tensor] = {}
    model.save_pretrained(folder / "dense")  # for the names on disk
    dense = load_file(folder / "dense" / "model.safetensors")
    for name, weight in dense.items():
        if kind == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
            packed.update(_mxfp4(name, weight, generator))
        elif kind != "gpt_oss" and name.endswith("_proj.weight"):
            packed.update(_fp8(name, weight))
        else:
            packed[name] = weight
    save_file(dense, folder / "dense" / "model.safetensors", {"format": "pt"})
    (folder / "packed").mkdir()
    save_file(packed, folder / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "dense" / "config.json").read_text())
    if kind == "gpt_oss":
        how: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    else:
        how = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
        how["modules_to_not_convert"] = ["lm_head"]
    (folder / "packed" / "config.json").write_text(json.dumps({**config, "quantization_config": how}))


def _mxfp4(name: str, weight: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random blocks; `weight` [E, in, out] becomes what they stand for."""
    count, columns, rows = weight.shape
    blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 125, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
    values = torch.stack([LUT[(blocks & 15).long()], LUT[(blocks >> 4).long()]], -1).flatten(-2)
    values = values * torch.exp2(scales.float() - 127).unsqueeze(-1)
    weight.copy_(values.flatten(2).transpose(1, 2))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """e4m3 with an f32 scale for each block of 128 x 128, ragged at the end; `weight` becomes what they stand for."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            at = (slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128))
            scales[r, c] = weight[at].float().abs().max() / 448
            codes[at] = (weight[at].float() / scales[r, c]).to(torch.float8_e4m3fn)
            weight[at] = (codes[at].float() * scales[r, c]).to(weight.dtype)
    return {name: codes, f"{name}_scale_inv": scales}


def load(folder: Path, implementation: str = "sluice", **how: Any) -> Any:
    """A model from a checkpoint, whose experts stay quantised where it is."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        config = sluice.keep_quantised(config)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        experts_implementation=implementation,
        **{"attn_implementation": "eager", "dtype": torch.bfloat16, **how},
    )


def differing(a: Path, b: Path) -> list[str]:
    """Names of tensors that are not the same bytes in two checkpoints, or missing in one."""
    x, y = (load_file(folder / "model.safetensors") for folder in (a, b))
    same = [k for k in x.keys() & y.keys() if x[k].dtype == y[k].dtype and torch.equal(_bytes(x[k]), _bytes(y[k]))]
    return sorted((x.keys() | y.keys()) - set(same))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor
