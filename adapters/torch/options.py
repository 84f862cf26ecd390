"""What the options of a host's config (sluice.config.Options) say about one layer, in the words of MoeLayer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ... import restore


def refused_policy(options: Any) -> str | None:
    """Why experts that run as the host's modules cannot restore as the options say; None: they can, or nothing is said.

    The graph of such an expert holds its rows, so either both stay or its forward runs again.
    """
    if options.policy is None or options.policy == restore.KEPT:
        return None
    again = again_by_chunk(options.policy[1])
    if all(again):
        return None
    pre_activations = [f'"{name}"' for name in restore.PRE_ACTIVATION if restore.is_computed_again(name)]
    cannot = f"policy {options.policy_name()} cannot be done with experts that run as the host's modules: they "
    if any(again):
        choices = " or ".join([*pre_activations, f'"{restore.KEPT[1]}"'])
        return f'{cannot}run again in every chunk or in none ("pre_activation": {choices} for all)'
    sets = ", ".join(f'"{name}"' for name, (_, one) in restore.SETS.items() if restore.is_computed_again(one))
    kept = restore.set_name(restore.KEPT)
    asked = " or ".join(pre_activations)
    return f'{cannot}keep rows and graph ("{kept}"), or run again ({sets}, or "pre_activation": {asked})'


def again_by_chunk(pre_activation: str | Sequence[str]) -> list[bool]:
    """Whether a policy of pre-activations, of all chunks or of each, runs a host's module again in backward."""
    return [
        restore.is_computed_again(name)
        for name in ([pre_activation] if isinstance(pre_activation, str) else pre_activation)
    ]


def layer_options(options: Any, fused: bool, default_chunks: int = 0) -> dict[str, Any]:
    """Keywords for MoeLayer. fused: whether the library computes the experts.

    A policy that the host's modules cannot do is left out; the adapter has refused it, or said that it did not.
    """
    given: dict[str, Any] = {"num_chunks": options.chunks or default_chunks}
    if options.wgrad_mode is not None:
        given["wgrad_mode"] = options.wgrad_mode
    if options.deduplicate:
        given["deduplicate"] = options.deduplicate
    if options.accumulate is not None:
        given["accumulate"] = options.accumulate
    if options.gradient_pool is not None:
        given["gradient_pool"] = options.gradient_pool
    if options.chunking is not None:
        given["chunking"] = options.chunking
    if options.grouping is not None:
        given["grouping"] = options.grouping
    if options.reuse:
        given["reuse"] = True
        if not fused:  # the host's modules run again, or keep all their rows
            given["restore_pre_activation"] = next(filter(restore.is_computed_again, restore.PRE_ACTIVATION))
    if options.policy is not None and (fused or refused_policy(options) is None):
        given["restore_input"], given["restore_pre_activation"] = options.policy
    return given
