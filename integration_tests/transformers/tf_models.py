# SPDX-License-Identifier: Apache-2.0
"""Makes tiny models, and runs a step of them."""

import re
from typing import Any

import pytest
import sluice
import torch
from sluice.errors import OverBudget
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_QWEN: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 8}
KINDS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
# The config class of each kind, and its fields in addition to the common ones. Those that are not in KINDS are presets
# of DeepSpeed's AutoEP.
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"intermediate_size": 24, "num_local_experts": 4, "router_aux_loss_coef": 0.02}),
    "qwen3_moe": (Qwen3MoeConfig, {**_QWEN, "intermediate_size": 40, "head_dim": 8, "norm_topk_prob": True}),
    "deepseek_v3": (DeepseekV3Config, _DEEPSEEK),
    "gpt_oss": (GptOssConfig, {"intermediate_size": 24, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8}),
    # A shared expert with a gate.
    "qwen2_moe": (Qwen2MoeConfig, {**_QWEN, "intermediate_size": 40, "shared_expert_intermediate_size": 16}),
    "deepseek_v2": (DeepseekV2Config, {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    # Without layers of linear attention, which do not affect experts.
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        {**_QWEN, "shared_expert_intermediate_size": 16, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    ),
    # A clamped gate, sigmoid scores with a bias, a factor for the experts' outputs, and a shared expert.
    "minimax_m3": (
        MiniMaxM3VLTextConfig,
        {
            "intermediate_size": 24,
            "dense_intermediate_size": 40,
            "shared_intermediate_size": 16,
            "num_local_experts": 8,
            "head_dim": 8,
            "rotary_dim": 8,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
}


def make(
    kind: str, implementation: str = "sluice", dtype: torch.dtype = torch.float32, random: int = 3, **changes: Any
) -> Any:
    """Returns a model with fixed random parameters. random: their seed; changes: fields of its config."""
    torch.manual_seed(random)
    config_class, fields = _CONFIGS[kind]
    config = config_class(**{**_COMMON, **fields, **changes})
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


def experts_of(model: Any) -> list[Any]:
    """Returns the experts modules of a model that has some."""
    found = [module for name, module in model.named_modules() if name.endswith(".experts")]
    assert found
    return found


def runs_on_sluice(model: Any) -> bool:
    """Returns whether all experts have run fused on Sluice."""
    computed_by = [layer["computed_by"] for layer in sluice.stats(model)["layers"]]
    return computed_by == ["sluice"] * len(experts_of(model))


def batch(seed: int = 0, rows: int = 3, length: int = 17) -> torch.Tensor:
    """Returns token ids."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def step(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Runs a step, and returns loss, logits and all gradients."""
    model.train()
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    values = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grad = torch.zeros(()) if grad is None else grad
        values[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return values


def arguments(folder: object, **more: Any) -> TrainingArguments:
    """Returns Trainer's arguments on a CPU, with a loss for each step and without checkpoints."""
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    same: dict[str, Any] = {"lr_scheduler_type": "constant", "logging_steps": 1, "use_cpu": True, "seed": 0}
    return TrainingArguments(output_dir=str(folder), **quiet, **same, **more)


def budget(num_layers: int, spare: float) -> int:
    """Returns `spare` times the smallest memory budget for a step of a model with this number of layers."""
    sluice.configure(memory_budget=1 << 10, gemm="ref")
    with pytest.raises(OverBudget, match="memory_budget") as refused:
        step(make("mixtral", num_hidden_layers=num_layers), batch())
    needed = re.search(r" needs (\d+)\b", str(refused.value))
    assert needed is not None
    return int(int(needed[1]) * spare) + (64 << 10)  # the tables of the other layers
