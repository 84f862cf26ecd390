# SPDX-License-Identifier: Apache-2.0
"""Checks for `sluice doctor --config FILE` what Sluice would swap with Megatron's flags or a TransformerConfig."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sluice import config, settings
from sluice.adapters.megatron import refusals
from sluice.doctor_findings import BAD, NOTE, OK, Finding

CHECK = "config"
SPEC = "sluice.megatron"
# Maps flags to their names in TransformerConfig.
_FLAGS = {"fp8_format": "fp8", "fp4_format": "fp4"}


def examine(path: str, values: Mapping[str, Any], are_flags: bool) -> Iterator[Finding]:
    """Yields the findings. values: flat, with underscores. are_flags: a script's flags, which must name the spec."""
    given = {_FLAGS.get(name, name): value for name, value in values.items()}
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
        yield Finding(
            CHECK,
            BAD,
            f"{path}: no --spec {SPEC} moe_block_spec: no layer would be swapped",
            f"add --spec {SPEC} moe_block_spec",
        )
        return
    against = list(_against(given))
    is_left = options.on_unsupported == "warn"
    for reason in against:
        said, _, advice = reason.rpartition(": ")
        left = ": layers stay with Megatron" if is_left else ""
        yield Finding(CHECK, NOTE if is_left else BAD, f"{path}: {said}{left}", advice)
    if not against:
        how = f"--spec {SPEC} moe_block_spec" if are_flags else f"the spec is given through {SPEC}.with_sluice"
        yield Finding(
            CHECK,
            OK,
            f"{path}: every MoE layer of {count} experts runs on Sluice, where {how} | {options.full_message()}",
        )


def _against(given: Mapping[str, Any]) -> Iterator[str]:
    split = given.get("expert_tensor_parallel_size", given.get("tensor_model_parallel_size"))
    yield from refusals.against(given.get, split if isinstance(split, int) else 1)
    if given.get("moe_grouped_gemm") is True and given.get("transformer_impl", "transformer_engine") != "local":
        yield "its experts are a TEGroupedMLP of Transformer Engine: leave --moe-grouped-gemm out"
