# SPDX-License-Identifier: Apache-2.0
"""Tests checkpoints in MXFP4 and FP8, and others quantised while loading: experts stay in 4 or 8 bits, with the results
of the decoded model to the bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_quantised
import torch
from peft import PeftModel
from rank_harness import Ranks
from safetensors.torch import load_file, save_file
from sluice.adapters.torch import Format, dequantise
from sluice.adapters.transformers import merge
from sluice.adapters.transformers.packed_stack import PackedStack, is_packed
from sluice.errors import InvalidArgument, Unsupported
from test_tf_adapters import IDS, lora_on, step
from tf_compare import Watch, tensors_of
from tf_quantised import experts, load
from transformers import AutoConfig, AutoModelForCausalLM

KINDS = ("gpt_oss", "qwen3_moe", "deepseek_v3")
STACKS = ("gate_up_proj", "down_proj")

pytestmark = pytest.mark.usefixtures("one_gemm")


@pytest.fixture(scope="module")
def checkpoints(saved: Any) -> dict[str, Path]:
    return {kind: Path(saved(kind, quantised=True)) for kind in KINDS}


def decoded(module: Any, name: str) -> torch.Tensor:
    """Returns a packed stack in float32, in its visible shape."""
    stack = getattr(module, name)
    halves = 2 if name == "gate_up_proj" and module.is_concatenated else 1
    parts = zip(*(part.chunk(halves, 1) for part in (stack.codes, stack.scales)))
    weight = torch.cat([dequantise(*half, stack.form, torch.float32) for half in parts], 1)
    return weight.transpose(1, 2) if stack.transposed else weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_Checkpoint_KeptQuantised_TrainsAdaptersWithTheBitsOfTheDecodedModel(
    checkpoints: dict[str, Path], kind: str, dtype: torch.dtype
) -> None:
    packed, dense = load(checkpoints[kind] / "packed", dtype=dtype), load(checkpoints[kind] / "dense", dtype=dtype)
    for module in experts(packed):
        assert all(is_packed(getattr(module, name)) and not getattr(module, name).requires_grad for name in STACKS)
    if kind != "gpt_oss" and dtype is torch.float32:
        # The dense one was rounded to bfloat16 on disk; Sluice decodes each element to the dtype of the model.
        for ours, theirs in zip(experts(packed), experts(dense)):
            for name in STACKS:
                assert torch.equal(decoded(ours, name).bfloat16(), getattr(theirs, name).bfloat16())
                getattr(theirs, name).data.copy_(decoded(ours, name))
        theirs = dict(dense.named_parameters())
        for name, parameter in packed.named_parameters():
            if not is_packed(parameter):
                theirs[name].data.copy_(parameter)
    got, want = step(lora_on(packed)), step(lora_on(dense))
    assert got.keys() == want.keys() and sum("lora_" in name for name in got) >= 4
    for name, value in got.items():
        assert torch.equal(value, want[name]), name
    assert {found["computed_by"] for found in sluice.stats(packed)["layers"]} == {"sluice"}


@pytest.mark.parametrize("kind", KINDS)
def test_Checkpoint_KeptQuantisedAndSaved_HasTheSameBytes(
    checkpoints: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    model = load(checkpoints[kind] / "packed")
    with torch.no_grad():
        before = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path)
    differing = tf_quantised.differing(checkpoints[kind] / "packed", tmp_path)
    if kind == "gpt_oss":
        assert differing == []
    else:  # weights that were decoded are saved dense
        assert differing and all(".experts." not in name for name in differing)
    how = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert how["quant_method"] == ("mxfp4" if kind == "gpt_oss" else "fp8")
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(input_ids=IDS).logits, before)
    if kind == "gpt_oss":  # transformers can also read it by itself
        stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, experts_implementation="sluice",
                                                     attn_implementation="eager")  # fmt: skip
        with torch.no_grad():
            assert torch.equal(stock(input_ids=IDS).logits, before)
    other = load(checkpoints[kind] / "packed")
    for module in experts(other):
        module.down_proj.codes.zero_()
    missing, unexpected = other.load_state_dict(model.state_dict())
    assert not missing and not unexpected
    with torch.no_grad():
        assert torch.equal(other(input_ids=IDS).logits, before)


@pytest.mark.parametrize("kind", KINDS)
def test_Checkpoint_WhileItIsLoaded_NoStackIsExpanded(checkpoints: dict[str, Path], kind: str) -> None:
    made: list[int] = []  # bytes of results that are no views

    def see(function: Any, _: Any, out: Any) -> None:
        plain = [t for t in tensors_of(out) if not is_packed(t) and t.device.type == "cpu" and not function.is_view]
        made.extend(tensor.nbytes for tensor in plain)

    with Watch(see):
        model = load(checkpoints[kind] / "packed")
    packed = max(module.gate_up_proj.codes.nbytes for module in experts(model))
    others = max(p.nbytes for p in model.parameters() if not is_packed(p))
    assert max(made) <= max(packed, others)
    total = sum(s.codes.nbytes + s.scales.nbytes for m in experts(model) for s in (m.gate_up_proj, m.down_proj))
    elements = sum(s.numel() for m in experts(model) for s in (m.gate_up_proj, m.down_proj))
    assert total < 0.6 * elements if kind == "gpt_oss" else total < 1.01 * elements


@pytest.mark.parametrize("weight_format", ["mxfp4", "fp8", "int8", "int4"])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_Checkpoint_InBfloat16_IsQuantisedWhileLoadedAndSavedWithoutLoss(
    checkpoints: dict[str, Path], kind: str, weight_format: str, tmp_path: Path
) -> None:
    folder = checkpoints[kind] / "dense"
    config = AutoConfig.from_pretrained(folder)
    if (kind, weight_format) == ("qwen3_moe", "mxfp4"):
        with pytest.raises(Unsupported, match=r"experts.down_proj: a width of 136, and mxfp4 needs a multiple of 32"):
            quantised(folder, config, weight_format)
        return
    model = quantised(folder, config, weight_format)
    assert str(folder) not in Path("/proc/self/maps").read_text(), "the weights in 16 bits stay resident"
    dense = load(folder, dtype=torch.float32)
    for ours, theirs in zip(experts(model), experts(dense)):
        for name in STACKS:
            stack, weight = getattr(ours, name), getattr(theirs, name)
            assert stack.form.name == weight_format and stack.shape == weight.shape
            # Half a step of the largest number of a block.
            bound = {"mxfp4": 1 / 6, "fp8": 1 / 28, "int8": 1 / 250, "int4": 1 / 13}[weight_format]
            assert (decoded(ours, name) - weight).abs().max() <= bound * weight.abs().max()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path, experts_implementation="sluice", attn_implementation="eager", dtype=torch.bfloat16
    )
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, again(input_ids=IDS).logits)
    assert all(isinstance(getattr(module, name), PackedStack) for module in experts(again) for name in STACKS)


def quantised(folder: Path, config: Any, weight_format: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, config=sluice.keep_quantised(config, weight_format, 32 if weight_format == "int4" else 0),
        experts_implementation="sluice", attn_implementation="eager", dtype=torch.bfloat16,
    )  # fmt: skip


def test_Adapters_OnQuantisedExperts_AreSavedLoadedAndGenerateAsOnTheDecodedModel(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    packed, dense = (lora_on(load(checkpoints["gpt_oss"] / name)) for name in ("packed", "dense"))
    packed.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(checkpoints["gpt_oss"] / "packed"), tmp_path)
    texts = [m.generate(input_ids=IDS, max_new_tokens=6, do_sample=False) for m in (packed, dense, again)]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    with pytest.raises(Unsupported, match="no adapter can be merged into them: keep the adapter next to them"):
        packed.merge_adapter()


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "int8"])
def test_Merge_IntoAQuantisedCheckpoint_GivesOneInBfloat16(
    checkpoints: dict[str, Path], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, dense = (checkpoints["qwen3_moe" if kind == "int8" else kind] / name for name in ("packed", "dense"))
    if kind == "int8":
        packed = tmp_path / "int8"
        quantised(dense, AutoConfig.from_pretrained(dense), "int8").save_pretrained(packed)
    lora_on(load(dense)).save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(merge, "LARGEST_FILE", 40 << 10)  # several files
    for base in (packed, dense):
        merge.merge(base, tmp_path / "adapter", tmp_path / "merged" / base.name)
    ours, theirs = (load(tmp_path / "merged" / base.name) for base in (packed, dense))
    assert len(list((tmp_path / "merged" / packed.name).glob("*.safetensors"))) > 1
    unmerged = dict(load(dense).named_parameters())
    theirs = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert weight.dtype is torch.bfloat16 and weight.shape == theirs[name].shape
        gap, largest = (weight.float() - theirs[name].float()).abs().max(), theirs[name].float().abs().max()
        # Decoded weights of FP8 are not rounded before the sum; in int8 they are within half a step of the dense ones.
        assert gap <= (0 if kind == "gpt_oss" else 2**-7) * largest, name
    stack = "model.layers.1.mlp.experts.down_proj"
    assert (theirs[stack].float() - unmerged[stack].float()).abs().max() > 1e-2


@pytest.mark.parametrize("moved", [False, True], ids=["at home", "moved"])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe"])
def test_TwoRanks_WithQuantisedExperts_TrainAdaptersWithTheBitsOfTheDecodedModel(
    ranks: Ranks, checkpoints: dict[str, Path], kind: str, moved: bool, tmp_path: Path
) -> None:
    whole = load(checkpoints[kind] / "packed")
    stacks = [getattr(module, name) for module in experts(whole) for name in STACKS]
    total = sum(stack.codes.nbytes + stack.scales.nbytes for stack in stacks)
    for found in ranks.run(
        "tf_quantised:split_step", folder=str(checkpoints[kind]), moved=moved, saved=str(tmp_path / "saved")
    ):
        assert found["other bits"] == [] and found["zero"] == [] and found["gradients"] >= 8
        assert found["bytes"] == total // 2
        assert found["unchanged"] == (not moved)
        assert all(".experts." not in name for name in found["saved otherwise"])
        assert kind != "gpt_oss" or found["saved otherwise"] == []


# ---- refusals ----


def _set(tensor: torch.Tensor, where: tuple[int, ...], value: int) -> torch.Tensor:
    tensor.view(torch.uint8)[where] = value
    return tensor


# Tensors of a checkpoint that are wrong, and the error.
WRONG: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "layers.1.mlp.experts.gate_up_proj_scales": (
        "gpt_oss",
        lambda scales: _set(scales, (2, 5, 1), 255),
        r"layers.1.mlp.experts.gate_up_proj: matrix 2 .* row 5, columns 32 and up",
    ),
    "layers.0.mlp.experts.3.up_proj.weight": (
        "qwen3_moe",
        lambda codes: _set(codes, (130, 7), 0x7F),
        "experts.gate_up_proj: matrix 3 of the stack: weight: the fp8 code of row 130, column 7 is 0x7f, NaN",
    ),
    "layers.0.mlp.experts.0.gate_proj.weight_scale_inv": (
        "qwen3_moe",
        lambda scales: scales[:1].clone(),
        "layers.0.mlp.experts.gate_up_proj: mlp.experts.*.gate_proj.weight_scale_inv does not have",
    ),
    "layers.0.self_attn.o_proj.weight_scale_inv": (
        "qwen3_moe",
        lambda scales: scales[:1].clone(),
        r"self_attn.o_proj.weight: scales: has \[1, 1\], want \[2, 1\]",
    ),
    "layers.0.mlp.experts.down_proj_scales": (
        "gpt_oss",
        lambda scales: scales.repeat(1, 1, 2),
        r"down_proj: the checkpoint has scales \[4, 64, 2\] of torch.uint8",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_Checkpoint_WithAWrongTensor_RefusedByName(
    ranks: Ranks, checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    kind, edit, words = WRONG[name]
    folder = checkpoints[kind] / "packed"
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.{name}"] = edit(tensors[f"model.{name}"])
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(InvalidArgument, match=words):
        load(tmp_path)
    if name.startswith("layers.1"):
        for text in ranks.run("tf_quantised:split_refused", folder=str(tmp_path)):
            assert "rank 1: model.layers.1.mlp.experts.gate_up_proj: matrix 0 of the stack" in text


def test_Configs_ThatCannotBeKept_RefusedByName(checkpoints: dict[str, Path]) -> None:
    config = AutoConfig.from_pretrained(checkpoints["qwen3_moe"] / "dense")
    for found, kind, text in (
        (None, InvalidArgument, "not quantised, and weight_format is None: name one of mxfp4, fp8, int8, int4"),
        ({"quant_method": "gptq"}, Unsupported, "quantised as gptq; supported are mxfp4 and fp8"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, Unsupported, r"weight_block_size .* is \[64, 64\]"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            Unsupported,
            "'static'",
        ),
        ({"quant_method": "sluice", "weight_format": "int2"}, InvalidArgument, "weight_format is 'int2'"),
    ):
        config.quantization_config = found
        with pytest.raises(kind, match=text):
            kept = sluice.keep_quantised(config)
            AutoModelForCausalLM.from_pretrained(checkpoints["qwen3_moe"] / "dense", config=kept)
    config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(InvalidArgument, match="weight_format is 'fp8', but the checkpoint is quantised as mxfp4"):
        sluice.keep_quantised(config, "fp8")
    with pytest.raises(InvalidArgument, match="'eager', and only Sluice computes with experts in 4 or 8 bits"):
        load(checkpoints["gpt_oss"] / "packed", "eager")


def test_QuantisedExperts_AskedForWhatNeedsPlainWeights_RefusedByName(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["gpt_oss"] / "packed")
    module = experts(model)[0]
    with pytest.raises(Unsupported, match=r"aten::mul on mxfp4 experts \[4, 64, 64\]: only Sluice computes with them"):
        torch.mul(module.gate_up_proj, 2)
    module.gate_up_proj.requires_grad_(True)
    with pytest.raises(
        Unsupported, match="gate_up_proj is in mxfp4 and requires a gradient, but packed weights are frozen"
    ):
        model(input_ids=IDS)
    module.gate_up_proj.requires_grad_(False)
    model(input_ids=IDS)
    module.act_fn = torch.nn.Sequential(torch.nn.SiLU())
    module._apply_gate = lambda gate_up: torch.tanh(gate_up[..., ::2])
    with pytest.raises(Unsupported, match="is in mxfp4, and these experts run with their own functions"):
        model(input_ids=IDS)
    assert Format("mxfp4").bits == 4
