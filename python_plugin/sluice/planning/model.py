"""What is planned for: the MoE layers of a model, from flags or from a host's own config file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..config import ConfigError
from ..config import parse as parse_section
from .errors import BadInput

# transformers' configs name the same things differently; the first name that is there counts.
NAMES = {
    "model_width": ("hidden_size", "d_model", "n_embd", "model_dim"),
    "hidden_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size", "d_ff"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "layers": ("num_hidden_layers", "num_layers", "n_layer"),
}
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Two matrices per expert; all other families are gated.
NOT_GATED = ("switch_transformers", "nllb-moe", "gpt_bigcode")


@dataclass(frozen=True)
class Model:
    """None: not said yet."""

    model_width: int | None = None
    hidden_width: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    layers: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    gated: bool | None = None
    memory_budget: int | None = None
    host_memory_budget: int | None = None
    num_chunks: int | None = None
    policy: tuple[str, str] | None = None
    wgrad: str | None = None
    max_outstanding: int | None = None
    deduplicate: bool | None = None

    def over(self, other: Model) -> Model:
        """This one, and what it does not say from the other."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in given.items() if value is not None})


def read_config(path: str, sequence_length: int | None) -> Model:
    """A transformers config.json or a DeepSpeed config: told apart by their keys."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise BadInput(f"config {path}: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"config {path}: not JSON: {error}") from error
    if not isinstance(data, Mapping):
        raise BadInput(f"config {path}: it must be an object, not {type(data).__name__}")
    if any(key.startswith("train_") or key in ("zero_optimization", "sluice") for key in data):
        return _deepspeed(data, path, sequence_length)
    inner = data.get("text_config")
    return _transformers({**data, **inner} if isinstance(inner, Mapping) else data, path)


def _transformers(data: Mapping[str, Any], path: str) -> Model:
    found: dict[str, Any] = {}
    for field, names in NAMES.items():
        name = next((name for name in names if data.get(name) is not None), None)
        if name is None:
            if field in ("num_experts", "top_k"):
                raise BadInput(
                    f"config {path}: none of {', '.join(names)} is there: is this model a mixture of experts?"
                )
            raise BadInput(f"config {path}: none of {', '.join(names)} is there; give it as an option")
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInput(f"config {path}: {name} is {value!r}; it must be a whole number above 0")
        found[field] = value
    found["layers"] -= len(_dense_layers(data, found["layers"]))
    word = str(data.get("torch_dtype") or data.get("dtype") or "bfloat16")
    if word not in DTYPES:
        raise BadInput(f"config {path}: torch_dtype is {word!r}; known are {', '.join(DTYPES)}")
    return Model(**found, dtype=DTYPES[word], gated=data.get("model_type") not in NOT_GATED)


def _dense_layers(data: Mapping[str, Any], layers: int) -> set[int]:
    """Layers without experts: the first k, those of a list, and all but every k-th."""
    dense = set(range(min(layers, int(data.get("first_k_dense_replace") or 0))))
    dense |= {int(index) for index in data.get("mlp_only_layers") or () if 0 <= int(index) < layers}
    every = int(data.get("decoder_sparse_step") or data.get("moe_layer_freq") or 1)
    if every > 1:
        dense |= {index for index in range(layers) if (index + 1) % every != 0}
    return dense


def _deepspeed(data: Mapping[str, Any], path: str, sequence_length: int | None) -> Model:
    found: dict[str, Any] = {}
    batch = data.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and not isinstance(batch, bool):
        if sequence_length is None:
            raise BadInput(f"config {path}: train_micro_batch_size_per_gpu is {batch}; give --sequence-length as well")
        found["tokens"] = batch * sequence_length
    for key, dtype in (("bf16", "bf16"), ("fp16", "f16")):
        if isinstance(data.get(key), Mapping) and data[key].get("enabled"):
            found["dtype"] = dtype
    try:
        _, options = parse_section(data.get("sluice", {}))
    except ConfigError as error:
        raise BadInput(f"config {path}: {error}") from error
    found["memory_budget"], found["num_chunks"] = options.memory_budget, options.chunks
    found["host_memory_budget"] = options.host_memory_budget
    found["policy"], found["wgrad"] = options.policy, options.wgrad_mode
    found["max_outstanding"], found["deduplicate"] = options.max_outstanding, options.deduplicate or None
    return Model(**found)


def complete(model: Model) -> Model:
    """With defaults for what may be left out; BadInput names the option for what may not."""
    options = {
        "model_width": "--model-width",
        "hidden_width": "--hidden-width",
        "num_experts": "--experts",
        "top_k": "--top-k",
        "tokens": "--tokens",
    }
    for field, option in options.items():
        value = getattr(model, field)
        if value is None:
            raise BadInput(f"{option} is missing: give it, or a --config that holds it")
        if value < 1:
            raise BadInput(f"{option} is {value}; it must be above 0")
    return model.over(Model(layers=1, dtype="bf16", gated=False))
