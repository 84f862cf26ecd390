# SPDX-License-Identifier: Apache-2.0
"""Makes small checkpoints in the formats of gpt-oss (MXFP4), Qwen3 and DeepSeek (FP8), and the same models dense."""

import json
from pathlib import Path
from typing import Any

import sluice
import tf_models
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from sluice.adapters.transformers import experts as adapter
from sluice.adapters.transformers.packed_stack import is_packed, local
from sluice.errors import SluiceError
from test_tf_adapters import lora_on, step
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

LUT = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Widths for the formats: whole blocks of 32 for MXFP4, partial blocks of 128 for FP8.
WIDTHS: dict[str, dict[str, int]] = {
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 32},
    "qwen3_moe": {"hidden_size": 160, "moe_intermediate_size": 136},
    "deepseek_v3": {"hidden_size": 160, "moe_intermediate_size": 136},
}


def write(kind: str, folder: Path) -> None:
    """Writes the quantised checkpoint to `folder/packed`, and its decoded values in bfloat16 to `folder/dense`."""
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
    """Makes random blocks; `weight` [E, in, out] becomes their decoded values."""
    count, columns, rows = weight.shape
    blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 125, (count, rows, columns // 32), dtype=torch.uint8, generator=generator)
    values = torch.stack([LUT[(blocks & 15).long()], LUT[(blocks >> 4).long()]], -1).flatten(-2)
    values = values * torch.exp2(scales.float() - 127).unsqueeze(-1)
    weight.copy_(values.flatten(2).transpose(1, 2))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Makes e4m3 codes with an f32 scale per block of 128 x 128, partial at the end; `weight` becomes their values."""
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
    """Loads a model from a checkpoint; the experts of a quantised one stay quantised."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        config = sluice.keep_quantised(config)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        experts_implementation=implementation,
        **{"attn_implementation": "eager", "dtype": torch.bfloat16, **how},
    )


def experts(model: Any) -> list[Any]:
    """Returns the modules with stacked experts, inside of PEFT's wrappers or not."""
    return [module for module in model.modules() if isinstance(getattr(module, "is_transposed", None), bool)]


def differing(a: Path, b: Path) -> list[str]:
    """Returns names of tensors whose bytes differ between two checkpoints, or that one lacks."""
    x, y = (load_file(folder / "model.safetensors") for folder in (a, b))
    same = [k for k in x.keys() & y.keys() if x[k].dtype == y[k].dtype and torch.equal(_bytes(x[k]), _bytes(y[k]))]
    return sorted((x.keys() | y.keys()) - set(same))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


# ---- on each rank of expert parallelism ----


def _split(folder: str, name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    how = DistributedConfig(fsdp_size=2, ep_size=dist.get_world_size(), ep_implementation="sluice")
    return load(Path(folder) / name, distributed_config=how, dtype=dtype)


def split_step(folder: str, moved: bool, saved: str) -> dict[str, Any]:
    """Runs a step of a split model with adapters. Returns the tensors whose bits differ from those with decoded experts
    in the same split, the bytes of codes and scales, and the differences of the saved checkpoint."""
    sluice.configure(gemm="native")
    model = _split(folder, "packed")
    model.save_pretrained(saved)
    dist.barrier()
    stacks = [local(m._parameters[name]) for m in experts(model) for name in ("gate_up_proj", "down_proj")]
    assert all(is_packed(stack) for stack in stacks)
    held = sum(stack.codes.nbytes + stack.scales.nbytes for stack in stacks)
    before = [stack.codes.clone() for stack in stacks]
    found = []
    for each in (model, _split(folder, "dense")):
        peft = lora_on(each)
        if moved:
            for module in experts(peft):
                home = adapter.kept_of(module).home
                sluice.move_experts(module, home.expert_rank[::-1], home.expert_slot)
        found.append(step(peft, tf_models.batch(dist.get_rank(), 2, 9)))
    got, wanted = found
    assert got.keys() == wanted.keys()
    sluice.configure()
    unchanged = all(torch.equal(old, stack.codes) for old, stack in zip(before, stacks))
    return {
        "other bits": [name for name, value in got.items() if not torch.equal(value, wanted[name])],
        "gradients": sum("lora_" in name for name in got),
        "zero": [name for name, value in got.items() if not value.abs().max() > 0],
        "bytes": held,
        "unchanged": unchanged,
        "saved otherwise": differing(Path(folder) / "packed", Path(saved)),
    }


def split_refused(folder: str) -> str:
    """Returns the error of loading a split checkpoint with a wrong scale in an expert of one rank."""
    try:
        _split(folder, ".")
    except SluiceError as error:
        return str(error)
    return ""
