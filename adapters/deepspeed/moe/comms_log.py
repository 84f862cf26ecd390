# SPDX-License-Identifier: Apache-2.0
"""Records Sluice's exchanges in DeepSpeed's `comms_logger`, in place of the host's own all-to-alls."""

from __future__ import annotations

from typing import Any

OPERATION = "all_to_all_single"  # the logger ends the process for an unknown name


def _logger() -> Any:
    from deepspeed.comm import comm

    return comm.comms_logger


def wanted() -> bool:
    """Returns whether the logger records this operation, by the host's own rule."""
    logger = _logger()
    return bool(logger.enabled and (logger.prof_all or OPERATION in logger.prof_ops))


def append(name: str, nanoseconds: int, num_bytes: int) -> None:
    """Appends a record: bytes that this rank sent in a pass, and the time of its communication lane."""
    # In milliseconds, by which the logger divides.
    _logger().append(OPERATION, name, max(nanoseconds, 1) / 1e6, num_bytes)
