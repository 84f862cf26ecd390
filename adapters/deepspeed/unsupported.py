# SPDX-License-Identifier: Apache-2.0
"""Defines the error for parts of a model that cannot run on Sluice."""

from __future__ import annotations

from sluice.adapters.torch import refused_policy
from sluice.config import Options
from sluice.errors import Unsupported


class UnsupportedError(Unsupported):
    """Something in the model cannot run on Sluice; the message says what, where and what to do."""


def policy_of_modules(name: str, options: Options) -> str | None:
    """Checks the options' policy for a layer that calls the host's modules; None: it can be followed, or none is given.

    If it cannot be followed, this raises an error, or with "warn" returns a sentence that says what happens instead.
    """
    reason = refused_policy(options)
    if reason is None:
        return None
    if options.on_unsupported == "error":
        raise UnsupportedError(
            f'MoE layer \'{name}\': {reason}. Write "on_unsupported": "warn" in the "sluice" section to keep them there'
        )
    return f"MoE layer '{name}': {reason}; here they are kept"
