# SPDX-License-Identifier: Apache-2.0
"""Reads the MoE layers of a model from flags or from a host's config file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .. import origins
from ..config import parse as parse_section
from ..option_values import ConfigError
from ..options import DS_CONFIG, MODEL, Options, Policy, rows_of
from . import files, megatron, moe_layers
from .errors import BadInput

# Names of the same field in different configs of transformers. The first name that a config has is read.
NAMES = {
    "model_width": ("moe_hidden_size", "moe_latent_size", "hidden_size", "d_model", "n_embd", "model_dim"),
    "hidden_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size", "d_ff"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "layers": ("num_hidden_layers", "num_layers", "n_layer"),
}
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Families whose experts have two matrices. All other families are gated.
NOT_GATED = ("switch_transformers", "nllb-moe", "gpt_bigcode", "nemotron_h")
ROUTES = {"switch_transformers": 1, "nllb-moe": 2}  # K of families whose configs lack it
# Maps names of activations in configs to the library's names.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
INNER = ("text_config", "thinker_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Model:
    """Describes a model. None: not known yet. A field with the name of an option has its value (HELD)."""

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
    chunks: int | None = None
    policy: Policy | None = None  # of all chunks, or by chunk
    wgrad_mode: str | None = None
    max_outstanding: int | None = None
    deduplicate: bool | str | None = None
    chunking: str | None = None
    activation: str | None = None
    bias: bool | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None
    token_shares: int | None = None  # ranks that a sample's tokens are split over
    ranks: int | None = None  # of one expert-parallel group
    scores_first: bool | None = None  # scores are applied before the experts, so each route has its own row
    lora_rank: int | None = None
    weight_format: str | None = None
    section: Options | None = None  # the whole "sluice" section of a config

    def over(self, other: Model) -> Model:
        """Returns this model, with fields that are None taken from the other."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in given.items() if value is not None})


_DEFAULTS = Options()
# The options that a plan treats as fixed: keys of the "sluice" section that are fields of Model too.
HELD = tuple(each.name for each in fields(Model) if each.name in rows_of(Options))


def read_configs(paths: Sequence[str]) -> Model:
    """Returns the model that several configs describe together. An earlier config takes precedence."""
    loaded = [(path, _load(path)) for path in paths]
    names = _auto_ep_names(data for _, data in loaded)
    model = Model()
    for path, data in loaded:
        model = model.over(_model_of(data, path, names))
    return model


def read_config(path: str) -> Model:
    """Reads a config of transformers, DeepSpeed or Megatron; its keys show which. Missing fields stay None."""
    return read_configs([path])


def _model_of(data: Mapping[str, Any], path: str, names: Mapping[str, str]) -> Model:
    is_model = isinstance(data.get("model_type"), str)  # a config of transformers, which may contain a "sluice" section
    if not is_model and any(key.startswith("train_") or key in ("zero_optimization", "sluice") for key in data):
        return _deepspeed(data, path)
    own = Model(**_section(data, path, MODEL)) if is_model else Model()
    try:
        flat = megatron.flat(data)
        if not is_model and megatron.is_megatron(flat):
            return _megatron(flat, path)
        return own.over(_transformers(innermost(data), path, names))
    except BadInput as error:
        raise BadInput(f"config {path}: {error}") from None


def _load(path: str) -> Mapping[str, Any]:
    text = files.read(f"config {path}", path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        data = _not_json(path, text, error)
    if not isinstance(data, Mapping):
        raise BadInput(f"config {path}: it must be an object, not {type(data).__name__}")
    recipe = megatron.flags_of_recipe(data)
    return data if recipe is None else {"moe_router_topk": megatron.DEFAULT_TOP_K, **recipe}


def _not_json(path: str, text: str, problem: Exception) -> Any:
    if Path(path).suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError as error:
            raise BadInput(f"config {path}: YAML needs the package pyyaml; install it, or give JSON") from error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise BadInput(f"config {path}: not YAML: {str(error).splitlines()[0]}") from error
    flags = megatron.flags_of(text)
    if not megatron.is_megatron(flags) and "num_experts" not in flags:
        raise BadInput(f"config {path}: not JSON: {problem}; and no script with Megatron's flags")
    return {"moe_router_topk": megatron.DEFAULT_TOP_K, **flags}


def layers_of(data: Mapping[str, Any], path: str) -> Model:
    """Returns the layers that a config of transformers describes. A "sluice" section in it is ignored."""
    return _transformers(innermost(data), path)


def innermost(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a multimodal model's config that describes the language model, or the whole config."""
    inner = next((data[name] for name in INNER if isinstance(data.get(name), Mapping)), None)
    return data if inner is None else innermost({**{k: v for k, v in data.items() if k not in INNER}, **inner})


def _values(data: Mapping[str, Any], table: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, names in table.items():
        name = next((name for name in names if data.get(name) is not None), None)
        if name is None or isinstance(data[name], list):  # experts of several widths, which one layer cannot have
            continue
        found[field] = files.count(name, data[name])
    return found


def _dtype(word: str, name: str) -> str:
    if word not in DTYPES:
        raise BadInput(f"{name} is {word!r}; known are {', '.join(DTYPES)}")
    return DTYPES[word]


def dtype_of(data: Mapping[str, Any]) -> str:
    """Returns the dtype of the weights that a config of transformers describes."""
    return _dtype(str(data.get("torch_dtype") or data.get("dtype") or "bfloat16"), "torch_dtype")


def _transformers(data: Mapping[str, Any], path: str, names: Mapping[str, str] | None = None) -> Model:
    first = {field: (name, *NAMES[field]) for field, name in (names or {}).items()}
    found = _values(data, {**NAMES, **first})
    found["layers"] = moe_layers.count(data, found.get("layers"))
    kind = data.get("model_type")
    found.setdefault("top_k", ROUTES.get(str(kind)))
    found["activation"] = ACTIVATIONS.get(str(data.get("hidden_act") or data.get("hidden_activation")))
    return Model(**found, dtype=dtype_of(data), gated=kind not in NOT_GATED)


def _megatron(data: Mapping[str, Any], path: str) -> Model:
    found = {"top_k": megatron.DEFAULT_TOP_K, **_values(data, megatron.NAMES)}
    if "hidden_width" not in found and "model_width" in found and data.get("hidden_size"):
        found["hidden_width"] = 4 * data["hidden_size"]  # as Megatron fills ffn_hidden_size
    found |= _layers_of_a_stage(data, found.pop("layers", None))
    found["token_shares"] = megatron.token_shares(data)
    word = megatron.dtype_of(data)
    dtype = None if word is None else _dtype(word, "params_dtype")
    return Model(**found, dtype=dtype, gated=megatron.is_gated(data))


def _layers_of_a_stage(data: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """Counts MoE layers of the stage with the most, and their outstanding forwards in the first stage."""
    frequency = {"moe_layer_freq": data.get("moe_layer_freq")}
    count, stages = moe_layers.count(frequency, layers), megatron.stages(data)
    if stages == 1 or layers is None:
        return {"layers": count}
    parts, waiting = megatron.parts_of_a_stage(data, layers)
    counts = moe_layers.by_stage(frequency, layers, stages * parts)  # part p of stage s is number p S + s
    most = max(sum(counts[stage::stages]) for stage in range(stages))
    return {"layers": most, "max_outstanding": waiting * max(counts)}


def _deepspeed(data: Mapping[str, Any], path: str) -> Model:
    try:
        found = _auto_ep_fields(data)
    except BadInput as error:
        raise BadInput(f"config {path}: {error.message}") from None
    batch = data.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and not isinstance(batch, bool):
        found["micro_batch"] = batch
    for key, dtype in (("bf16", "bf16"), ("fp16", "f16")):
        if isinstance(data.get(key), Mapping) and data[key].get("enabled") is True:  # "auto": the trainer will set it
            found["dtype"] = dtype
    return Model(**found, **_section(data, path, DS_CONFIG))


def _section(data: Mapping[str, Any], path: str, origin: str) -> dict[str, Any]:
    """Returns the options that the "sluice" section of a host's config sets."""
    try:
        _, options = parse_section(origins.taken(data.get("sluice", {}), origin))
    except ConfigError as error:
        raise BadInput(f"config {path}: {error}") from error
    given = {name: getattr(options, name) for name in HELD}
    held = {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    return {**held, "section": options if "sluice" in data else None}


def with_tokens(model: Model) -> Model:
    """Computes tokens from micro-batch and sequence length, if they are not given."""
    if model.tokens is not None or model.micro_batch is None or model.sequence_length is None:
        return model
    return replace(model, tokens=-(-model.micro_batch * model.sequence_length // (model.token_shares or 1)))


def complete(model: Model) -> Model:
    """Fills in defaults. Raises BadInput that names the option for a missing field without default."""
    options = {
        "model_width": "--model-width",
        "hidden_width": "--hidden-width",
        "num_experts": "--experts",
        "top_k": "--top-k",
        "tokens": "--tokens",
    }
    for field, option in options.items():
        value = getattr(model, field)
        if value is None and field == "tokens" and model.micro_batch is not None:
            raise BadInput(
                f"the config's micro-batch is {model.micro_batch}: give --sequence-length or --tokens as well"
            )
        if value is None:
            raise BadInput(f"{option} is missing: give it, or a --config of a mixture of experts that holds it")
        if value < 1:
            raise BadInput(f"{option} is {value}; it must be above 0")
    if model.layers is not None and model.layers < 1:
        raise BadInput(
            f"--layers is {model.layers}; it must be above 0 (0 of a config: none of its layers has experts)"
        )
    if model.layers is not None and model.layers > moe_layers.MOST:
        raise BadInput(f"--layers is {model.layers}; it must be at most {moe_layers.MOST}")
    if model.scores_first:
        model = replace(model, tokens=model.tokens * model.top_k, top_k=1)
    return model.over(Model(layers=1, dtype="bf16", gated=False, lora_rank=0, weight_format="plain"))


# ---- the section "expert_parallel" of a DeepSpeed config, which tells AutoEP how to convert MoE blocks ----

# Activations of transformers configs, by AutoEP's names.
_OF_AUTO_EP = {"swiglu": "silu", "geglu_tanh": "gelu_tanh", "swiglu_clamped": "swiglu", "swiglu_oai": "swiglu"}
# Keys of the section that name the fields of the model's config with these numbers.
_ATTRIBUTES = {"num_experts": "num_experts_attr", "top_k": "top_k_attr"}


def _auto_ep(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the section of a DeepSpeed config, if it is enabled."""
    section = data.get("expert_parallel")
    return section if isinstance(section, Mapping) and section.get("enabled") is True else None


def _auto_ep_names(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns names of fields in the model's config that hold its sizes, as given by the sections of these configs."""
    found: dict[str, str] = {}
    for section in filter(None, map(_auto_ep, configs)):
        for field, key in _ATTRIBUTES.items():
            if isinstance(section.get(key), str):
                found[field] = section[key]
    return found


def _auto_ep_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section's values for the layers, by field of `Model`."""
    section = _auto_ep(data)
    if section is None:
        return {}
    found: dict[str, Any] = {"gated": True, "ranks": _number(section, "autoep_size", 1)}
    if section.get("top_k", "auto") != "auto":
        found["top_k"] = _number(section, "top_k", 1)
    if section.get("expert_activation") is not None:
        found["activation"] = _OF_AUTO_EP.get(str(section["expert_activation"]))
    if section.get("score_apply") == "pre":
        found["scores_first"] = True
    return found


def _number(section: Mapping[str, Any], key: str, default: int) -> int:
    return files.count(f'"expert_parallel": {key}', section.get(key, default))
