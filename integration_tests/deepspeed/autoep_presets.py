# SPDX-License-Identifier: Apache-2.0
"""Tiny models of transformers for AutoEP's presets.

DeepSpeed 0.19.8 uses class names as keys of transformers' registry of recorded outputs. Since 5.23 the registry accepts
only models, so stock fails to replace blocks of Mixtral and Qwen models. Here it accepts both. Neither host is changed
otherwise.
"""

from typing import Any

from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.utils import output_capturing

_Own: Any = type(output_capturing._CAN_RECORD_REGISTRY)


class _Registry(_Own):
    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str):
            dict.__setitem__(self, key, value)
        else:
            super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        return dict.get(self, key, default) if isinstance(key, str) else super().get(key)


# In place, because other modules have imported the object. Before 5.23 it is a plain dict.
if _Own is not dict:
    output_capturing._CAN_RECORD_REGISTRY.__class__ = _Registry

_COMMON: dict[str, Any] = {
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
# For each preset the config class, and its fields in addition to the common fields above.
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (MixtralConfig, {"intermediate_size": 24, "num_local_experts": 4, "router_aux_loss_coef": 0.02}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"intermediate_size": 40, "moe_intermediate_size": 24, "num_experts": 8, "head_dim": 8, "norm_topk_prob": True},
    ),
    # A shared expert with a gate.
    "qwen2_moe": (
        Qwen2MoeConfig,
        {"intermediate_size": 40, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "num_experts": 8},
    ),
    "deepseek_v2": (DeepseekV2Config, {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": (DeepseekV3Config, _DEEPSEEK),
    # Without layers of linear attention, which do not affect experts.
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
            "num_experts": 8,
            "head_dim": 8,
            "layer_types": ["full_attention", "full_attention"],
        },
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


def build(kind: str, vocabulary: int, **changes: Any) -> Any:
    """Returns a model with parameters from torch's current random state. changes: other fields of its config."""
    config_class, fields = CONFIGS[kind]
    config = config_class(**{**_COMMON, **fields, **changes})
    config.update({"vocab_size": vocabulary})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
