# SPDX-License-Identifier: Apache-2.0
"""Makes a tiny instance of every experts class of transformers that uses the registry of experts implementations."""

import functools
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

_CLASS = re.compile(r"^@use_experts_implementation[^\n]*\nclass (\w+)", re.MULTILINE)
# Values of the models' own configs that TinyConfig cannot derive from the name of a field.
_ACTIVATIONS = {"gemma4": "gelu_pytorch_tanh", "diffusion_gemma": "gelu_pytorch_tanh", "nemotron_h": "relu2"}
_NUMBERS = {
    "swiglu_alpha": 1.702,
    "swiglu_limit": 1.25,
    "mlp_gate_softcap": 3.0,
    "mlp_up_softcap": 3.0,
    "rms_norm_eps": 1e-6,
    "post_norm_eps": 1e-6,
}


@functools.cache
def classes() -> tuple[tuple[str, str], ...]:
    """Returns (model type, class name) of each class in the installed transformers."""
    models = Path(transformers.__file__).parent / "models"
    found = []
    for path in sorted(models.glob("*/modeling_*.py")):
        found += [(path.parent.name, name) for name in _CLASS.findall(path.read_text())]
    return tuple(found)


class TinyConfig(SimpleNamespace):
    """A config that derives the value of each attribute that an experts class reads from the name of the attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _NUMBERS:
            return _NUMBERS[name]
        if "latent" in name:
            return None
        if "intermediate" in name or name in ("ffn_hidden_size", "moe_ffn_hidden_size"):
            return self.hidden
        if "hidden_size" in name or name == "d_model":
            return self.model
        if name.endswith("act") or "activation" in name:
            return self.act
        if "expert" in name:
            return self.experts
        raise AttributeError(f"TinyConfig does not know {name}")


def make(kind: str, model: int, hidden: int, experts: int, class_name: str = "") -> torch.nn.Module:
    """Returns a module of the class, or of the last one of its kind, with small random parameters in f32 and
    experts_implementation="sluice"."""
    path = next((Path(transformers.__file__).parent / "models" / kind).glob("modeling_*.py"))
    cls = getattr(
        importlib.import_module(f"transformers.models.{kind}.{path.stem}"), class_name or dict(classes())[kind]
    )
    config = TinyConfig(
        model=model,
        hidden=hidden,
        experts=experts,
        act=_ACTIVATIONS.get(kind, "silu"),
        _experts_implementation="sluice",
    )
    torch.manual_seed(0)
    module = cls(config)
    for name, parameter in module.named_parameters():
        scale = 0.3 if "bias" in name or "norm" in name else parameter.shape[-2 if module.is_transposed else -1] ** -0.5
        torch.nn.init.normal_(parameter, std=1.5 * scale)
    return module
