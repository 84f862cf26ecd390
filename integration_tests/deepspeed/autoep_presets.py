# SPDX-License-Identifier: Apache-2.0
"""Makes the models of tf_models for AutoEP's presets.

DeepSpeed 0.19.8 uses class names as keys of transformers' registry of recorded outputs. Since 5.23 the registry accepts
only models, so stock fails to replace blocks of Mixtral and Qwen models. Here it accepts both. Neither host is changed
otherwise.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "transformers"))
import tf_models
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


# In place, because other modules have imported the object. Before 5.23 it is a plain dict.
if _Own is not dict:
    output_capturing._CAN_RECORD_REGISTRY.__class__ = _Registry


def build(kind: str, vocabulary: int, seed: int = 3, **changes: Any) -> Any:
    """Returns a model with the same parameters on every call and rank. changes: other fields of its config."""
    return tf_models.make(kind, "eager", random=seed, vocab_size=vocabulary, **changes)
