# SPDX-License-Identifier: Apache-2.0
"""Defines `--spec sluice.megatron moe_block_spec`: a transformer layer that finds its own submodules.

The flag names an object that is imported before the model's config exists, so this object does not show which layers
have experts. A layer reads the config when it is built, and takes the spec that the host would choose for its number.
"""

from __future__ import annotations

import inspect
from typing import Any

from sluice.adapters.megatron.hook import swap_moe
from sluice.errors import Unsupported

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset


class SluiceTransformerLayer(TransformerLayer):
    """Extends the host's layer: MoE layers in it run on Sluice."""

    def __init__(self, config: Any, submodules: Any = None, *args: Any, **kwargs: Any) -> None:
        if submodules is None:
            given = inspect.signature(TransformerLayer.__init__).bind(self, config, None, *args, **kwargs)
            given.apply_defaults()
            submodules = _submodules(config, given.arguments)
        super().__init__(config, submodules, *args, **kwargs)


def _submodules(config: Any, given: dict[str, Any]) -> Any:
    if config.num_moe_experts is None:
        raise Unsupported("moe_block_spec: this model has no experts (num_moe_experts is not set): leave --spec out")
    number = given["layer_number"]
    if not given.get("is_mtp_layer", False) and given.get("add_layer_offset", True):
        groups = given["pg_collection"] or ProcessGroupCollection.use_mpu_process_groups()
        number += get_transformer_layer_offset(config, given["vp_stage"], groups.pp.rank())
    specs = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )
    spec = specs[min(number, len(specs)) - 1]  # a layer of multi-token prediction is built like the last one
    if spec.module is not TransformerLayer:
        raise Unsupported(f"moe_block_spec: the host would build {spec.module.__name__} here: use with_sluice")
    return swap_moe(spec, {})[0].submodules


moe_block_spec = ModuleSpec(module=SluiceTransformerLayer)
