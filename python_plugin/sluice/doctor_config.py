# SPDX-License-Identifier: Apache-2.0
"""Checks for `sluice doctor --config FILE` what a config of DeepSpeed, transformers or Megatron would swap, or why not.

The file is judged as the adapters would judge it. No model is built, so only the banner of a run shows what depends on
the model (the form of its experts).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sluice import config, settings
from sluice.doctor_findings import BAD, NOTE, OK, Finding, installed_version
from sluice.planning import megatron

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
        from sluice import doctor_megatron

        yield from doctor_megatron.examine(path, megatron.flat(values), _FLAGS in values)
    else:
        yield Finding(
            CHECK,
            BAD,
            f"{path} is not a config of DeepSpeed (train_..., zero_optimization, sluice), of transformers "
            "(model_type) or of Megatron (num_moe_experts, or a script with its flags)",
            "give the file that the training script gives to deepspeed.initialize, a model's config.json, or the "
            "script with Megatron's flags",
        )


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
        return Finding(
            CHECK,
            BAD,
            f'{path} has a key "{name}" and none "sluice"',
            'did you mean "sluice"? DeepSpeed ignores others',
        )
    return Finding(
        CHECK,
        BAD,
        f'{path} has no "sluice" section: no layer would be swapped',
        'add "sluice": {"enabled": true}, or set SLUICE=1',
    )


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
        yield Finding(
            CHECK,
            OK,
            f"{path}: every {which} of the model would be swapped | {options.full_message()} | a layer that cannot be "
            f"is {refusals}",
        )


def _number(values: Mapping[str, Any], *names: str) -> int:
    """Returns a number inside nested sections, 0 if there is none."""
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _obstacles(values: Mapping[str, Any], options: config.Options) -> Iterator[Finding]:
    """Yields DeepSpeed's own keys that keep layers from being swapped."""
    warned = NOTE if options.on_unsupported == "warn" else BAD
    if _number(values, "zero_optimization", "stage") == 3:
        why = (
            "AutoEP layers are not swapped there"
            if _is_auto_ep(values)
            else "DeepSpeed itself refuses its native MoE there"
        )
        yield Finding(
            CHECK,
            warned if _is_auto_ep(values) else BAD,
            f"ZeRO stage 3: {why}",
            'set "zero_optimization": {"stage": 2} or less',
        )
    if options.pipeline is not None and _number(values, "zero_optimization", "stage") == 2:
        yield Finding(
            CHECK,
            BAD,
            "ZeRO stage 2: DeepSpeed's pipeline engine itself refuses it",
            'set "zero_optimization": {"stage": 1}, or take "pipeline" out of "sluice"',
        )
    if _is_auto_ep(values):
        yield from _against_auto_ep(values["expert_parallel"], warned)
    if _number(values, "tensor_parallel", "autotp_size") > 1:
        yield Finding(
            CHECK,
            warned,
            f'"tensor_parallel": autotp_size is {_number(values, "tensor_parallel", "autotp_size")}; layers under '
            "tensor parallelism are not swapped",
            "use tensor-parallel size 1",
        )


def _is_auto_ep(values: Mapping[str, Any]) -> bool:
    """Returns whether DeepSpeed replaces MoE blocks of the model by its own layers."""
    section = values.get("expert_parallel")
    return isinstance(section, Mapping) and bool(section.get("enabled"))


def _against_auto_ep(section: Mapping[str, Any], warned: str) -> Iterator[Finding]:
    """Yields the keys of AutoEP's section that keep its layers from being swapped."""
    backend = section.get("comm_backend", "comm")
    if backend != "comm" and section.get("autoep_size", 1) != 1:
        yield Finding(
            CHECK,
            warned,
            f'"expert_parallel": "comm_backend" is {json.dumps(backend)}, and Sluice exchanges rows itself: AutoEP '
            "layers are not swapped",
            "take that key out",
        )


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
    yield Finding(
        CHECK,
        OK,
        f"{path}: {count} of this {kind} with {layers.num_experts} experts each run on Sluice when it is loaded with "
        f'experts_implementation="sluice" | {options.full_message()}',
    )


def _model_obstacles(path: str, kind: str, values: Mapping[str, Any]) -> Iterator[Finding]:
    if installed_version("transformers") is None:
        yield Finding(CHECK, NOTE, f"{path}: transformers is not installed here", "pip install transformers")
    elif _takes_part(kind) is False:
        yield Finding(
            CHECK,
            BAD,
            f"{path}: the experts of {kind} do not read experts_implementation in this transformers, so they stay its "
            "own",
            "docs/transformers.md lists the families that do",
        )
    if values.get("quantization_config"):
        yield Finding(
            CHECK,
            BAD,
            f"{path}: quantization_config: Sluice computes in {', '.join(DTYPES)}, not on quantised tensors",
            "load the model without it",
        )


def _takes_part(kind: str) -> bool | None:
    """Returns whether a class of this family is decorated for the registry of experts; None: unknown family."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(kind)
    files = list(folder.glob("modeling_*.py"))
    return any("\n@use_experts_implementation" in file.read_text() for file in files) if files else None
