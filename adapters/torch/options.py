"""What the options of a host's config (sluice.config.Options) say about one layer, in the words of MoeLayer."""

from __future__ import annotations

from typing import Any


def layer_options(options: Any, fused: bool, default_chunks: int = 0) -> dict[str, Any]:
    """Keywords for MoeLayer. fused: whether the library computes the experts; only then its rows can be restored."""
    given: dict[str, Any] = {"num_chunks": options.chunks or default_chunks}
    if options.wgrad_mode is not None:
        given["wgrad_mode"] = options.wgrad_mode
    if options.deduplicate:
        given["deduplicate"] = True
    if options.chunk_cut is not None:
        given["chunk_cut"] = options.chunk_cut
    if fused and options.policy is not None:
        given["restore_input"], given["restore_middle"] = options.policy
    return given
