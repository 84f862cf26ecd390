# SPDX-License-Identifier: Apache-2.0
"""Makes copies and pickles of a swapped layer layers of the host, so that a saved model loads without Sluice."""

from __future__ import annotations

import copyreg
from typing import Any

from sluice.adapters.deepspeed.moe import moving
from sluice.errors import InvalidState


def as_host(layer: Any, host: type) -> Any:
    """Returns for `__reduce_ex__` a layer of the host's class, since handles of the library cannot be copied.

    The standard library's own function makes that layer, so that a pickle has no name of Sluice.
    """
    if moving.has_moved(layer):
        raise InvalidState("a layer whose experts have moved cannot be copied: move them home first")
    values = {key: value for key, value in layer.__dict__.items() if key != "_sluice"}
    return copyreg._reconstructor, (host, object, None), values  # type: ignore[attr-defined]
