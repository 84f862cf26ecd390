# SPDX-License-Identifier: Apache-2.0
"""Reads the tensors of a checkpoint by the names that they have without quantisation. Tensors in 4 or 8 bits are
decoded when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sluice.adapters.torch import Format, dequantise
from sluice.adapters.transformers import NAME
from sluice.errors import InvalidArgument, Unsupported

# The suffixes of codes and of scales after the name of a weight, by the format of the checkpoint.
SUFFIXES = {"mxfp4": ("_blocks", "_scales"), "fp8": ("", "_scale_inv"), NAME: ("_codes", "_scales")}


class Source(NamedTuple):
    """Has the key of a weight. scales: their file and key; None: the weight is plain."""

    key: str
    scales: tuple[str, str] | None


class Checkpoint:
    """Lists the files of a folder.

    files  by file name, the names of its weights and their sources
    """

    def __init__(self, folder: Path, keys: Mapping[str, Iterable[str]], quantised: dict[str, Any] | None) -> None:
        self._folder = folder
        self._form: Format | None = None
        self._layout = ""
        if quantised is not None:
            self._layout = str(quantised.get("quant_method"))
            if self._layout not in SUFFIXES or quantised.get("weight_block_size", [128, 128]) != [128, 128]:
                raise Unsupported(
                    f"{folder} is quantised ({self._layout}), which is not mxfp4, fp8 in blocks of 128 x 128, or "
                    "saved by sluice.keep_quantised: load it with dequantize=True, save_pretrained, and merge into "
                    "that"
                )
            form = quantised.get("weight_format", self._layout), quantised.get("weight_block", 0)
            self._form = Format(*form)
        self.files = {file: self._sources(file, keys) for file in keys}

    def _sources(self, file: str, keys: Mapping[str, Iterable[str]]) -> dict[str, Source]:
        if self._form is None:
            return {key: Source(key, None) for key in keys[file]}
        codes_end, scales_end = SUFFIXES[self._layout]
        where = {key: other for other, names in keys.items() for key in names}
        found = {}
        for key in keys[file]:
            name = key.removesuffix(codes_end)
            if key.endswith(scales_end) and key.removesuffix(scales_end) + codes_end in where:
                continue
            scales = name + scales_end
            is_packed = key.endswith(codes_end) and scales in where
            found[name if is_packed else key] = Source(key, (where[scales], scales) if is_packed else None)
        return found

    @property
    def is_quantised(self) -> bool:
        return self._form is not None

    def read(self, file: Any, name: str, source: Source, model: torch.nn.Module) -> torch.Tensor:
        """Returns a weight of an open file: as stored if it is plain, else decoded to float32."""
        tensor = file.get_tensor(source.key)
        if source.scales is None:
            return tensor
        from safetensors import safe_open

        with safe_open(self._folder / source.scales[0], "pt") as other:
            scales = other.get_tensor(source.scales[1])
        module = model.get_submodule(name.rpartition(".")[0]) if self._layout != "fp8" else None
        codes = tensor.flatten(2) if tensor.dim() == 4 else tensor.view(torch.uint8)
        halves = 1
        if self._layout == NAME and name.endswith("gate_up_proj"):
            halves = 2 if module.has_gate and module.is_concatenated else 1
        parts = [
            dequantise(*half, self._form, torch.float32)
            for half in zip(codes.chunk(halves, -2), scales.chunk(halves, -2))
        ]
        weight = parts[0] if halves == 1 else torch.cat(parts, -2)
        wanted = tuple(weight.shape)
        if module is not None and module.is_transposed:
            weight = weight.transpose(1, 2)
        elif module is not None and tuple(module.get_parameter(name.rpartition(".")[2]).shape) != wanted:
            raise InvalidArgument(f"{name} is {list(wanted)} in the checkpoint, but the model has another shape")
        return weight
