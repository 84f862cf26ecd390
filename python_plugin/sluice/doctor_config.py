# SPDX-License-Identifier: Apache-2.0
"""Checks for `sluice doctor --config FILE` what a config of DeepSpeed, transformers or Megatron would swap, or why not.

The file is judged as the adapters would judge it. No model is built, so only the banner of a run shows what depends on
the model (the form of its experts).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice import config, settings
from sluice.planning import megatron

OK, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True)
class Finding:
    """Describes one line of the report."""

    check: str
    state: str
    detail: str
    advice: str = ""


def installed_version(distribution: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


CHECK = "config"
DEEPSPEED_KEYS = ("zero_optimization", "optimizer", "gradient_accumulation_steps", "bf16", "fp16", "steps_per_print")
DTYPES = ("float32", "bfloat16", "float16")


def examine(path: str) -> Iterator[Finding]:
    """Yields the findings about one file. If nothing would be swapped, only the reasons are yielded."""
    values = _read(path)
    if isinstance(values, Finding):
        yield values
    elif isinstance(values.get("model_type"), str):
        yield from _transformers(path, values)
    elif any(key.startswith("train_") or key in DEEPSPEED_KEYS for key in values) or "sluice" in values:
        yield from _deepspeed(path, values)
    elif megatron.is_megatron(megatron.flat(values)):
        yield from _megatron(path, megatron.flat(values), _FLAGS in values)
    else:
        known = "of DeepSpeed (train_..., zero_optimization, sluice), of transformers (model_type) or of Megatron"
        files = "the file that the training script gives to deepspeed.initialize, a model's config.json, or the script"
        said = f"{path} is not a config {known} (num_moe_experts, or a script with its flags)"
        yield Finding(CHECK, BAD, said, f"give {files} with Megatron's flags")


_FLAGS = "flags of a script"


def _flags(flags: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the flags of a Megatron run; None if these are not Megatron's."""
    is_its_own = megatron.is_megatron(flags) or "num_experts" in flags
    return {"num_moe_experts": flags.get("num_experts"), **flags, _FLAGS: True} if is_its_own else None


def _read(path: str) -> Mapping[str, Any] | Finding:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        return Finding(CHECK, BAD, f"{path}: {getattr(error, 'strerror', None) or error}", "give a file that is there")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        values = _flags(megatron.flags_of(text)) or _yaml(path, text) or _hjson(text)
        if values is None:
            return Finding(CHECK, BAD, f"{path} is not JSON: {error}", "correct that line")
    if not isinstance(values, Mapping):
        return Finding(CHECK, BAD, f"{path} holds {type(values).__name__}, not an object", "give a config file")
    return values


def _hjson(text: str) -> Any:
    """Parses JSON with comments and without quotes, as DeepSpeed reads its config."""
    try:
        import hjson

        return hjson.loads(text)
    except (ImportError, ValueError, RecursionError):
        return None


def _yaml(path: str, text: str) -> Mapping[str, Any] | None:
    """Parses a YAML file of Megatron, or a recipe of its tests."""
    if Path(path).suffix not in (".yaml", ".yml"):
        return None
    try:
        import yaml

        values = yaml.safe_load(text)
    except Exception:  # no yaml module, or no YAML: the caller tries hjson next
        return None
    if not isinstance(values, Mapping):
        return None
    recipe = megatron.flags_of_recipe(values)
    return values if recipe is None else _flags(recipe)


def _section(path: str, values: Mapping[str, Any]) -> config.Options | Finding:
    """Returns the options of the "sluice" section and the environment together."""
    section = values.get("sluice")
    try:
        options = settings.of_ds_config(section)
    except config.ConfigError as error:
        return Finding(CHECK, BAD, f"{path}: {error}", "correct that key")
    if options is not None:
        return options
    if os.environ.get(config.ENVIRONMENT, "").strip() == "0":
        return Finding(CHECK, NOTE, f"{path}: SLUICE=0 leaves all layers to the host", "unset SLUICE")
    if section is not None:
        return Finding(CHECK, NOTE, f'{path}: "enabled" is not true: no layer would be swapped', 'set "enabled": true')
    name = config.misspelt_section(values)
    if name is not None:
        said = f'{path} has a key "{name}" and none "sluice"'
        return Finding(CHECK, BAD, said, 'did you mean "sluice"? DeepSpeed ignores others')
    said = f'{path} has no "sluice" section: no layer would be swapped'
    return Finding(CHECK, BAD, said, 'add "sluice": {"enabled": true}, or set SLUICE=1')


# ---- DeepSpeed ----


def _deepspeed(path: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    options = _section(path, values)
    if isinstance(options, Finding):
        yield options
        return
    against = list(_obstacles(values, options))
    yield from against
    if all(finding.state != BAD for finding in against):
        refusals = "an error" if options.on_unsupported == "error" else "left to DeepSpeed"
        which = "AutoEP layer and deepspeed.moe.layer.MoE" if _is_auto_ep(values) else "deepspeed.moe.layer.MoE"
        said = f"every {which} of the model would be swapped | {options.full_message()}"
        yield Finding(CHECK, OK, f"{path}: {said} | a layer that cannot be is {refusals}")


def _number(values: Mapping[str, Any], *names: str) -> int:
    """Returns a number inside nested sections, 0 if there is none."""
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _obstacles(values: Mapping[str, Any], options: config.Options) -> Iterator[Finding]:
    """Yields DeepSpeed's own keys that keep layers from being swapped."""
    warned = NOTE if options.on_unsupported == "warn" else BAD
    stage, shares = _number(values, "zero_optimization", "stage"), _number(values, "tensor_parallel", "autotp_size")
    if stage == 3:
        lower = 'set "zero_optimization": {"stage": 2} or less'
        if _is_auto_ep(values):
            yield Finding(CHECK, warned, "ZeRO stage 3: AutoEP layers are not swapped there", lower)
        else:
            yield Finding(CHECK, BAD, "ZeRO stage 3: DeepSpeed itself refuses its native MoE there", lower)
    if options.pipeline is not None and stage == 2:
        remedy = 'set "zero_optimization": {"stage": 1}, or take "pipeline" out of "sluice"'
        yield Finding(CHECK, BAD, "ZeRO stage 2: DeepSpeed's pipeline engine itself refuses it", remedy)
    if _is_auto_ep(values):
        yield from _against_auto_ep(values["expert_parallel"], warned)
    if shares > 1:
        said = f'"tensor_parallel": autotp_size is {shares}; layers under tensor parallelism are not swapped'
        yield Finding(CHECK, warned, said, "use tensor-parallel size 1")


def _is_auto_ep(values: Mapping[str, Any]) -> bool:
    """Returns whether DeepSpeed replaces MoE blocks of the model by its own layers."""
    section = values.get("expert_parallel")
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _against_auto_ep(section: Mapping[str, Any], warned: str) -> Iterator[Finding]:
    """Yields the keys of AutoEP's section that keep its layers from being swapped."""
    backend = section.get("comm_backend", "comm")
    if backend != "comm" and section.get("autoep_size", 1) != 1:
        said = f'"expert_parallel": "comm_backend" is {json.dumps(backend)}, and Sluice exchanges rows itself'
        yield Finding(CHECK, warned, f"{said}: AutoEP layers are not swapped", "take that key out")


# ---- transformers ----


def _transformers(path: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    from sluice.planning import model as models
    from sluice.planning.errors import BadInput

    kind = values["model_type"]
    try:
        layers = models.layers_of(values, path)
    except BadInput as error:
        yield Finding(CHECK, BAD, f"{path}: {error}", "correct that field")
        return
    if not layers.num_experts or layers.layers == 0:
        yield Finding(CHECK, BAD, f"{path}: a {kind} without experts: there is nothing to swap", "")
        return
    against = list(_model_obstacles(path, kind, values))
    yield from against
    if against:
        return
    try:
        options = settings.effective(values.get("sluice"))
    except config.ConfigError as error:
        yield Finding(CHECK, BAD, f"{path}: {error}", "correct that key")
        return
    if options is None:
        off = 'SLUICE=0, or "enabled": false, leaves the experts to transformers'
        yield Finding(CHECK, NOTE, f"{path}: {off}", "unset SLUICE, or take that key out")
        return
    count = "its layers" if layers.layers is None else f"{layers.layers} layers"
    said = f"{count} of this {kind} with {layers.num_experts} experts each run on Sluice when it is loaded with"
    yield Finding(CHECK, OK, f'{path}: {said} experts_implementation="sluice" | {options.full_message()}')


def _model_obstacles(path: str, kind: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    if installed_version("transformers") is None:
        yield Finding(CHECK, NOTE, f"{path}: transformers is not installed here", "pip install transformers")
    elif _takes_part(kind) is False:
        said = f"the experts of {kind} do not read experts_implementation in this transformers, so they stay its own"
        yield Finding(CHECK, BAD, f"{path}: {said}", "docs/transformers.md lists the families that do")
    if values.get("quantization_config"):
        said = f"quantization_config: Sluice computes in {', '.join(DTYPES)}, not on quantised tensors"
        yield Finding(CHECK, BAD, f"{path}: {said}", "load the model without it")


def _takes_part(kind: str) -> bool | None:
    """Returns whether a class of this family is decorated for the registry of experts; None: unknown family."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(kind)
    files = list(folder.glob("modeling_*.py"))
    return any("\n@use_experts_implementation" in file.read_text() for file in files) if files else None


# ---- Megatron ----

SPEC = "sluice.megatron"
# Maps flags to their names in TransformerConfig.
_RENAMED = {"fp8_format": "fp8", "fp4_format": "fp4"}


def _megatron(path: str, values: Mapping[str, Any], are_flags: bool) -> Iterator[Finding]:
    """Yields the findings. values: flat, with underscores. are_flags: a script's flags, which must name the spec."""
    given = {_RENAMED.get(name, name): value for name, value in values.items()}
    count = given.get("num_moe_experts") or given.get("num_experts")
    if not count:
        yield Finding(CHECK, BAD, f"{path}: a model without experts (num_experts): there is nothing to swap", "")
        return
    try:
        options = settings.effective()
    except config.ConfigError as error:
        yield Finding(CHECK, BAD, f"{path}: {error}", "correct that key of SLUICE_OPTIONS")
        return
    if options is None:
        yield Finding(CHECK, NOTE, f"{path}: SLUICE=0 leaves all layers to Megatron", "unset SLUICE")
        return
    if are_flags and str(given.get("spec", "")).split()[:1] != [SPEC]:
        spec = f"--spec {SPEC} moe_block_spec"
        yield Finding(CHECK, BAD, f"{path}: no {spec}: no layer would be swapped", f"add {spec}")
        return
    against = list(_against(given))
    is_left = options.on_unsupported == "warn"
    for reason in against:
        said, _, advice = reason.rpartition(": ")
        left = ": layers stay with Megatron" if is_left else ""
        yield Finding(CHECK, NOTE if is_left else BAD, f"{path}: {said}{left}", advice)
    if not against:
        how = f"--spec {SPEC} moe_block_spec" if are_flags else f"the spec is given through {SPEC}.with_sluice"
        said = f"every MoE layer of {count} experts runs on Sluice, where {how} | {options.full_message()}"
        yield Finding(CHECK, OK, f"{path}: {said}")


def _against(given: Mapping[str, Any]) -> Iterator[str]:
    from sluice.adapters.megatron import refusals

    split = given.get("expert_tensor_parallel_size", given.get("tensor_model_parallel_size"))
    yield from refusals.against(given.get, split if isinstance(split, int) else 1)
    if given.get("moe_grouped_gemm") is True and given.get("transformer_impl", "transformer_engine") != "local":
        yield "its experts are a TEGroupedMLP of Transformer Engine: leave --moe-grouped-gemm out"
