# SPDX-License-Identifier: Apache-2.0
"""Converts frozen weights in 4 and 8 bits to torch tensors: codes and scales, as sluice/weights.h defines them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._library import load
from ...errors import InvalidArgument
from .descriptors import Descriptors
from .layer_config import WEIGHTS

_DEFAULT_BLOCK = 128


class Format(NamedTuple):
    """Describes the format of packed weights [out, in].

    name   a name of WEIGHTS other than "plain"
    block  for int8 and int4: how many inputs share a scale; 0: 128
    """

    name: str
    block: int = 0

    @property
    def bits(self) -> int:
        """Returns the bits of a code."""
        return 4 if self.name in ("mxfp4", "int4") else 8

    @property
    def scale_dtype(self) -> torch.dtype:
        return {"mxfp4": torch.uint8, "fp8": torch.float32}.get(self.name, torch.bfloat16)

    def shape_of_codes(self, rows: int, columns: int) -> tuple[int, int]:
        """Returns the shape of the codes, which are uint8."""
        return rows, columns * self.bits // 8

    def shape_of_scales(self, rows: int, columns: int) -> tuple[int, int]:
        across = {"mxfp4": 32, "fp8": 128}.get(self.name) or self.block or _DEFAULT_BLOCK
        return -(-rows // 128) if self.name == "fp8" else rows, -(-columns // across)

    def bytes_of(self, rows: int, columns: int) -> int:
        """Returns the bytes of one weight's codes and scales."""
        codes, scales = self.shape_of_codes(rows, columns), self.shape_of_scales(rows, columns)
        return codes[0] * codes[1] + scales[0] * scales[1] * self.scale_dtype.itemsize


def quantise(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales of weights [..., out, in]. InvalidArgument for NaN, infinity and invalid widths."""
    *stack, rows, columns = weight.shape
    if columns * form.bits % 8:
        raise InvalidArgument(f"a width of {columns}, but {form.name} needs a multiple of 2: choose int8 or fp8")
    codes = torch.empty((*stack, *form.shape_of_codes(rows, columns)), dtype=torch.uint8)
    scales = torch.empty((*stack, *form.shape_of_scales(rows, columns)), dtype=form.scale_dtype)
    _each("quantise", form, ("weight", "codes", "scales"), weight.detach(), codes, scales)
    return codes, scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, form: Format, dtype: torch.dtype) -> torch.Tensor:
    """Returns weights [..., out, in]: dtype(f32(code) * f32(scale)), as a layer decodes them."""
    weight = torch.empty((*codes.shape[:-1], codes.shape[-1] * 8 // form.bits), dtype=dtype)
    _each("dequantise", form, ("codes", "scales", "weight"), codes, scales, weight)
    return weight


def check_weights(codes: torch.Tensor, scales: torch.Tensor, form: Format) -> None:
    """Raises InvalidArgument with expert, row and column if a code or a scale means NaN or infinity."""
    _each("check", form, ("codes", "scales"), codes, scales)


def _each(call: str, form: Format, names: tuple[str, ...], *tensors: torch.Tensor) -> None:
    """Calls a function of weights.h for each matrix of the stacks."""
    if form.name not in WEIGHTS or form.name == "plain":
        raise InvalidArgument(f"{form.name!r} is not a format of 4 or 8 bits: use one of {', '.join([*WEIGHTS][1:])}")
    library = load()
    function: Any = getattr(library.lib, f"sluice_weights_{call}")
    items = Descriptors(len(tensors))
    flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in tensors]
    for number in range(flat[0].shape[0]):
        places = [items.fill(n, tensor[number], name) for n, (tensor, name) in enumerate(zip(flat, names))]
        status = function(WEIGHTS[form.name], form.block, *places)
        if status != 0:
            error = library.last_error(status)
            if flat[0].shape[0] > 1:
                error.message = f"matrix {number} of the stack: {error.message}"
            raise error
