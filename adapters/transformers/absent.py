# SPDX-License-Identifier: Apache-2.0
"""Explains why no experts of a transformers model have run on Sluice. Needs no Sluice engine."""

from __future__ import annotations

import sys
from typing import Any

from sluice.adapters.transformers import NAME


def waits(module: Any) -> bool:
    """Returns whether these experts run on Sluice from their first call on."""
    experts = sys.modules.get("sluice.adapters.transformers.experts")
    return _implementation(module) == NAME or (experts is not None and experts.is_transported(module))


def need_not_have_run(given: Any) -> bool:
    """Returns whether some of its experts wait for their first call."""
    return any(waits(module) for module in given.modules())


def why(given: Any) -> str:
    """Returns why no experts of the model run on Sluice; "": it has no experts modules of transformers."""
    chosen = [name for name in map(_implementation, given.modules()) if name is not None]
    if not chosen:
        return ""
    return (
        f"it holds {len(chosen)} experts module{'s' if len(chosen) > 1 else ''} of transformers', with "
        f'experts_implementation="{", ".join(sorted(set(chosen)))}": load it with "{NAME}", or call '
        f'model.set_experts_implementation("{NAME}")'
    )


def _implementation(module: Any) -> str | None:
    """Returns the implementation in its config; None: transformers' decorator has not made it an experts module."""
    attributes = vars(module)
    if "is_concatenated" not in attributes or "config" not in attributes:
        return None
    return str(getattr(attributes["config"], "_experts_implementation", None))
