# SPDX-License-Identifier: Apache-2.0
"""Lets DeepSpeed 0.19.8 replace blocks of Mixtral and Qwen models with transformers 5.23.

DeepSpeed uses class names as keys of transformers' registry of recorded outputs. Since 5.23 the registry accepts only
models, so stock fails. Here it accepts both. Neither host is changed otherwise.
"""

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
    """Changes the registry. Does nothing if this was done already, or if the registry is a plain dict (before 5.23)."""
    registry = output_capturing._CAN_RECORD_REGISTRY
    if type(registry) is _Own is not dict:
        registry.__class__ = _Registry  # in place, because other modules have imported the object
