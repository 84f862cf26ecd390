# SPDX-License-Identifier: Apache-2.0
"""Registers Sluice in transformers: one entry each in its registries of experts, of expert-parallel transports and of
quantizers.

Registration costs nothing, because the implementation is imported with the first call.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from sluice.adapters.transformers import NAME

_forward: Any = None


def sluice_experts_forward(
    self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any, process_group: Any = None
) -> Any:
    """Runs experts for transformers: tokens [T, M], local ids [T, K] (num_experts: no expert here), weights [T, K].

    process_group: passed by ep_implementation="deepgemm_megamoe" to its own kernel, with ids of all experts.
    """
    global _forward
    if process_group is not None:
        from sluice.errors import Unsupported

        raise Unsupported(
            f'{type(self).__name__}: ep_implementation="deepgemm_megamoe" runs with '
            f'experts_implementation="deepgemm_megamoe" alone: set ep_implementation="{NAME}" or "all_to_all"'
        )
    if _forward is None:
        from sluice.adapters.transformers import experts

        _forward = experts.forward
    return _forward(self, hidden_states, top_k_index, top_k_weights)


def install(module: ModuleType) -> None:
    """Adds the entries. Raises if this transformers has no such registry; the loader reports that."""
    if module.__name__.endswith("expert_parallel"):
        module.EPImplementationInterface.register(NAME, _make_transport)
        return
    if module.__name__.endswith("quantizers.auto"):
        module.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = _Quantization
        module.AUTO_QUANTIZER_MAPPING[NAME] = _make_quantizer
        return
    interface = getattr(module, "ExpertsInterface", None)
    if interface is None:
        raise RuntimeError("this transformers has no ExpertsInterface: experts_implementation='sluice' needs 5.23")
    interface.register(NAME, sluice_experts_forward)
    from sluice.adapters.transformers import low_rank

    low_rank.install(_why_not_adapted)


def _why_not_adapted(*arguments: Any) -> str:
    from sluice.adapters.transformers.experts import why_not_adapted

    return why_not_adapted(*arguments)


def _make_transport(*arguments: Any) -> Any:
    """Replaces the class of transport.py, which is imported with the first model that uses it."""
    from sluice.adapters.transformers.transport import SluiceEP

    return SluiceEP(*arguments)


class _Quantization:
    """Replaces quantizer.SluiceQuantization until its first use, as _make_quantizer replaces SluiceQuantizer."""

    @staticmethod
    def from_dict(config_dict: dict[str, Any]) -> Any:
        """Makes it from a checkpoint's config."""
        from sluice.adapters.transformers.quantizer import SluiceQuantization

        return SluiceQuantization(**config_dict)


def _make_quantizer(*arguments: Any, **named: Any) -> Any:
    from sluice.adapters.transformers.quantizer import SluiceQuantizer

    return SluiceQuantizer(*arguments, **named)
