# SPDX-License-Identifier: Apache-2.0
"""Tests that `sluice plan` reads every MoE config as transformers builds its model."""

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_compare
import tf_families
import torch
import transformers
from peft import LoraConfig, get_peft_model
from sluice.planning import architecture, finetune, machines
from sluice.planning import model as planned
from sluice.planning.planner import Planner
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

_EXPERTS = {name for _, name in tf_families.classes()}


def _kinds() -> list[str]:
    """Returns model types with an experts class of the registry in their folder; of text and multimodal ones, text."""
    folders = {folder for folder, _ in tf_families.classes()}
    return sorted(kind for kind in CONFIG_MAPPING_NAMES if kind.replace("-", "_").removesuffix("_text") in folders)


def _built(config: Any) -> collections.Counter[tuple[int, int, int, bool]]:
    """Counts (M, H, E, gated) of the experts modules of a model on the meta device."""
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    found: collections.Counter[tuple[int, int, int, bool]] = collections.Counter()
    for module in model.modules():
        if type(module).__name__ in _EXPERTS:
            found[_sizes(module)] += 1
    return found


def _sizes(module: Any) -> tuple[int, int, int, bool]:
    up = module.gate_up_proj if module.has_gate else module.up_proj
    experts, first, second = up.shape
    rows, width = (second, first) if module.is_transposed else (first, second)
    return width, rows // 2 if module.has_gate else rows, experts, bool(module.has_gate)


@pytest.mark.parametrize("kind", _kinds())
def test_Plan_ConfigOfEachFamily_AsTheModelIsBuilt(tmp_path: Path, kind: str) -> None:
    transformers.logging.set_verbosity_error()
    config = AutoConfig.for_model(kind)
    try:
        built = _built(config)
    except Exception as error:
        pytest.skip(f"transformers does not build its own default: {type(error).__name__}: {error}"[:200])
    if not built:
        pytest.skip("its default model has no experts of the registry")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict(), default=str))
    got = planned.read_config(str(path))
    # The language part of a multimodal model is planned; a vision tower may have its own experts.
    of_text = {sizes: number for sizes, number in built.items() if sizes[0] == got.model_width}
    assert of_text, (built, got)
    widths = {hidden for _, hidden, _, _ in of_text}
    if len(widths) > 1:  # the config has a list and no single width, so the flag is required
        assert got.hidden_width is None and set(of_text.values()) == {got.layers}
    else:
        assert (got.hidden_width, got.layers) == (widths.pop(), sum(of_text.values()))
    assert {(experts, gated) for _, _, experts, gated in of_text} == {(got.num_experts, got.gated)}
    assert got.top_k is None or 1 <= got.top_k <= got.num_experts


_SMALL = {"num_hidden_layers": 3, "vocab_size": 1000}
_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True, "head_dim": 96, "tie_word_embeddings": True}),
    ("gpt_oss", {}),
    ("gpt_oss", {"attention_bias": False}),
    ("mixtral", {"tie_word_embeddings": True}),
    ("deepseek_v2", {"num_experts_per_tok": 4, "first_k_dense_replace": 1}),
    ("deepseek_v3", {"first_k_dense_replace": 2, "q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {"first_k_dense_replace": 1, "attention_bias": True, "n_shared_experts": 2}),
]


@pytest.mark.parametrize(("kind", "changes"), _VARIANTS)
def test_Architecture_OfAConfig_HasTheParametersOfTheModel(kind: str, changes: dict[str, Any]) -> None:
    """Counts parameters of experts, of everything else, and of each kind of linear layer."""
    config = AutoConfig.for_model(kind, **{**_SMALL, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    decoder = architecture.read(config.to_dict())
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert sum(block.experts.parameters for block in decoder.moe_blocks if block.experts) == experts
    assert decoder.dense == sum(sizes.values()) - experts
    built: collections.Counter[tuple[str, int, int]] = collections.Counter()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not name.endswith((".gate", ".router")):
            built[name.rpartition(".")[2], module.in_features, module.out_features] += 1
    found = collections.Counter(
        (name, *shape) for block in decoder.blocks for name, shapes in block.linears.items() for shape in shapes
    )
    assert found == built


def test_Finetune_Preview_IsWhatASmallRunTakes() -> None:
    """Counted parts are equal; contexts stay within their plan, whose budget the run has; the bytes that autograd saves
    are estimated."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "moe_intermediate_size": 128, "num_experts": 8, "head_dim": 64}
    heads = {"num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads)
    decoder = architecture.read(config.to_dict(), "f32")
    targets = finetune.targets_of("q_proj,v_proj,experts", decoder)
    made = finetune.preview(Planner(machines.load("cpu-1x-10g")), finetune.Recipe(decoder, 1, 1 << 30, 192, 8, targets))
    assert made.fits
    config.sluice = {"memory_budget": made.context_bytes}
    model = AutoModelForCausalLM.from_config(config, experts_implementation="sluice")
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert made.bytes["experts"] == 4 * experts
    assert made.bytes["dense weights"] == 4 * (sum(p.numel() for p in model.parameters()) - experts)
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], target_parameters=stacks))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(1000, (1, 192), generator=torch.Generator().manual_seed(1))
    sluice.stats(model, reset_peak=True)
    kept = tf_compare.saved_bytes(model, lambda: adapted(input_ids=ids, labels=ids).loss.backward())
    optimizer.step()
    assert made.trained == sum(p.numel() for p in trained)
    assert made.bytes["gradients"] == sum(p.grad.numel() * p.grad.element_size() for p in trained)
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
    assert made.bytes["optimizer"] == sum(value.numel() * value.element_size() for value in states)
    counted = sluice.stats(model)["contexts"][0]
    assert 0 < counted["peak_bytes"] <= made.context_bytes and counted["num_fallback_chunks"] == 0
    assert counted["planned_outstanding"] == 3 and 0 < counted["slot_bytes"] <= made.bytes["exchange buffers"]
    assert 0.8 <= kept / (made.bytes["activations"] + made.bytes["logits"]) <= 1.25
