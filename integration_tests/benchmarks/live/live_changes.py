# SPDX-License-Identifier: Apache-2.0
"""Draws by a seed how the times of the layers of live.py change during training."""

import random
from collections.abc import Iterator, Sequence

NUM_CHANGES = 30


def changes(layers: int, base_s: float) -> Iterator[list[float]]:
    """Seconds of each layer after each change. The seed is fixed before any measurement. Each change starts from the
    base: a run of layers becomes 2.5 to 9 times as slow, or a longer run 3 to 5 times as fast."""
    draw = random.Random(32)
    for _ in range(NUM_CHANGES):
        is_slower = draw.random() < 0.75
        count = draw.randint(2, max(2, layers // 3)) if is_slower else draw.randint(layers // 4, layers // 2)
        first = draw.randint(0, layers - count)
        factor = draw.uniform(2.5, 9.0) if is_slower else 1 / draw.uniform(3.0, 5.0)
        yield [base_s * (factor if first <= layer < first + count else 1.0) for layer in range(layers)]


def noisy(seconds: Sequence[float], batch: int, share: float) -> list[float]:
    """Seconds of each layer in this batch, changed by up to `share`, the same on all ranks."""
    draw = random.Random(f"{batch} noise")
    return [value * draw.uniform(1 - share, 1 + share) for value in seconds]
