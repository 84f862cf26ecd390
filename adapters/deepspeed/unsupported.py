# SPDX-License-Identifier: Apache-2.0
"""The one error for what Sluice cannot take over."""

from __future__ import annotations

from sluice.adapters.torch import refused_policy
from sluice.config import Options
from sluice.errors import Unsupported


class UnsupportedError(Unsupported):
    """Something in the model cannot run on Sluice; the message says what, where and what to do about it."""


def policy_of_modules(name: str, options: Options) -> str | None:
    """What becomes of the options' policy in a layer that calls the host's modules; None: it is done, or none is given.

    Where it cannot be done this is an error, or with "warn" a sentence that says what happens in its place.
    """
    reason = refused_policy(options)
    if reason is None:
        return None
    if options.on_unsupported == "error":
        raise UnsupportedError(
            f'MoE layer \'{name}\': {reason}. Write "on_unsupported": "warn" in the "sluice" section to keep them there'
        )
    return f"MoE layer '{name}': {reason}; here they are kept"
