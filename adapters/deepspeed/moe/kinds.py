# SPDX-License-Identifier: Apache-2.0
"""Lists DeepSpeed's kinds of MoE layers: how the adapter reads each kind, and which class replaces it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sluice.adapters.deepspeed.moe.finding import Finding
from sluice.adapters.deepspeed.moe.layer import LayerState, SluiceMOELayer
from sluice.adapters.deepspeed.moe.probe import probe
from sluice.adapters.deepspeed.moe.runners import Runners
from torch import nn

from deepspeed.moe.sharded_moe import MOELayer


class Kind(NamedTuple):
    """A class of MoE layers of DeepSpeed."""

    host: type[nn.Module]
    swapped: type[nn.Module]  # its subclass, with another forward
    probe: Callable[[Any, int, str], Finding]  # (layer, number, name); UnsupportedError
    state: type[Runners]


KINDS = [Kind(MOELayer, SluiceMOELayer, probe, LayerState)]

try:
    from sluice.adapters.deepspeed.moe import autoep
except ImportError:  # DeepSpeed before 0.19.2
    pass
else:
    KINDS.append(Kind(autoep.AutoEPMoELayer, autoep.SluiceAutoEPMoELayer, autoep.probe, autoep.AutoEPState))


def of_host(module: nn.Module) -> Kind | None:
    """Returns the kind of a host layer or subclass of one; None: the module is no such layer, or is swapped."""
    return next((k for k in KINDS if isinstance(module, k.host) and not isinstance(module, k.swapped)), None)


def of_swapped(module: nn.Module) -> Kind | None:
    """Returns the kind of a swapped layer; None: the module is not swapped."""
    return next((kind for kind in KINDS if type(module) is kind.swapped), None)


def host_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, Kind]]:
    """Yields (name, layer, kind) of all host layers that are not swapped already, in the order of the model."""
    for name, child in module.named_modules():
        kind = of_host(child)
        if kind is not None:
            yield name, child, kind
