# SPDX-License-Identifier: Apache-2.0
"""Reads the model of `sluice plan --split` from a "sluice_split" file or the config.json of a transformers decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import architecture, files
from .errors import BadInput
from .files import Read, flag, list_of, members, one_of, refused, seconds, size, text, whole
from .model import dtype_of, innermost
from .planner import ACTIVATIONS, DTYPES
from .split import Layer, Model

MOST_LAYERS = 4096


@dataclass(frozen=True)
class SplitFile:
    """Has the content of a file. machine: None if the file names none."""

    model: Model
    machine: str | None


def _elements(where: str, value: Any) -> int:
    """Reads a number of parameters."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 2**48 or value != int(value):
        raise refused(where, "a whole number of parameters from 0 to 2^48", value)
    return int(value)


def _point(where: str, value: Any) -> tuple[int, float, float]:
    names = ("micro_batch", "forward_seconds", "backward_seconds")
    found = members(where, value, dict(zip(names, (whole(1), seconds, seconds))), names)
    return found["micro_batch"], found["forward_seconds"], found["backward_seconds"]


_EXPERTS: dict[str, Read] = dict.fromkeys(("count", "top_k", "model_width", "hidden_width"), whole(1))


def _experts(where: str, value: Any) -> architecture.Experts:
    found = members(where, value, _EXPERTS, tuple(_EXPERTS))
    if found["top_k"] > found["count"]:
        raise refused(f"{where}.top_k", f"at most count, which is {found['count']}", found["top_k"])
    return architecture.Experts(**found)


_LAYER: dict[str, Read] = {
    "name": text,
    "repeat": whole(1),
    "parameters": _elements,
    "flops": seconds,
    "measured": list_of(_point),
    **dict.fromkeys(("activation_bytes", "checkpoint_bytes", "workspace_bytes", "output_bytes"), size),
    "may_recompute": flag,
    "experts": _experts,
}


def _layers(where: str, value: Any) -> tuple[Layer, ...]:
    found: list[Layer] = []
    for index, each in enumerate(list_of(lambda at, one: members(at, one, _LAYER))(where, value)):
        count = each.pop("repeat", 1)
        if len(found) + count > MOST_LAYERS:
            raise BadInput(f"{where} has more than {MOST_LAYERS} layers")
        if "flops" in each and "measured" in each:
            raise BadInput(f"{where}[{index}] has both flops and measured: give one of the two")
        layer = Layer(**each)
        if layer.checkpoint_bytes > layer.activation_bytes:
            raise refused(f"{where}[{index}].checkpoint_bytes", "at most activation_bytes", layer.checkpoint_bytes)
        found += [layer] * count
    if not found:
        raise BadInput(f"{where} is empty; a model has at least one layer")
    return tuple(replace(layer, name=layer.name or f"layer {i}") for i, layer in enumerate(found))


_FILE: dict[str, Read] = {
    "sluice_split": whole(1),
    "batch": whole(1),
    "tokens": whole(1),
    "dtype": one_of(tuple(DTYPES)),
    "gated": flag,
    "activation": one_of(tuple(name for name in ACTIVATIONS if name is not None)),
    "machine": text,
    "layers": _layers,
}


def parse(words: str, batch: int | None = None, tokens: int | None = None) -> SplitFile:
    """Parses a file. batch and tokens override the file. BadInput names the field."""
    data = files.from_json("", words)
    if not isinstance(data, dict):
        raise refused("the file", "an object", data)
    if "sluice_split" not in data:
        if "model_type" not in data:
            raise BadInput(
                "it has neither 'sluice_split' (docs/tools.md) nor 'model_type', as a config of transformers"
            )
        return SplitFile(of_decoder(data, batch, tokens), None)
    found = members("", data, _FILE, ("sluice_split", "layers"))
    if found.pop("sluice_split") != 1:
        raise BadInput(f"sluice_split is {data['sluice_split']}; this version reads 1")
    machine = found.pop("machine", None)
    found |= {name: value for name, value in (("batch", batch), ("tokens", tokens)) if value is not None}
    if "batch" not in found:
        raise BadInput("the field 'batch' is missing: the samples of a step; give it, or --batch")
    return SplitFile(Model(**found), machine)


def read(path: str, batch: int | None = None, tokens: int | None = None) -> SplitFile:
    """Reads and parses a file. Messages begin with its name."""
    words = files.read(f"--split {path}", path)
    try:
        return parse(words, batch, tokens)
    except BadInput as error:
        raise BadInput(f"--split {path}: {error.message}") from None


def of_decoder(data: Mapping[str, Any], batch: int | None, tokens: int | None) -> Model:
    """Returns the model of a decoder: embedding, layers, head. Activations are in the model's dtype, of attention
    without a matrix of scores (SDPA); logits are f32."""
    if batch is None or tokens is None:
        missing = " and ".join(n for n, v in (("--batch", batch), ("--sequence-length", tokens)) if v is None)
        raise BadInput(f"a config says neither the samples of a step nor their tokens: give {missing}")
    dtype = dtype_of(innermost(data))
    decoder = architecture.read(data, dtype)
    element, width = 4 if dtype == "f32" else 2, decoder.model_width
    edge = tokens * width * element
    embedding = decoder.vocabulary * width
    layers = [Layer("embedding", parameters=embedding, output_bytes=edge, may_recompute=False)]
    for index, block in enumerate(decoder.blocks):
        layers.append(
            Layer(
                f"{index} {'MoE' if block.experts else 'block'}",
                parameters=block.dense,
                flops=tokens * (2.0 * block.multiplied + 2.0 * tokens * decoder.heads * decoder.head_width),
                activation_bytes=tokens * decoder.kept_by(block) * element,
                checkpoint_bytes=edge,
                output_bytes=edge,
                experts=block.experts,
            )
        )
    head = Layer(
        "head",
        parameters=decoder.ends - embedding if decoder.head else width + embedding,
        flops=2.0 * tokens * decoder.vocabulary * width,
        activation_bytes=edge + 4 * tokens * decoder.vocabulary,
        checkpoint_bytes=edge,
        workspace_bytes=4 * tokens * decoder.vocabulary,
        may_recompute=False,
    )
    return Model((*layers, head), batch, tokens, dtype)
