# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed 0.19.8 replace blocks of Mixtral and Qwen models with transformers 5.23.

DeepSpeed looks up transformers' registry of recorded outputs by the name of a class; since 5.23 the registry accepts
only models, so stock fails. Here it accepts both. Neither host is changed otherwise.
"""

from __future__ import annotations

from typing import Any

from transformers.utils import output_capturing

_Own: Any = type(output_capturing._CAN_RECORD_REGISTRY)


class _Registry(_Own):
    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str):
            dict.__setitem__(self, key, value)
        else:
            super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        return dict.get(self, key, default) if isinstance(key, str) else super().get(key)


def install() -> None:
    """May be called again; nothing where the registry is a plain dict, as it was before."""
    registry = output_capturing._CAN_RECORD_REGISTRY
    if type(registry) is _Own is not dict:
        registry.__class__ = _Registry  # the object that others have imported
