"""What the options of a host's config (sluice.config.Options) say about one layer, in the words of MoeLayer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def refused_policy(options: Any) -> str | None:
    """Why experts that run as the host's modules cannot restore as the options say; None: they can, or nothing is said.

    The graph of such an expert holds its rows, so either both stay or its forward runs again.
    """
    if options.policy is None or options.policy[1] == "recompute" or options.policy == ("keep", "keep"):
        return None
    if runs_again(options.policy[1]):
        return (
            f"policy {options.policy_name()} cannot be done with experts that run as the host's modules: they run "
            'again in every chunk or in none ("middle": "recompute" or "keep" for all)'
        )
    return (
        f"policy {options.policy_name()} cannot be done with experts that run as the host's modules: they keep rows "
        'and graph ("none"), or run again ("S3", "S4", or "middle": "recompute")'
    )


def runs_again(middle: str | Sequence[str]) -> bool:
    """Whether a policy of pre-activations, of all chunks or of each, runs any host's module again in backward."""
    return middle == "recompute" or (not isinstance(middle, str) and "recompute" in middle)


def layer_options(options: Any, fused: bool, default_chunks: int = 0) -> dict[str, Any]:
    """Keywords for MoeLayer. fused: whether the library computes the experts.

    A policy that the host's modules cannot do is left out; the adapter has refused it, or said that it did not.
    """
    given: dict[str, Any] = {"num_chunks": options.chunks or default_chunks}
    if options.wgrad_mode is not None:
        given["wgrad_mode"] = options.wgrad_mode
    if options.deduplicate:
        given["deduplicate"] = True
    if options.accumulate is not None:
        given["accumulate"] = options.accumulate
    if options.chunk_cut is not None:
        given["chunk_cut"] = options.chunk_cut
    if options.policy is not None and (fused or refused_policy(options) is None):
        given["restore_input"], given["restore_middle"] = options.policy
    return given
