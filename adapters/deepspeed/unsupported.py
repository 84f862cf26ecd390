"""The one error for what Sluice cannot take over."""

from __future__ import annotations

from sluice.errors import Unsupported


class UnsupportedError(Unsupported):
    """Something in the model cannot run on Sluice; the message says what, where and what to do about it."""
