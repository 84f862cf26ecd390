# SPDX-License-Identifier: Apache-2.0
"""Writes options (sluice.options) into the library's configs, and reads the numbers of its structs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from ... import restore
from ..._library import load
from ...errors import InvalidArgument
from ...options import LayerOptions, c_fields, rows_of


def number_of(numbers: Mapping[Any, int], value: Any, what: str) -> int:
    """Returns the library's number for a word."""
    if value not in numbers:
        known = ", ".join(str(word) for word in numbers if word is not None)
        raise InvalidArgument(f"{what} {value!r} is unknown: use one of {known}, or leave it out")
    return numbers[value]


def fill(config: Any, options: Any, part: type | None = None) -> list[Any]:
    """Writes options into the library's config, by the columns of the table; absent options leave their fields as is.

    part: the class of the table whose fields the config has; None: the class of `options`. The caller keeps the result
    until the library has copied the config.
    """
    ffi, kept = load().ffi, []
    for name, (field, numbers) in c_fields(part or type(options)).items():
        value = getattr(options, name)
        if numbers is not None:
            setattr(config, field, number_of(numbers, value, name))
        elif isinstance(value, str):
            kept.append(ffi.new("char[]", value.encode()))
            setattr(config, field, kept[-1])
        elif value is not None:
            setattr(config, field, int(value))
    return kept


def values_of(struct: Any) -> dict[str, Any]:
    """Returns the numbers in a struct of the library, by the names of their fields."""
    return {name: getattr(struct, name) for name in _fields_of(load().ffi.typeof(struct))}


@functools.cache
def _fields_of(kind: Any) -> list[str]:
    fields = (kind.item if kind.kind == "pointer" else kind).fields
    unused = ("struct_size", "reserved")
    return [name for name, field in fields if field.type.kind == "primitive" and name not in unused]


def refused_policy(options: Any) -> str | None:
    """Returns why experts that run as modules cannot follow the options' policy; None: they can, or there is none.

    The graph of such an expert holds its rows, so either both are kept or its forward runs again.
    """
    if options.policy is None or options.policy == restore.KEPT:
        return None
    again = again_by_chunk(options.policy[1])
    if all(again):
        return None
    pre_activations = [f'"{name}"' for name in restore.PRE_ACTIVATION if restore.is_computed_again(name)]
    cannot = f"policy {options.policy_name()} is not possible with experts that run as the host's modules: they "
    if any(again):
        choices = " or ".join([*pre_activations, f'"{restore.KEPT[1]}"'])
        return f'{cannot}are recomputed in every chunk or in none ("pre_activation": {choices} for all)'
    sets = ", ".join(f'"{name}"' for name, (_, one) in restore.SETS.items() if restore.is_computed_again(one))
    kept = restore.set_name(restore.KEPT)
    asked = " or ".join(pre_activations)
    return f'{cannot}keep rows and graph ("{kept}"), or are recomputed ({sets}, or "pre_activation": {asked})'


def again_by_chunk(pre_activation: str | Sequence[str]) -> list[bool]:
    """Returns by chunk whether a policy for pre-activations runs a host's module again in backward."""
    return [
        restore.is_computed_again(name)
        for name in ([pre_activation] if isinstance(pre_activation, str) else pre_activation)
    ]


def layer_options(options: Any, fused: bool, default_chunks: int = 0) -> dict[str, Any]:
    """Returns the arguments of MoeConfig that options give. fused: whether the library computes the experts.

    A policy that the host's modules cannot follow is left out; the adapter has refused it, or has printed a message.
    """
    given = {name: getattr(options, name) for name in rows_of(LayerOptions)}
    given["chunks"] = options.chunks or default_chunks
    if not fused and options.reuse:  # the host's modules run again, or keep all their rows
        given["policy"] = ("adaptive", next(filter(restore.is_computed_again, restore.PRE_ACTIVATION)))
    elif not fused and refused_policy(options) is not None:
        given["policy"] = None
    return given
