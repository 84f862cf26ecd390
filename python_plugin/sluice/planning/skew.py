# SPDX-License-Identifier: Apache-2.0
"""Computes the skew of ranks if expert loads follow Zipf's law."""

from __future__ import annotations

import random
from functools import lru_cache

from .errors import BadInput
from .routing import skew_of


@lru_cache(maxsize=64)
def zipf_shares(experts: int, exponent: float, top_k: int) -> tuple[float, ...]:
    """Returns the share of rows by expert, largest first: 1 / place ** exponent. An expert gets each token at most
    once, so shares are limited to 1 / K; the excess is distributed over the others in proportion."""
    if not 0 <= exponent <= 4:
        raise BadInput(f"--zipf is {exponent:g}; it must be in [0, 4] (0: balanced)")
    if top_k > experts:
        raise BadInput(f"--top-k is {top_k}, with {experts} experts; it can be at most that")
    weights = [1 / (place + 1) ** exponent for place in range(experts)]
    limit, full = 1 / top_k, 0
    while True:
        rest = sum(weights[full:])
        scale = (1 - full * limit) / rest if rest > 0 else 0.0
        over = sum(weight * scale > limit * (1 + 1e-12) for weight in weights[full:])
        if over == 0:
            return tuple([limit] * full + [weight * scale for weight in weights[full:]])
        full += over


def zipf_skew(experts: int, ranks: int, exponent: float, top_k: int, seed: int) -> float:
    """Returns rows of the most loaded rank divided by the mean, with experts placed at random."""
    shares = list(zipf_shares(experts, exponent, top_k))
    random.Random(seed).shuffle(shares)
    return skew_of(shares, ranks)
